"""What is told of something long: how far it has come, how fast, and how long it will take."""

from __future__ import annotations

import re
from itertools import pairwise

from node.headway import FIRST_S, LONGEST_S, Headway


class Hour:
    """A download of ``size`` bytes in 3,600 seconds, chunk by chunk."""

    def __init__(self, size: int, **given: object) -> None:
        self.now = 0.0
        self.lines: list[tuple[float, str]] = []
        self.size = size
        headway = Headway(
            lambda text: self.lines.append((self.now, text)),
            clock=lambda: self.now,
            **given,  # type: ignore[arg-type]
        )
        for second in range(1, 3601):
            self.now = float(second)
            headway(size * second // 3600, size, 3)


def test_a_long_one_is_told_of_more_and_more_seldom() -> None:
    hour = Hour(36 * 10**9)
    times = [when for when, _ in hour.lines]
    assert times[0] == FIRST_S
    pauses = [b - a for a, b in pairwise(times)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_S
    assert len(times) < 80


def test_what_is_left_is_told() -> None:
    when, line = Hour(36 * 10**9).lines[-1]
    assert re.fullmatch(r"9\d%, 3\d\.\d of 36\.0 GB, from 3 peers, 10\.0 MB/s, \d+[sm] left", line)
    assert when > 3500


def test_a_short_one_is_not() -> None:
    lines: list[str] = []
    headway = Headway(lines.append, clock=lambda: 0.0)
    for done in range(10):
        headway(done, 10)
    assert lines == []


def test_parts_count_together() -> None:
    now, lines = [0.0], list[str]()
    headway = Headway(lines.append, total=4_000_000, clock=lambda: now[0])
    headway(1_000_000, 1_000_000)
    headway.part_done(1_000_000)
    now[0] = 10.0
    headway(1_000_000, 3_000_000, 1)
    assert lines == ["50%, 2.0 of 4.0 MB, from 1 peer, 0.2 MB/s, 10s left"]


def test_files_are_counted() -> None:
    now, lines = [0.0], list[str]()
    headway = Headway(lines.append, unit="files", clock=lambda: now[0])
    now[0] = 10.0
    headway(100, 1000)
    assert lines == ["10%, 100 of 1,000 files, 1m left"]
    headway(101, 1000)
    assert len(lines) == 1


def test_what_was_there_before_says_nothing_of_speed() -> None:
    lines, now = list[str](), [0.0]
    headway = Headway(lines.append, clock=lambda: now[0])
    headway.had(3 * 10**9)  # a first try
    headway.had(8 * 10**9)
    headway(8 * 10**9, 10**10)
    now[0] = 100.0
    headway(9 * 10**9, 10**10, 2)
    assert lines == ["90%, 9.0 of 10.0 GB, from 2 peers, 10.0 MB/s, 1m left"]


def test_what_was_there_of_a_part_before_says_nothing_of_the_next_one() -> None:
    lines, now = list[str](), [0.0]
    headway = Headway(lines.append, total=2 * 10**10, clock=lambda: now[0])
    headway.had(10**10)
    headway.part_done(10**10)
    headway.had(0)
    now[0] = 100.0
    headway(10**9, 10**10, 2)
    assert lines == ["55%, 11.0 of 20.0 GB, from 2 peers, 10.0 MB/s, 15m left"]
