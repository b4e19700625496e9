"""Two fragments' rounds in flight at once, each with groups, among many members: virtual time."""

from __future__ import annotations

import asyncio

import pytest
from exchange_kit import until
from simulated_swarm import SimulatedSwarm, simulated_swarm

from gossip.plans.grouping import Grouping
from protocols.memory import virtual_time

REGION, GRID = Grouping("region"), Grouping("grid", 16)
LARGE = (pytest.mark.slow, pytest.mark.timeout(900))


def in_flight(swarm: SimulatedSwarm) -> int:
    """Members that work by a plan with groups in both fragments at this moment."""
    plans = [[chain.exchange.plan for chain in m.swarm.chains] for m in swarm.living()]
    return sum(all(plan is not None and plan.groups for plan in each) for each in plans)


def least(swarm: SimulatedSwarm) -> int:
    """Rounds that all living members have committed of all fragments."""
    return min(one.place.round for m in swarm.living() for one in m.replicas)


@pytest.mark.parametrize(
    ("count", "how", "sites"),
    [
        pytest.param(12, REGION, 3, id="12 in 3 sites"),
        pytest.param(64, REGION, 8, id="64 in 8 sites", marks=LARGE),
        pytest.param(64, GRID, 1, id="64 in a grid", marks=LARGE),
    ],
)
def test_both_fragments_go_on_and_a_relay_that_dies_holds_up_neither(
    count: int, how: Grouping, sites: int
) -> None:
    async def scene() -> None:
        async with simulated_swarm(
            count, size=count * 17_000, grouping=how, sites=sites, fragments=2,
            think=(2.0, 3.0), uploads=[2e6] * count,
        ) as swarm:  # fmt: skip
            members = swarm.living()
            await until(lambda: in_flight(swarm) > count // 2, 120.0)
            await until(lambda: least(swarm) >= 1, 120.0)
            for replica in members[0].replicas:
                outcome = replica.certificates[0].outcome
                assert len(outcome.contributors) >= count // 2
                whole = [r.stop - r.start for r in outcome.parts]
                for result, elements in zip(outcome.parts, whole, strict=True):
                    assert len(result.included) == len(outcome.contributors)
                    assert {i.elements for i in result.included} == {elements}
            assert not any(member.rejected for member in members)

            await until(lambda: in_flight(swarm) > count // 2, 120.0)
            plans = [chain.exchange.plan for chain in members[0].swarm.chains]
            groups = [group for plan in plans if plan for group in plan.groups]
            relays = {group.members[n - 1] for group in groups for n in group.relays if n}
            await swarm.kill(swarm.members[sorted(relays)[0]])
            before = max(one.place.round for m in members for one in m.replicas)
            began = asyncio.get_running_loop().time()
            await until(lambda: least(swarm) > before, 120.0)
            assert asyncio.get_running_loop().time() - began < 60.0
            swarm.agree()

    virtual_time.run(scene())
