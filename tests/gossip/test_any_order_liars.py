"""Whatever befalls members while some of them lie: as :mod:`test_any_order`, with liars.

Fewer than a third of them lie, in whatever they say (:mod:`lying_kit`). No honest one dies of it,
no two of them commit different results of one round, and they come together and merge each other's
work, whether the liars stop or not. That there is one result of each round is not asked for where a
liar signs two votes or two results, since nothing would keep that (docs/protocol.md, Limits).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from catching_up_kit import coming_together, played, scene
from exchange_kit import until
from lying_but_once import SCHEMES, schemed_against
from lying_kit import ABOUT, EVERYTHING, Liar
from lying_swarm import AmongLiars, LyingSwarm, no_errors
from toy_replica import RUN
from trouble_kit import HEALED_S, befallen

from bootstrap.manifest_rounds import Merge
from gossip.plans.grouping import UNGROUPED, Grouping
from gossip.plans.mix import Mix
from node.replicas.mixing import mix_of
from protocols.codecs import RangeCodec
from protocols.identity import Identity, PeerId

pytestmark = [
    pytest.mark.usefixtures("remembered_signatures"),
    pytest.mark.timeout(300),
]

SIZE = 10_000
FOUND = (213,)  # a part that its owner gave a byte a second, in a round that needed every vote
KINDS = ("kill", "kill", "freeze", "slow", "narrow", "cut", "sever", "swap", "leave", "join")
LASTS_S = (10, 30)
RULES = ("mean", "mean", "clip", "median", "geometric-median")


@dataclass(frozen=True)
class Drawn:
    """What one seed stands for, beside what happens and what is said."""

    honest: int  # founders
    joiners: int
    liar_joins: bool  # it is one of the joiners, else a founder
    lies_on: bool  # when the network is whole again
    chance: float  # of a lie, of each message
    about: tuple[str, ...]
    worded: bool
    alike: bool
    two_faced: bool
    think: tuple[float, float]
    upload: float
    codec: str
    fragments: int
    rule: str
    records: bool
    schemes: tuple[str, ...] = ()  # what it says that is right in everything but one thing
    healed_s: float = HEALED_S


def drawn(dice: random.Random) -> Drawn:
    return Drawn(
        honest=dice.choice([3, 4, 5]),
        joiners=dice.choice([1, 2]),
        liar_joins=dice.random() < 0.3,
        lies_on=dice.random() < 0.7,
        chance=dice.choice([0.03, 0.1, 0.3, 0.6]),
        about=dice.choice([EVERYTHING, EVERYTHING, EVERYTHING, ABOUT["plans"], *ABOUT.values()]),
        worded=dice.random() < 0.5,
        alike=dice.random() < 0.5,
        two_faced=dice.random() < 0.25,
        think=dice.choice([(1.0, 1.1), (0.3, 0.6)]),
        upload=dice.choice([1e6, 1e7]),
        codec=dice.choice(["fp32", "int4"]),
        fragments=dice.choice([1, 1, 1, 2]),
        rule=dice.choice(RULES),
        records=dice.random() < 0.6,
    )


def scheming(dice: random.Random) -> Drawn:
    """Nothing but lies that are right in all but one thing, of a founder."""
    return replace(
        drawn(dice),
        liar_joins=False,
        chance=0.0,
        two_faced=False,
        upload=dice.choice([1e5, 1e6]),  # a round is to last for some time
        fragments=1,
        rule=dice.choice(["mean", "clip", "geometric-median", "geometric-median"]),
        schemes=tuple(dice.sample(SCHEMES, 2)),
        healed_s=4 * HEALED_S,  # by drafts that it leaves alone it may hold each round up once
    )


def mixed(rule: str) -> Mix:
    return mix_of(Merge(rule=rule))


def anything_happens(
    seed: int,
    tmp_path: Path,
    grouping: Grouping = UNGROUPED,
    sites: int = 1,
    draw: Callable[[random.Random], Drawn] = drawn,
) -> None:
    dice = random.Random(seed)
    it = draw(dice)
    count = it.honest + (not it.liar_joins)
    founders = [Identity.from_seed((i + 1).to_bytes(32, "big")) for i in range(count)]
    joins = Identity.from_seed((1).to_bytes(32, "little"))
    identity = joins if it.liar_joins else dice.choice(founders)
    swarm: LyingSwarm | None = None

    def names() -> list[PeerId]:
        return list(swarm.members) if swarm is not None else [one.peer_id for one in founders]

    liar = Liar(
        identity, RUN, RangeCodec(it.codec, dense=SIZE - 1000), random.Random(seed + 1),
        it.chance, it.about, it.two_faced, it.worded, it.alike, names,
    )  # fmt: skip

    async def story() -> None:
        nonlocal swarm
        async with scene(
            count,
            size=SIZE,
            codec=it.codec,
            think=it.think,
            uploads=[it.upload] * count,
            fragments=it.fragments,
            min_grace_s=1.0,
            records=tmp_path if it.records else None,
            mix=mixed("clip" if grouping.on else it.rule),
            grouping=grouping,
            sites=sites,
            seed=seed,
            made=LyingSwarm,
            lying={identity.peer_id: liar},
            two_faced=it.two_faced,
        ) as here:
            assert isinstance(here.swarm, LyingSwarm)
            swarm = here.swarm
            async with schemed_against(swarm, liar, it.schemes):
                newcomers = ["island"] * it.joiners
                how: dict[str, Any] = {"lasts": LASTS_S, "kinds": KINDS, "sites": sites}
                await befallen(here, it.upload, dice, newcomers, AmongLiars, **how)
                liar.lies = it.lies_on
                honest = swarm.honest()
                await until(coming_together(honest), it.healed_s)

    with no_errors(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("gossip.plans.partition.MIN_PART", 1024)  # so short a vector is cut as well
        played(story)


@pytest.mark.parametrize("seed", [*FOUND, 222, 221, 205])
def test_whatever_some_say_the_others_are_one_swarm(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_whatever_some_say_the_others_are_one_swarm_many_times(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, tmp_path)


@pytest.mark.parametrize("seed", [2, 51])
def test_whatever_some_say_in_groups_the_others_are_one_swarm(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, tmp_path, Grouping("region"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_whatever_some_say_in_groups_they_are_one_swarm_many_times(
    seed: int, tmp_path: Path
) -> None:
    anything_happens(seed, tmp_path, Grouping("region"), 2)


@pytest.mark.parametrize("seed", [0, 1, 3, 6, 10, 11, 42, 53])
def test_what_is_wrong_in_one_thing_alone_is_not_taken(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, tmp_path, draw=scheming)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 5, 23, *range(100, 200)])
def test_what_is_wrong_in_one_thing_alone_is_not_taken_many_times(
    seed: int, tmp_path: Path
) -> None:
    anything_happens(seed, tmp_path, draw=scheming)
