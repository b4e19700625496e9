"""When a peer that is sent something has taken too little of it for too long."""

from __future__ import annotations

import math
import socket

import pytest

from protocols.lanes import moves as lane_moves
from protocols.lanes.moves import LaneProgress, Sending

STALL, MIN_RATE = 10.0, 100.0
HELD = 10_000  # bytes in the kernel at first


def sending() -> Sending:
    return Sending(b"", None, stall=STALL, min_rate=MIN_RATE, done=lambda error: None)


def looks(monkeypatch: pytest.MonkeyPatch, what: Sending | None, *left: int) -> list[bool]:
    """Whether it may go on, at each look that finds so many bytes in the kernel."""
    held = iter((HELD, *left))
    monkeypatch.setattr(lane_moves, "unacknowledged", lambda sock: next(held))
    found = []
    with socket.socket() as sock:
        progress = LaneProgress()
        progress.blocked(sock)
        for _ in left:
            now = progress.at + STALL
            found.append(progress.acknowledged(sock, now, what))
            progress.at = now
    return found


@pytest.mark.parametrize(
    ("left", "goes_on"),
    [
        ((9_000, 8_000), [True, True]),  # just as much as it has to
        ((9_998, 9_996), [True, False]),  # two bytes at a time
        ((9_998, 8_000, 7_998), [True, True, True]),  # it had no room until just now
        ((9_000, 9_000), [True, False]),  # nothing any more
        ((10, 0), [True, True]),  # all that there is
    ],
)
def test_who_takes_too_little_twice_is_given_up(
    monkeypatch: pytest.MonkeyPatch, left: tuple[int, ...], goes_on: list[bool]
) -> None:
    assert looks(monkeypatch, sending(), *left) == goes_on


def test_who_is_to_answer_may_take_the_rest_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is with the kernel: nothing of a body is kept for it any more."""
    assert looks(monkeypatch, None, 9_998, 9_996, 9_994) == [True, True, True]


def test_who_waits_for_the_limit_of_the_node_is_not_slow() -> None:
    progress, what = LaneProgress(), sending()
    assert progress.deadline(None, what) == progress.at + STALL
    what.queued = True
    assert progress.deadline(None, what) == math.inf
