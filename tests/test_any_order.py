"""Whatever befalls members, in whatever order: they end as one swarm, and everybody's work counts.

Members are killed and start again from what they had saved, now or some time before; they are
frozen, slowed, cut off, replaced by others, leave, and go down all at once. What happens when is
drawn from a seed; what a seed found once stays in ``FOUND``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from any_order_kit import HEALED_S, befallen
from catching_up_kit import coming_together, played, scene
from exchange_kit import until

pytestmark = [
    pytest.mark.usefixtures("remembered_signatures"),
    pytest.mark.timeout(300),
]

FOUND = (
    6,  # a round behind some who had all started again, and so held none of its parts
    221,  # two sides of equal work, and the one with more members was to come over
)


@dataclass(frozen=True)
class Drawn:
    """What one seed stands for, beside what happens."""

    founders: int
    joiners: int
    think: tuple[float, float]  # seconds of training a round
    upload: float  # bytes a second, of each
    codec: str
    fragments: int
    records: bool  # whether members keep what they promised, over restarts


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


def anything_happens(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    it = drawn(dice)

    async def story() -> None:
        async with scene(
            it.founders,
            codec=it.codec,
            think=it.think,
            uploads=[it.upload] * it.founders,
            fragments=it.fragments,
            min_grace_s=1.0,  # as in a run's defaults
            records=tmp_path if it.records else None,
            seed=seed,
        ) as here:
            members = await befallen(here, it.upload, dice, ["island"] * it.joiners)
            await until(coming_together(members), HEALED_S)

    played(story)


@pytest.mark.parametrize("seed", [*FOUND, *range(4)])
def test_whatever_happens_there_is_one_swarm(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_whatever_happens_there_is_one_swarm_many_times(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, tmp_path)
