"""Whatever some say where rounds are no lock-step of all, or there are none: the others go on.

As :mod:`test_any_order_liars`, for rounds as soon as one island is ready, for parts that servers
merge, for a drawn half of the islands, and for islands that meet in pairs. Contributions are taken
as they are here (any vector of finite numbers is one), so liars lie in words, answers and merged
parts, and what is asked for is that the others live, agree where they have anything in common, and
go on with each other.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from catching_up_kit import at_one_place, merging, played, scene
from exchange_kit import until
from lying_but_once import schemed_against
from lying_kit import EVERYTHING, LETTERS, Liar
from lying_swarm import MANY, AmongLiars, LyingSwarm, largest, no_errors
from lying_transport import LyingTransport
from roamer_kit import RUN, Islands, islands
from test_any_order_modes import STEPS
from test_any_order_pairs import Mishaps, met
from test_any_order_pairs import drawn as drawn_pairs
from trouble_kit import befallen
from working_kit import SIZE, WIDE, WorkingSwarm

from bootstrap.manifest import Manifest
from protocols.codecs import RangeCodec
from protocols.identity import Identity, PeerId
from protocols.memory.transport import MemoryTransport
from protocols.memory.virtual_time import run

pytestmark = [
    pytest.mark.usefixtures("remembered_signatures"),
    pytest.mark.timeout(300),
]

HEALED_S, QUIET_S = 90.0, 30.0
PAIRS_HEALED_S = 600.0  # on the virtual clock
WORDS = tuple(name for name in EVERYTHING if name != "slice")
ROUNDS = ("another_certificate", "forged_votes", "in_their_name", "out_of_turn", "announced_for")
STEP_S = [(0.25, 0.3), (0.2, 0.8)]


@dataclass(frozen=True)
class Drawn:
    """What one seed stands for, beside what happens and what is said."""

    manifest: Manifest
    founders: tuple[str, ...]  # roles
    lies: int  # which of them
    lies_on: bool  # when the network is whole again
    chance: float  # of a lie, of each message
    schemes: tuple[str, ...]
    step: tuple[float, float]


def drawn(dice: random.Random) -> Drawn:
    mode = dice.choice(["async", "server", "fedavg"])
    rounds: dict[str, Any] = {
        "inner_steps": STEPS,
        "total_rounds": 1_000_000,
        "codec": "fp32",
        "fragments": dice.choice([1, 1, 2]),
        "alpha": 0.0,
    }
    if mode == "async":
        rounds["staleness"] = dice.choice([-1, 0, 2])
    elif mode == "server":
        rounds["staleness"] = dice.choice([0, -1, 1])
    tables = {"mode": mode, "rounds": rounds, "merge": {"rule": "mean"}}
    servers, count = (4, 3) if mode == "server" else (0, dice.choice([4, 5]))
    founders = ("server",) * servers + ("island",) * count
    return Drawn(
        manifest=Manifest.model_validate(tables),
        founders=founders,
        lies=dice.randrange(len(founders)),
        lies_on=dice.random() < 0.7,
        chance=dice.choice([0.0, 0.03, 0.1, 0.3]),
        schemes=dice.choice([(), ROUNDS]),
        step=dice.choice(STEP_S),
    )


@dataclass
class LyingWorkers(LyingSwarm, WorkingSwarm):
    """Whole nodes but for the model, some of whom lie."""


def anything_happens(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    it = drawn(dice)
    identity = Identity.from_seed((it.lies + 1).to_bytes(32, "big"))
    swarm: LyingWorkers | None = None

    def names() -> list[PeerId]:
        return list(swarm.members) if swarm is not None else [identity.peer_id]

    liar = Liar(
        identity, RUN, RangeCodec("fp32", dense=WIDE * WIDE), random.Random(seed + 1),
        it.chance, WORDS, False, dice.random() < 0.5, dice.random() < 0.5, names,
    )  # fmt: skip

    async def story() -> None:
        nonlocal swarm
        async with scene(
            len(it.founders),
            size=SIZE,
            codec="fp32",
            think=it.step,
            uploads=[1e6] * len(it.founders),
            fragments=it.manifest.rounds.fragments,
            records=tmp_path,
            seed=seed,
            made=LyingWorkers,
            roles=it.founders,
            manifest=it.manifest,
            lying={identity.peer_id: liar},
        ) as here:
            assert isinstance(here.swarm, LyingWorkers)
            swarm = here.swarm
            swarm.tally.liars.add(identity.peer_id)
            async with schemed_against(swarm, liar, it.schemes):
                await befallen(here, 1e6, dice, ["island"], AmongLiars, lasts=(10, 30))
                liar.lies = it.lies_on
                honest = swarm.honest()
                roles = swarm.roles
                trained = [one for one in honest if roles.get(one.peer, "island") == "island"]
                await until(merging(trained), HEALED_S)
                swarm.over = True
                await until(lambda: at_one_place(honest), QUIET_S)

    with no_errors():
        played(story)


@dataclass
class LyingIslands(Islands):
    """Islands that meet in pairs, one of whom lies."""

    liar: Liar | None = None
    lying: set[PeerId] = field(default_factory=set)

    def wired(self, identity: Identity, transport: MemoryTransport) -> Any:
        if self.liar is None or identity.peer_id != self.liar.me:
            return transport
        return LyingTransport(transport, self.liar)


async def pairs_meet(seed: int) -> None:
    dice = random.Random(seed)
    it = drawn_pairs(dice)
    torch.manual_seed(seed)
    number = 1  # of the liar, the first that is there
    liar = Liar(
        Identity.from_seed((number + 1).to_bytes(32, "big")), RUN, RangeCodec(it.codec, 256),
        random.Random(seed + 1), dice.choice([0.1, 0.3]), (*EVERYTHING, *LETTERS), False,
        dice.random() < 0.5, dice.random() < 0.5, lambda: [one.peer for one in swarm.living()],
    )  # fmt: skip
    async with islands(
        0,
        rule=it.rule,
        codec=it.codec,
        size=256,
        learn=lambda number, done: 0.02 * torch.randn(256),
        neighbours=it.neighbours,
        staleness=it.staleness,
        seconds=lambda number: dice.uniform(*it.think),
        made=LyingIslands,
        liar=liar,
    ) as swarm:
        async with asyncio.TaskGroup() as group:
            mishaps = Mishaps(swarm.network, dice, group.create_task, it.upload, swarm=swarm, it=it)
            for _ in range(max(4, it.islands)):
                mishaps.found()
            now = asyncio.get_running_loop().time
            end = now() + dice.uniform(10, 30)
            while now() < end:
                await asyncio.sleep(dice.choice([0.5, 2, 6]) * dice.uniform(0.5, 1.5))
                await mishaps.befall()
        healed = now()
        honest = [one for one in swarm.living() if one.peer != liar.me]
        everybody = {one.peer for one in honest}

        def together() -> bool:
            return all(
                met(one, fragment, healed) >= everybody - {one.peer}
                for one in honest
                for fragment in range(it.fragments)
            )

        await swarm.until(together, PAIRS_HEALED_S)
        for one in honest:
            for roamer, state in zip(one.roamers, one.states, strict=True):
                assert state.base.isfinite().all()
                many, where = largest(roamer)
                assert many < MANY, where


@pytest.mark.parametrize("seed", [0, 2])
def test_whatever_some_say_the_others_merge_each_others_work(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *range(100, 150)])
def test_whatever_some_say_the_others_merge_each_others_work_many_times(
    seed: int, tmp_path: Path
) -> None:
    anything_happens(seed, tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_some_say_the_others_meet_in_pairs(seed: int) -> None:
    with no_errors():
        run(pairs_meet(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 121))
def test_whatever_some_say_the_others_meet_in_pairs_many_times(seed: int) -> None:
    with no_errors():
        run(pairs_meet(seed))
