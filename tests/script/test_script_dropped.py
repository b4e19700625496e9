"""An island that nobody has any more and that has not left, as where a script's main() returns."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from script_kit import Parting
from torch import nn

from node.script import at_exit as exits
from node.script.joining import join
from node.script.progress import ScriptProgress
from node.script.session import Joined
from node.trainer.channel import Leaving, Stopped

LEFT = [Leaving, Stopped]


class Python:
    """What is to be called at its end, and the nodes that it has started."""

    def __init__(self) -> None:
        self.hooks: list[Callable[[], None]] = []
        self.nodes: list[Parting] = []

    def start(self, *_: object) -> tuple[None, socket.socket]:
        self.nodes.append(Parting())
        return None, self.nodes[-1].ours

    def end(self) -> None:
        for hook in self.hooks:
            hook()

    @property
    def heard(self) -> list[list[type]]:
        return [[type(report) for report in node.heard] for node in self.nodes]


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> Iterator[Python]:
    python = Python()
    monkeypatch.setattr(threading, "_register_atexit", python.hooks.append)
    monkeypatch.setattr("node.script.joining._start_node", python.start)
    monkeypatch.setattr(Joined, "begin", lambda *_: None)
    exits._leave_at_exit.cache_clear()
    yield python
    exits._leave_at_exit.cache_clear()
    for node in python.nodes:
        node.close()


def joined(place: Path, **settings: Any) -> Joined:
    model = nn.Linear(4, 3)
    return join(model, torch.optim.SGD(model.parameters()), dir=place, **settings)


def main(place: Path, ends: type[BaseException] | None = None) -> None:
    """A script's own function, as most have one."""
    island = joined(place)
    assert not island.over
    if ends is not None:
        raise ends


@pytest.mark.parametrize("ends", [None, SystemExit, KeyboardInterrupt, ValueError])
def test_it_leaves_in_order_when_python_ends(
    python: Python, tmp_path: Path, ends: type[BaseException] | None
) -> None:
    """Its optimizer's moments, and what it has learnt since the last merge, would be nowhere."""
    with suppress(SystemExit, KeyboardInterrupt, ValueError):  # and with it the function's frame
        main(tmp_path, ends)
    assert python.heard == [[]]  # no place to wait for a node: it may be in the midst of a step
    python.end()
    assert python.nodes[0].ended()
    assert python.heard == [LEFT]
    python.end()
    assert python.heard == [LEFT]


def test_the_next_one_has_it_leave_first(python: Python, tmp_path: Path) -> None:
    """As where a notebook's cell is run again: it would have the state directory."""
    main(tmp_path)
    island = joined(tmp_path)
    assert python.nodes[0].ended()
    assert python.heard == [LEFT, []]
    island.abandon()


def test_it_is_the_affair_of_the_process_that_has_joined(
    python: Python, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of a data loader has it by fork."""
    main(tmp_path)
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        joined(tmp_path / "other").abandon()
    assert python.heard == [[], []]


def test_a_forked_child_that_ends_within_the_block_leaves_the_island_to_its_parent(
    python: Python, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(tmp_path) as island:
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: -1)
            island.__exit__(SystemExit, SystemExit(0), None)
        assert python.heard == [[]]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a process with threads
def test_a_child_that_joins_by_itself_leaves_alone_the_one_of_its_parent(
    python: Python, tmp_path: Path
) -> None:
    """It has that by fork, with the channel to its node."""
    island = joined(tmp_path)

    def child() -> None:
        own = joined(tmp_path / "child")
        python.end()
        assert own.over
        assert not island.over

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0
    assert python.heard == [[]]
    island.leave()
    assert python.nodes[0].ended()  # or it may be about to hear the last word
    assert python.heard == [LEFT]


def test_nothing_is_kept_of_one_that_is_over(python: Python, tmp_path: Path) -> None:
    """Also where the script's evaluation has the island, which has it in turn."""

    def run() -> weakref.ref[ScriptProgress]:
        island = joined(tmp_path, evaluate=lambda: float(island.round))
        island.leave()
        return weakref.ref(island._progress)

    progress = run()
    gc.collect()
    assert progress() is None
    python.end()
    assert python.heard == [LEFT]
