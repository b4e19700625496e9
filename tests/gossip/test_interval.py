"""How long it usually is from one round to the next, whatever stands still meanwhile."""

from __future__ import annotations

import pytest

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
    assert interval.usual_s >= 3.0
