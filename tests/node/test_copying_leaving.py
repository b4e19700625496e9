"""A node that leaves while the best checkpoint is on its way to the second place."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from checkpoint_kit import make
from fsspec.implementations.local import LocalFileSystem
from saving_kit import inline, keeper_at

from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.checkpoint_copy import CheckpointCopy
from node.checkpoints.copying import Copying
from node.checkpoints.index import verify
from node.checkpoints.names import INDEX
from node.monitor.events import Problem
from protocols.errors import OperatorError


@pytest.mark.parametrize("hangs", [False, True])
async def test_the_last_checkpoint_is_copied_though_the_best_has_been_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """One that hangs would keep it from being tried at all."""
    now = [0.0]
    monkeypatch.setattr("node.checkpoints.copying.time", SimpleNamespace(monotonic=lambda: now[0]))
    began, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
    copied, events = list[str](), list[Any]()

    class Place:
        url = "s3://bucket"

        def put(self, checkpoint: Path, moved: Callable[[], None]) -> None:
            moved()
            copied.append(checkpoint.name)

        def put_best(self, checkpoint: Path, moved: Callable[[], None]) -> None:
            began.set()
            now[0] += 1000.0 if hangs else 1.0
            try:
                while not goes_on.wait(10.0 if hangs else 0.01):
                    moved()
                moved()
                copied.append(checkpoint.name)
            except Exception as error:
                raise OperatorError("E407", "cannot write", str(error), "") from error
            finally:
                ended.set()

    store = CheckpointStore(tmp_path)
    log = keeper_at(tmp_path, events).events
    copying = Copying(cast(CheckpointCopy, Place()), store, log, inline)
    make(store, 1, loss=1.5)
    await copying.soon(make(store, 2, loss=1.7).path)
    try:
        async with asyncio.timeout(8):
            assert await asyncio.to_thread(began.wait, 5)
            await copying.soon(make(store, 3, loss=1.8).path)
            await copying.done()
            assert copied == ["ckpt-00000002", "ckpt-00000003"]
            if hangs:
                goes_on.set()
            assert await asyncio.to_thread(ended.wait, 5), "it ends as it moves"
    finally:
        goes_on.set()
    assert len(copied) == 2
    assert not [one for one in events if isinstance(one, Problem)]


async def test_a_best_that_was_given_up_removes_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows nothing of the newest, which came there beside it."""
    began, goes_on = threading.Event(), threading.Event()
    put_file, threads = LocalFileSystem.put_file, list[threading.Thread]()

    def slow(files: Any, here: str, there: str, **named: Any) -> None:
        if there.endswith(f"ckpt-00000001/{INDEX}"):
            threads.append(threading.current_thread())
            began.set()
            goes_on.wait(10)
        put_file(files, here, there, **named)

    monkeypatch.setattr(LocalFileSystem, "put_file", slow)
    place, store = tmp_path / "copy", CheckpointStore(tmp_path / "here")
    log = keeper_at(tmp_path / "here", []).events
    copying = Copying(CheckpointCopy(str(place), keep=1), store, log, inline)
    make(store, 1, loss=1.5)
    await copying.soon(make(store, 2, loss=1.7).path)
    try:
        async with asyncio.timeout(8):
            assert await asyncio.to_thread(began.wait, 5)
            newest = make(store, 3, loss=1.8).path
            await copying.soon(newest)
            await copying.done()
    finally:
        goes_on.set()
    threads[0].join(5)
    assert verify(place / newest.name) == verify(newest)


def test_what_ends_a_copy_keeps_it_from_removing_others(tmp_path: Path) -> None:
    """As where another has taken its turn meanwhile."""
    place, store = tmp_path / "copy", CheckpointStore(tmp_path / "here")
    copy = CheckpointCopy(str(place), keep=1)
    copy.put(make(store, 1).path)
    after: list[bool] = []

    def moved() -> None:
        if (place / "ckpt-00000002" / INDEX).exists():
            after.append(True)
            if len(after) > 1:
                raise ValueError("given up")

    with pytest.raises(OperatorError, match="given up"):
        copy.put(make(store, 2).path, moved)
    assert sorted(path.name for path in place.iterdir()) == ["ckpt-00000001", "ckpt-00000002"]
