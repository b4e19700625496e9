"""Whatever befalls members, in whatever order: they end as one swarm, and everybody's work counts.

Members are killed and start again from what they had saved, now or some time before; they are
frozen, slowed, cut off, replaced by others, leave, and go down all at once. What happens when is
drawn from a seed; what a seed found once stays in ``FOUND``.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from trouble_kit import Drawn, anything_happens

pytestmark = [
    pytest.mark.usefixtures("remembered_signatures"),
    pytest.mark.timeout(300),
]

FOUND = (
    6,  # a round behind some who had all started again, and so held none of its parts
    221,  # two sides of equal work, and the one with more members was to come over
)


def drawn(dice: random.Random) -> Drawn:
    return Drawn(
        founders=dice.choice([1, 2, 3, 4]),
        joiners=dice.choice([1, 2, 3]),
        think=dice.choice([(1.0, 1.1), (0.3, 1.5), (0.12, 0.12)]),
        upload=dice.choice([5e5, 1e6, 1e7]),
        codec=dice.choice(["fp32", "int4"]),
        fragments=dice.choice([1, 1, 2]),
        records=dice.random() < 0.6,
    )


@pytest.mark.parametrize("seed", [*FOUND, 2])
def test_whatever_happens_there_is_one_swarm(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, drawn, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 3, *range(100, 300)])
def test_whatever_happens_there_is_one_swarm_many_times(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, drawn, tmp_path)
