"""Swarms whose network falls apart again and again: they end as one, and everybody's work counts.

Members, links, codecs, fragments and the cuts are drawn from a seed; what a seed found once stays
in ``FOUND``.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest
from catching_up_kit import NEWCOMERS, Scene, coming_together, played, scene
from exchange_kit import until

pytestmark = [
    pytest.mark.usefixtures("remembered_signatures"),
    pytest.mark.timeout(300),
]

JOINED_S, HEALED_S = 60.0, 60.0  # on the virtual clock
FOUND = (
    181,  # newcomers heard of a majority one by one: two epochs of one round, both incomplete
    235,  # put out of office by a cut, and from then on each time a moment too late to be taken in
)


@dataclass(frozen=True)
class Drawn:
    """What one seed stands for."""

    fragments: int
    upload: float  # bytes a second, of each
    codec: str
    members: int
    think: tuple[float, float]  # seconds of training a round
    first: int  # so many are cut off,
    seconds: float  # for so long
    flaps: bool  # again, several times


def drawn(dice: random.Random) -> Drawn:
    fragments, upload = dice.choice([1, 1, 2]), dice.choice([5e5, 1e6, 1e6, 1e7])
    codec, members = dice.choice(["fp32", "int4"]), dice.choice([4, 4, 5, 6])
    think = dice.choice([(1.0, 1.1), (0.3, 1.5), (0.12, 0.12)])
    first, seconds = dice.randrange(1, members), dice.uniform(3, 20)
    return Drawn(fragments, upload, codec, members, think, first, seconds, dice.random() < 0.4)


async def cut(swarm: Scene, peers: list[bytes], first: int, seconds: float) -> None:
    swarm.swarm.network.partition(set(peers[:first]), set(peers[first:]))
    await asyncio.sleep(seconds)
    swarm.swarm.network.heal()


def falls_apart(seed: int) -> None:
    dice = random.Random(seed)
    it = drawn(dice)

    async def story() -> None:
        async with scene(
            codec=it.codec,
            think=it.think,
            uploads=[it.upload],
            fragments=it.fragments,
            min_grace_s=1.0,  # as in a run's defaults
        ) as swarm:
            joining = [swarm.join(one, it.upload) for one in NEWCOMERS[: it.members - 1]]
            await until(lambda: swarm.are_members(*joining), JOINED_S)
            members = [*swarm.founders, *joining]
            peers = [member.peer for member in members]
            dice.shuffle(peers)
            await cut(swarm, peers, it.first, it.seconds)
            for _ in range(dice.randrange(1, 4) if it.flaps else 0):
                await asyncio.sleep(dice.uniform(0.05, 3))
                await cut(swarm, peers, dice.randrange(1, it.members), dice.uniform(0.05, 6))
            await until(coming_together(members), HEALED_S)

    played(story)


@pytest.mark.parametrize("seed", [*FOUND, *range(6)])
def test_a_network_that_falls_apart_leaves_one_swarm(seed: int) -> None:
    falls_apart(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400))
def test_many_networks_that_fall_apart_leave_one_swarm(seed: int) -> None:
    falls_apart(seed)
