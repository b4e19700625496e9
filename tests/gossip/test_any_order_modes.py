"""Whatever befalls members of rounds that are no lock-step of all: as :mod:`test_any_order`.

Rounds as soon as one island is ready, with and without a bound on staleness; parts merged by
servers, which are killed, replaced and late like everybody; a drawn half of the islands. Members
are whole nodes but for the model, so that each inner step can be told apart: none counts twice, and
none is lost but with the death of who had taken it (:mod:`working_kit`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from catching_up_kit import at_one_place, merging, played, scene
from exchange_kit import until
from trouble_kit import HEALED_S, befallen
from working_kit import SIZE, WorkingSwarm

from bootstrap.manifest import Manifest

pytestmark = [
    pytest.mark.usefixtures("remembered_signatures"),
    pytest.mark.timeout(300),
]

FOUND = (
    23,  # two servers began the run, and one died before an island was in office
    417,  # a plan counted on what an island had before it was started again from an older state
    206,  # whom results reached last was in no round
    147,  # of those drawn only one was ready, and it went by no plan since it had started again
)
STEPS = 4  # from one contribution to the next
QUIET_S = 30.0  # for the last rounds, once nobody takes steps


@dataclass(frozen=True)
class Drawn:
    """What one seed stands for, beside what happens."""

    manifest: Manifest
    founders: tuple[str, ...]  # roles
    joiners: tuple[str, ...]
    step: tuple[float, float]  # seconds of an inner step, of the fastest and the slowest
    wait_s: float  # for an outcome
    upload: float  # bytes a second, of each
    records: bool  # whether members keep what they promised, over restarts


def drawn(dice: random.Random) -> Drawn:
    mode = dice.choice(["async", "async", "server", "server", "fedavg"])
    rounds: dict[str, Any] = {
        "inner_steps": STEPS,
        "total_rounds": 1_000_000,
        "codec": "fp32",
        "fragments": dice.choice([1, 1, 2]),
        "alpha": 0.0,  # else what was merged is sent again in part
        "eval_every": dice.choice([0, 3]),
        "dynamic_steps": dice.random() < 0.5,
    }
    servers = mode == "server" or (mode == "fedavg" and dice.random() < 0.3)
    if mode == "async":
        rounds["staleness"] = dice.choice([-1, -1, 0, 1, 2, 4])
    elif mode == "server":
        rounds["staleness"] = dice.choice([0, 0, -1, 1, 3])
    elif servers:
        rounds["owners"] = "servers"
    tables = {"mode": mode, "rounds": rounds, "merge": {"rule": "mean"}}
    roles = ["server", "server", "island", "island"] if servers else ["island"] * 4
    dice.shuffle(roles)
    count = dice.choice([1, 2, 3, 4])
    joiners = [dice.choice(roles) for _ in range(dice.choice([1, 2, 3]))]
    if "island" not in (*roles[:count], *joiners):
        joiners.append("island")
    manifest = Manifest.model_validate(tables)
    # many who come by a lone member's narrow link, and need not be waited for, take minutes
    unbounded = manifest.rounds.one_is_enough and manifest.rounds.staleness < 0
    crowded = unbounded and count + len(joiners) > 4
    return Drawn(
        manifest=manifest,
        founders=tuple(roles[:count]),
        joiners=tuple(joiners),
        step=dice.choice([(0.25, 0.3), (0.2, 0.8), (0.12, 0.12)]),
        wait_s=dice.choice([0.0, 0.0, 2.0]),
        upload=max(dice.choice([2e5, 1e6, 1e7]), 1e6 if crowded else 0.0),
        records=dice.random() < 0.6,
    )


def anything_happens(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    it = drawn(dice)

    async def story() -> None:
        async with scene(
            len(it.founders),
            size=SIZE,
            codec="fp32",
            think=it.step,
            uploads=[it.upload] * len(it.founders),
            fragments=it.manifest.rounds.fragments,
            records=tmp_path if it.records else None,
            seed=seed,
            made=WorkingSwarm,
            roles=it.founders,
            manifest=it.manifest,
            wait_s=it.wait_s,
        ) as here:
            members = await befallen(here, it.upload, dice, it.joiners)
            swarm = here.swarm
            assert isinstance(swarm, WorkingSwarm)
            islands = [member for member in members if swarm.role(member.peer) == "island"]
            await until(merging(islands), HEALED_S)
            swarm.over = True
            await until(lambda: at_one_place(members), QUIET_S)
            swarm.check(islands)

    played(story)


@pytest.mark.parametrize("seed", [*FOUND, 4, 7, 9, 46])
def test_whatever_happens_every_step_counts_once(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [31, 312, 335, *range(165, 205)])
def test_whatever_happens_every_step_counts_once_many_times(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, tmp_path)
