"""A script that trains in a thread of its own, which goes on when the main one has ended.

The node is played, and the end of Python too.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from node.script import at_exit as exits
from node.script import joining
from node.script.joining import join
from node.script.session import Joined
from protocols.errors import OperatorError

WAIT_S = 30.0


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """What is to be called when Python ends."""
    hooks: list[Callable[[], None]] = []
    ends: list[socket.socket] = []

    def start(*_: object) -> tuple[None, socket.socket]:
        ends.extend(socket.socketpair())
        return None, ends[-1]

    monkeypatch.setattr(threading, "_register_atexit", hooks.append)
    monkeypatch.setattr(joining, "_start_node", start)
    monkeypatch.setattr(Joined, "begin", lambda *_: None)
    exits._leave_at_exit.cache_clear()
    yield hooks
    exits._leave_at_exit.cache_clear()
    for end in ends:
        end.close()


class Training(threading.Thread):
    """It pauses in its work until somebody waits for it."""

    def __init__(self, work: Callable[[Training], None]) -> None:
        super().__init__(daemon=False)
        self.work, self.at_work, self.awaited = work, threading.Event(), threading.Event()

    def run(self) -> None:
        self.work(self)

    def join(self, timeout: float | None = None) -> None:
        self.awaited.set()
        super().join(WAIT_S if timeout is None else timeout)

    def pause(self) -> None:
        self.at_work.set()
        self.awaited.wait(WAIT_S)


@pytest.mark.parametrize("at", ["joins", "has joined", "steps"])
def test_the_island_stays_until_the_thread_that_trains_has_ended(
    at_exit: list[Callable[[], None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    """Python calls what is to be called at its end before it waits for threads."""
    model = nn.Linear(4, 3)
    seen: list[Any] = []
    monkeypatch.setattr(Joined, "leave", lambda island: (seen.append("left"), island.abandon()))
    monkeypatch.setattr(Joined, "_follow", lambda *_, **__: None)  # nothing is due

    def work(thread: Training) -> None:
        if at == "joins":
            monkeypatch.setattr(Joined, "begin", lambda _: thread.pause())
            islands.append(join(model, torch.optim.SGD(model.parameters()), dir=tmp_path))
        islands[0]._progress.report = lambda *_: None  # type: ignore[method-assign]
        if at == "has joined":
            thread.pause()
        islands[0].step(tokens=8)
        if at == "steps":
            thread.pause()
        seen.append(islands[0].step(tokens=8))

    islands: list[Joined] = []
    if at != "joins":
        islands.append(join(model, torch.optim.SGD(model.parameters()), dir=tmp_path))
    thread = Training(work)
    thread.start()
    try:
        assert thread.at_work.wait(WAIT_S)
        (hook,) = at_exit
        hook()
        assert seen == [True, "left"]
    finally:
        thread.join()
        with suppress(IndexError):
            islands[0].abandon()


def test_an_executor_s_thread_is_not_waited_for(
    at_exit: list[Callable[[], None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It idles for ever: Python tells it to end, but only afterwards."""
    left: list[Joined] = []

    def leave(island: Joined) -> None:
        left.append(island)

    monkeypatch.setattr(Joined, "leave", leave)
    monkeypatch.setattr(threading.Thread, "join", lambda *_: pytest.fail("waited"))
    pool, model = ThreadPoolExecutor(1), nn.Linear(4, 3)
    try:
        joined = pool.submit(join, model, torch.optim.SGD(model.parameters()), dir=tmp_path)
        island = joined.result(WAIT_S)
        at_exit[0]()
        assert left == [island]
        (island.thread,) = pool._threads
        at_exit[0]()
        assert left == [island] * 2
    finally:
        pool.shutdown(wait=False)
        island.abandon()


def test_a_thread_that_nobody_would_wait_for_is_not_waited_for(
    at_exit: list[Callable[[], None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon thread ends with the main one."""
    model, go = nn.Linear(4, 3), threading.Event()
    left: list[Joined] = []
    joined: list[Joined] = []

    def leave(island: Joined) -> None:
        left.append(island)

    def work() -> None:
        joined.append(join(model, torch.optim.SGD(model.parameters()), dir=tmp_path))
        there.set()
        go.wait(WAIT_S)

    monkeypatch.setattr(Joined, "leave", leave)
    there = threading.Event()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert there.wait(WAIT_S)
    at_exit[0]()
    assert left == joined
    go.set()
    thread.join(WAIT_S)
    joined[0].abandon()


def test_who_joins_when_the_main_thread_has_ended_is_refused_before_a_node_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python then gives no thread to what writes checkpoints."""

    def refuse(_: object) -> None:
        raise RuntimeError("can't register atexit after shutdown")

    monkeypatch.setattr(threading, "_register_atexit", refuse)
    monkeypatch.setattr(joining, "_start_node", lambda *_: pytest.fail("started"))
    exits._leave_at_exit.cache_clear()
    model = nn.Linear(4, 3)
    with pytest.raises(OperatorError, match="main thread has ended") as caught:
        join(model, torch.optim.SGD(model.parameters()), dir=tmp_path)
    assert caught.value.code == "E204"
