"""Ranks for tests: processes that are forked, or this one among others that are played."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from torch.testing._internal.distributed.fake_pg import FakeStore

WAIT_S = 120.0
IMPORTED = ["pytest", "torch.distributed.fsdp", "node.script.joining", "node.trainer.loop"]


@contextmanager
def process_group(backend: str, **given: Any) -> Iterator[None]:
    """One of the test's own process; torch's hook for uncaught exceptions goes with it."""
    before = sys.excepthook
    dist.init_process_group(backend, **given)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = before


@contextmanager
def fake_ranks(size: int, rank: int = 0) -> Iterator[None]:
    """This process is one of so many ranks; collective calls return and move nothing."""
    with process_group("fake", store=FakeStore(), rank=rank, world_size=size):
        yield


def started(work: Callable[..., None], given: tuple[Any, ...], ranks: int) -> None:
    """Run ``work(rank, *given)`` in a process for each rank, as torch's ``spawn`` does.

    They are forked off one that has imported torch once, and done nothing else. Raises what torch
    does where one of them fails.
    """
    multiprocessing.set_forkserver_preload(IMPORTED)
    start_processes(work, given, ranks, start_method="forkserver")  # type: ignore[no-untyped-call]


def forked(work: Callable[[int, Path], None], ranks: int, directory: Path) -> None:
    """Run ``work(rank, directory)`` in a process for each rank, with gloo on loopback.

    Raises AssertionError where one of them fails, or takes too long.
    """
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_one, args=(work, rank, directory)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(WAIT_S)
    for process in processes:
        process.kill()
    assert not [file.read_text() for file in sorted(directory.glob("error-*"))]
    assert [process.exitcode for process in processes] == [0] * ranks


def _one(work: Callable[[int, Path], None], rank: int, directory: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    status = 1
    try:
        work(rank, directory)
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends here, and leaves a word
        (directory / f"error-{rank}").write_text(traceback.format_exc())
    os._exit(status)
