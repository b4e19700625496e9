"""How long it usually is from one round to the next, whatever stands still meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from gossip_kit import announce_of
from planning_kit import RULES, Identities, fresh

from gossip.chain.timing import Timing
from gossip.interval import Interval


def after(*seconds: float) -> float:
    interval = Interval()
    for one in seconds:
        interval.add(one)
    return interval.usual_s


def test_an_outage_counts_for_little() -> None:
    """SIGSTOP, a laptop's lid: the estimate of what is left would be too high for ten rounds."""
    assert after(*[4.0] * 10, 600.0) < 2 * 4.0
    assert after(*[4.0] * 10, 600.0, 4.0, 4.0, 4.0) < 1.25 * 4.0


def test_rounds_that_have_become_longer_are_believed_after_a_few() -> None:
    assert after(*[4.0] * 10, *[40.0] * 6) > 0.75 * 40.0


def test_long_ones_now_and_then_are_no_outage() -> None:
    """Rounds of islands that arrive apart come in bursts; the mean is what is to be known."""
    bursts = after(*[0.1, 0.1, 0.1, 10.0] * 10)
    assert bursts > 0.3 * 10.0


@pytest.mark.parametrize("repeated", [0.0, 0.001])
def test_rounds_that_are_repeated_make_none_of_what_follows_an_outage(repeated: float) -> None:
    interval = Interval()
    for _ in range(5):
        interval.add(repeated, repeated=True)
    interval.add(10.0)
    assert interval.usual_s == pytest.approx(10.0)


def test_rounds_that_are_repeated_say_nothing_once_there_was_another() -> None:
    """Who was away for a while makes up for the rounds of the others in moments."""
    interval = Interval()
    for _ in range(5):
        interval.add(60.0)
    for _ in range(20):
        interval.add(0.05, repeated=True)
    assert interval.usual_s == pytest.approx(60.0)


def test_rounds_of_others_that_take_longer_count() -> None:
    """A member whose link has become slow sees no others any more."""
    interval = Interval()
    for _ in range(5):
        interval.add(5.0)
    for _ in range(20):
        interval.add(14.0, repeated=True)
    assert interval.usual_s > 13.0


def test_rounds_that_others_had_made_leave_the_usual_time_alone(identities: Identities) -> None:
    """Nor does the one that this node comes into the middle of, nor the way past by a download."""
    members = identities(3)
    there = [announce_of(one.peer_id) for one in members]
    plan = fresh(members, there)
    certificate: Any = SimpleNamespace(outcome=SimpleNamespace(codec=plan.codec))
    timing, now = Timing(), 0.0
    for seconds in (60.0,) * 4:
        now += seconds
        timing.committed(now, certificate, plan, RULES, there)
    for _ in range(20):
        now += 0.05
        timing.committed(now, certificate, None, RULES, there)
    timing.committed(now + 6.0, certificate, plan, RULES, there)
    assert timing.round_s == pytest.approx(60.0)
    timing.leapt()
    timing.committed(now + 9000.0, certificate, plan, RULES, there)
    assert timing.round_s == pytest.approx(60.0)
