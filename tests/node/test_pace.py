"""How many inner steps an island takes, and how long its merges usually are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.island.pace import SAME_SPEED, Pace, Usual, inner_steps
from node.trainer.channel import StepDone


@pytest.mark.parametrize(
    ("mine", "others", "wanted"),
    [
        (0.0, [4.0], 40),
        (4.0, [], 40),
        (4.0, [4.2], 40),
        (2.0, [4.0], 20),
        (0.01, [4.0, 4.0], 1),
        (0.01, [4.0], 5),
    ],
)
def test_slow_islands_take_fewer_steps(mine: float, others: list[float], wanted: int) -> None:
    assert inner_steps(40, mine, others) == wanted


@given(st.integers(1, 500), st.floats(0.01, 100), st.floats(0.01, 100))
def test_nobody_needs_longer_than_the_fastest(target: int, mine: float, fastest: float) -> None:
    found = inner_steps(target, mine, [fastest, fastest])
    assert 1 <= found <= target
    if found > 1:  # but for those who are nearly as fast
        assert found / mine <= target / fastest / SAME_SPEED * 1.001
    if 1 < found < target:
        assert found / mine <= target / fastest * 1.001


def test_what_a_duration_seldom_exceeds() -> None:
    steady, uneven = Usual(), Usual()
    for turn in range(40):
        steady.add(2.0)
        uneven.add(2.0 + turn % 2)
    assert steady.most == pytest.approx(2.0)
    assert 2.3 < uneven.mean < 2.7
    assert uneven.most > 3.0


def test_a_pace_counts_steps_and_tokens() -> None:
    pace = Pace()
    for step in range(1, 4):
        pace.add(StepDone(0, step, 2.5, 1.0, 0.1, 512, 0.25))
    assert (pace.step, pace.tokens, pace.busy_s) == (3, 1536, 0.75)
    assert pace.steps_per_second == pytest.approx(4.0)


def paced(*seconds: float) -> Pace:
    pace = Pace()
    for step, taken in enumerate(seconds, 1):
        pace.add(StepDone(0, step, 2.5, 1.0, 0.1, 512, taken))
    return pace


def test_a_pace_is_that_of_the_time_and_not_that_of_most_steps() -> None:
    """A trainer that is stopped for 0.3 s after each 0.1 s: 24 steps of 10 ms take a second."""
    turn = [0.01] * 9 + [0.31]
    for steps in range(60, 80):
        pace = paced(*(turn * 8)[:steps])
        assert pace.steps_per_second == pytest.approx(25.0, rel=0.35)
        assert pace.tokens_per_second == pytest.approx(512 * pace.steps_per_second)


def test_the_first_step_does_not_count_where_there_are_others() -> None:
    assert paced(30.0).steps_per_second == pytest.approx(1 / 30)
    assert paced(30.0, 0.1).steps_per_second == pytest.approx(10.0)


def test_an_outage_is_soon_forgotten_and_a_slower_pace_soon_learnt() -> None:
    assert paced(*[0.1] * 50, 3600.0, *[0.1] * 60).steps_per_second > 8.0
    assert paced(*[0.1] * 50, *[10.0] * 60).steps_per_second < 0.12
