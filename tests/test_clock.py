"""The wall clock of a node: set by nobody while it runs."""

from __future__ import annotations

import time

from node.clock import SteadyClock, wall


def test_it_is_the_wall_clock() -> None:
    assert abs(wall() - time.time()) < 5.0


def test_an_hour_that_somebody_sets_the_clock_by_is_not_seen() -> None:
    now = {"wall": 1_000_000.0, "since": 50.0}
    clock = SteadyClock(lambda: now["wall"], lambda: now["since"])
    assert clock() == 1_000_000.0
    for step in (3600.0, -7200.0):
        now["wall"] += step
        now["since"] += 10.0
    assert clock() == 1_000_020.0


def test_time_slept_through_counts() -> None:
    now = {"since": 50.0}
    clock = SteadyClock(lambda: 1_000_000.0, lambda: now["since"])
    now["since"] += 8 * 3600.0
    assert clock() == 1_000_000.0 + 8 * 3600.0
