"""Whole rounds with groups: sites, grids, and members that die in them, on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
import torch
from exchange_kit import until
from simulated_swarm import Member, SimulatedSwarm, seed_of, simulated_swarm

from gossip.plans.grouping import Grouping
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.messages import Plan

REGION = Grouping("region")


async def until_planned(swarm: SimulatedSwarm, seconds: float = 60.0) -> None:
    """Wait until all living members work by a plan."""
    await until(lambda: all(m.swarm.chains[0].exchange.plan for m in swarm.living()), seconds)


def weighted_mean(swarm: SimulatedSwarm, member: Member, number: int) -> torch.Tensor:
    """What a round of ``member`` should have come to, from what its certificate counts."""
    outcome = member.replica.certificates[number].outcome
    total, weight = torch.zeros(swarm.size), torch.zeros(swarm.size)
    for result in outcome.parts:
        for included in result.included:
            contributor = outcome.contributors[included.contributor]
            span = slice(result.start, result.start + included.elements)
            total[span] += contributor.weight * progress(swarm, contributor.peer, number)[span]
            weight[span] += contributor.weight
    return total / weight.clamp_(min=1.0)


def progress(swarm: SimulatedSwarm, peer: PeerId, number: int) -> torch.Tensor:
    """What a member had learnt in a round, as :meth:`ToyReplica.train` makes it."""
    generator = torch.Generator().manual_seed(seed_of(peer, 0, number))
    return torch.randn(swarm.size, generator=generator)


@pytest.mark.parametrize(
    ("count", "sites", "how"),
    [(6, 2, REGION), (7, 3, REGION), (9, 1, Grouping("grid", 4))],
    ids=["2 sites", "3 uneven sites", "a grid"],
)
def test_rounds_with_groups_are_the_mean_of_what_their_certificates_count(
    count: int, sites: int, how: Grouping
) -> None:
    async def scene() -> None:
        size = 200_000
        async with simulated_swarm(
            count, size=size, codec="fp32", grouping=how, sites=sites, seed=count
        ) as swarm:
            await swarm.committed(3, 120.0)
            swarm.agree()
            members = swarm.living()
            plans = [member.swarm.chains[0].exchange.plan for member in members]
            assert all(len(plan.groups) > 1 for plan in plans if plan is not None)
            first = members[0]
            for certificate in first.replica.certificates[:3]:
                outcome = certificate.outcome
                assert len(outcome.contributors) >= count // 2
                for result in outcome.parts:  # all of everybody who was ready
                    assert [i.elements for i in result.included] == [
                        result.stop - result.start for _ in outcome.contributors
                    ]
            wanted = weighted_mean(swarm, first, 0)
            torch.testing.assert_close(first.replica.means[0], wanted, rtol=1e-4, atol=1e-5)
            assert not any(member.rejected for member in members)

    virtual_time.run(scene())


@pytest.mark.parametrize("how", [REGION, Grouping("grid", 4)], ids=["sites", "a grid"])
def test_nobody_is_asked_for_a_plan_that_explains_what_goes_through_relays(how: Grouping) -> None:
    async def scene() -> None:
        async with simulated_swarm(
            9, size=200_000, codec="fp32", grouping=how, sites=3, uploads=[1e6] * 9
        ) as swarm:
            said = Counter[str]()

            def tap(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
                said[name] += 1
                return data

            swarm.network.tamper = tap
            await swarm.committed(3, 120.0)
            assert said["sum"]
            assert not said["plan"]

    virtual_time.run(scene())


@pytest.mark.parametrize("seed", range(8))
def test_whoever_dies_in_a_round_with_groups_the_others_go_on_and_agree(seed: int) -> None:
    """Any member at any moment: relays, owners and leaders are among them."""

    async def scene() -> None:
        rng = random.Random(seed)
        grid = seed % 2
        how = Grouping("grid", 4) if grid else REGION
        async with simulated_swarm(
            9 if grid else 6, size=400_000, codec="int8", grouping=how, sites=2, seed=seed,
            uploads=[2e6] * 9,
        ) as swarm:  # fmt: skip
            at = await swarm.committed(1, 120.0)
            for _ in range(2):
                member = rng.choice(swarm.living())
                await until_planned(swarm)
                await asyncio.sleep(rng.uniform(0.0, 0.6))
                at = asyncio.get_running_loop().time()
                before = max(m.replica.place.round for m in swarm.living())
                if rng.random() < 0.5:
                    await swarm.kill(member)
                else:
                    swarm.network.freeze(member.peer)
                    swarm.stopped.add(member.peer)
                end = await swarm.committed(before + 2, 120.0)
                assert end - at < 25.0
            swarm.agree()

    virtual_time.run(scene())


class FourAtOneSite(SimulatedSwarm):
    """A site of four, and two who are alone."""

    def start(self, identity: Identity, **options: Any) -> Member:
        number = len(self.members)
        self.regions[identity.peer_id] = "site" if number < 4 else f"alone-{number}"
        return super().start(identity, **options)


def test_a_relay_that_passes_nothing_on_slows_one_round_and_not_the_next_ones() -> None:
    """Its group asks the owners at once, and those of it who lead choose other relays."""

    async def scene() -> None:
        async with simulated_swarm(
            6, size=400_000, codec="fp32", grouping=REGION, made=FourAtOneSite, seed=1,
            uploads=[3e6] * 6,
        ) as swarm:  # fmt: skip
            mute, *site = swarm.living()[:4]
            others = [member for member in swarm.living() if member is not mute]
            await until(lambda: min(len(m.replica.history) for m in others) >= 2)
            chain, plans = mute.swarm.chains[0], dict[int, Plan]()

            def doubted() -> bool:
                chain.exchange.relaying.pass_on = lambda *_: None  # type: ignore[method-assign]
                return all(m.swarm.chains[0].missed._mute for m in site)

            await until(doubted)
            first = max(m.replica.place.round for m in others)

            def over() -> bool:
                doubted()
                for member in others:
                    plan = member.swarm.chains[0].exchange.plan
                    if plan is not None and plan.ballot == 0:
                        plans.setdefault(plan.round, plan)
                return min(m.replica.place.round for m in others) >= first + 3

            await until(over)
            certificates = [c for c in site[0].replica.certificates if c.outcome.round >= first]
            assert [certificate.ballot for certificate in certificates[:2]] == [0, 0]
            led = [p for p in plans.values() if p.leader in {m.peer for m in site}]
            led = [plan for plan in led if plan.round in (first, first + 1)]
            assert led
            for plan in led:
                (group,) = plan.groups
                assert mute.peer not in {group.members[n - 1] for n in group.relays if n}
            assert {who for m in others for who, _ in m.rejected} == {mute.peer}

    virtual_time.run(scene())


def test_those_who_saw_that_a_relay_brings_no_sums_choose_others_wherever_they_are() -> None:
    async def scene() -> None:
        async with simulated_swarm(
            6, size=400_000, codec="fp32", grouping=REGION, made=FourAtOneSite, seed=1,
            uploads=[3e6] * 6,
        ) as swarm:  # fmt: skip
            mute, *others = swarm.living()
            await until(lambda: min(len(m.replica.history) for m in others) >= 2)
            chain, led = mute.swarm.chains[0], list[Member]()

            def over() -> bool:
                chain.exchange.relaying._spread = lambda *_: None  # type: ignore[method-assign]
                for member in others:
                    its = member.swarm.chains[0]
                    if (plan := its.exchange.plan) is None or plan.leader != member.peer:
                        continue
                    if mute.peer in its.missed.idle(plan.round) and member not in led:
                        led.append(member)
                        (group,) = plan.groups
                        assert mute.peer not in {group.members[n - 1] for n in group.relays if n}
                return len(led) > 1

            await until(over)
            assert {swarm.regions[member.peer] == "site" for member in led} == {True, False}

    virtual_time.run(scene())


@pytest.mark.slow
def test_a_swarm_of_64_in_a_grid() -> None:
    async def scene() -> None:
        async with simulated_swarm(
            64, size=64 * 17_000, codec="int4", grouping=Grouping("grid", 16), think=(2.0, 3.0)
        ) as swarm:
            await swarm.committed(1, 300.0)
            swarm.agree()
            outcome = swarm.living()[0].replica.certificates[0].outcome
            assert len(outcome.parts) == 64
            assert len(outcome.contributors) >= 32
            assert all(len(r.included) == len(outcome.contributors) for r in outcome.parts)

    virtual_time.run(scene())
