"""Ctrl-C at every line of a script's part in a round: nothing that the node waits for gets lost."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from script_kit import TARGET, Played, committing

import node
from node.trainer.channel import (
    Applied,
    Command,
    Leaving,
    Report,
    Save,
    Saved,
    Snapshot,
    Staged,
    Stop,
    Stopped,
)

pytestmark = pytest.mark.timeout(300)  # some hundred small islands
OURS = ("script/session.py", "script/progress.py", "trainer", "interrupts.py")
PLACES = tuple(str(Path(node.__file__).parent / place) for place in OURS)
FIRST, LAST = "first", "last"  # checkpoints


class Written:
    """A checkpoint that is on the disk at once."""

    done = True

    def finish(self) -> None:
        return None


class CtrlC:
    """Presses Ctrl-C before some of the lines of a script's side that are run in the block."""

    def __init__(self, *lines: int) -> None:
        self.lines, self.count = lines, 0

    def __enter__(self) -> CtrlC:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        return self._line if frame.f_code.co_filename.startswith(PLACES) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        self.count += event == "line"
        if event == "line" and self.count in self.lines:
            signal.raise_signal(signal.SIGINT)
        return self._line


def answering(played: Played, report: Report) -> list[Command]:
    """A node that merges each snapshot, saves after each round, and saves when it is left."""
    match report:
        case Applied() if report.round:
            return [Save(FIRST)]
        case Leaving():
            return [Save(LAST)]
        case Saved(directory) if directory == LAST:
            return [Stop()]
        case _:
            return committing(played, report)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Plays a script before its first snapshot, and notes whether it has the vectors locked."""
    monkeypatch.setattr("node.trainer.files.save", lambda *_, **__: Written())

    def made() -> Any:
        played: Any = Played(answering)
        played.train(TARGET - 1)
        played.locked = False
        take, give = played.vectors._try_lock, played.vectors._unlock

        def lock() -> bool:
            played.locked = take()
            return bool(played.locked)

        def unlock() -> None:
            give()
            played.locked = False

        monkeypatch.setattr(played.vectors, "_try_lock", lock)
        monkeypatch.setattr(played.vectors, "_unlock", unlock)
        return played

    return made


def takes_part(played: Any) -> None:
    """A snapshot, a merge, and a checkpoint from its beginning to its end."""
    for _ in range(3):
        played.train()
    assert len(played.script.of(Saved)) == 1


def reads(played: Any) -> None:
    """The outer parameters, as a script does that evaluates them or writes them down."""
    played.joined.outer_parameters()


def each_line(play: Callable[[], Any], act: Callable[[Any], object]) -> Iterator[int]:
    """The number of each line that is run when nobody presses anything."""
    played = play()
    with CtrlC() as pressed:
        act(played)
    assert pressed.count > 20
    yield from range(1, pressed.count + 1)


def interrupt(played: Any, act: Callable[[Any], object], *lines: int) -> None:
    with contextlib.suppress(KeyboardInterrupt), CtrlC(*lines):  # the last line may be the last
        act(played)


@pytest.mark.parametrize("act", [takes_part, reads])
def test_no_command_gets_lost(play: Callable[[], Any], act: Callable[[Any], object]) -> None:
    """Each is answered before the script is interrupted, or while it leaves."""
    for line in each_line(play, act):
        played = play()
        interrupt(played, act, line)
        played.joined.leave()
        told, where = played.script, f"Ctrl-C before line {line}"
        merged = len(told.of(Snapshot))
        assert not played.locked, where
        assert len(told.of(Applied)) == 1 + merged, where
        for kind in (Staged, Saved):
            saved = sorted(report.directory for report in told.of(kind))
            assert saved == [FIRST] * merged + [LAST], where
        assert told.of(Stopped), where


@pytest.mark.parametrize("act", [takes_part, reads])
def test_who_does_not_wait_is_gone_for_the_node(
    play: Callable[[], Any], act: Callable[[Any], object]
) -> None:
    """A second Ctrl-C may break off what the node waits for: then it sees the channel's end."""
    open_still = 0
    for line in each_line(play, act):
        played = play()
        interrupt(played, act, line, line + 1)
        told, where = played.script, f"Ctrl-C before line {line} and the next"
        broken_off = told.closed
        played.joined.leave()
        assert told.closed, where
        assert not played.locked, where
        if broken_off:
            continue
        open_still += 1
        assert told.of(Stopped), where
        merged = len(told.of(Snapshot))
        assert len(told.of(Applied)) == 1 + merged, where
    assert open_still, "each time the second one came while the node waited"
