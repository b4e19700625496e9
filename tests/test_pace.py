"""How many inner steps an island takes, and how long its merges usually are."""

from __future__ import annotations

import pytest

from node.pace import Pace, Usual, inner_steps
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
