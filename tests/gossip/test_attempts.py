"""Attempts at a round that come to nothing are told of, each once, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from exchange_kit import until
from simulated_swarm import Member, simulated_swarm

from gossip.plans.mix import MEAN, Mix
from protocols.memory import virtual_time
from protocols.messages import Plan

pytestmark = pytest.mark.usefixtures("remembered_signatures")

LONG: dict[str, Any] = {
    "size": 140_000,
    "codec": "fp32",
    "uploads": [1e5] * 4,
}  # an exchange takes seconds
WEIGHED = Mix(weigh=lambda products, weights: list(weights))

Told = list[tuple[Plan, Plan | None]]


def listen(member: Member) -> Told:
    """What a member is told of attempts from now on."""
    told: Told = []
    member.swarm.chains[0].hooks.gave_up = lambda before, plan: told.append((before, plan))
    return told


def plan_of(member: Member) -> Plan | None:
    return member.swarm.chains[0].exchange.plan


async def all_work_by_one_plan(members: list[Member]) -> Plan:
    def plans() -> set[tuple[int, int] | None]:
        found = map(plan_of, members)
        return {(one.round, one.ballot) if one is not None else None for one in found}

    await until(lambda: len(plans()) == 1 and None not in plans(), 30.0)
    plan = plan_of(members[0])
    assert plan is not None
    return plan


@pytest.mark.parametrize("mix", [MEAN, WEIGHED], ids=["mean", "drafts"])
def test_a_round_that_goes_as_planned_gives_nothing_up(mix: Mix) -> None:
    """Neither does the final plan of a draft."""

    async def main() -> None:
        async with simulated_swarm(3, mix=mix) as swarm:
            told = [listen(member) for member in swarm.members.values()]
            await swarm.committed(6)
            assert told == [[]] * 3

    virtual_time.run(main())


def test_whoever_works_by_another_plan_has_given_one_up() -> None:
    async def main() -> None:
        async with simulated_swarm(4, **LONG) as swarm:
            members = list(swarm.members.values())
            first = await all_work_by_one_plan(members)
            [dies] = [member for member in members if member.peer == first.leader]
            left = [member for member in members if member is not dies]
            heard = [listen(member) for member in left]
            await swarm.kill(dies)
            await swarm.committed(first.round + 1)
            for member, told in zip(left, heard, strict=True):
                given = [(before.epoch, before.ballot) for before, _ in told]
                assert given[0] == (first.epoch, first.ballot)
                assert given == sorted(set(given)), "each once"
                for before, plan in told:
                    assert plan is not None
                    assert before.round == plan.round == first.round
                    assert (plan.epoch, plan.ballot) > (before.epoch, before.ballot)
                    assert plan.leader != dies.peer
                assert member.replica.place.round > first.round, "it is committed after all"

    virtual_time.run(main())


@pytest.mark.parametrize("how", ["on", "forked", "diverged"])
def test_an_attempt_is_abandoned_with_what_it_builds_on(how: str) -> None:
    """A download that goes past the round says nothing of it: it may be committed as planned."""

    async def main() -> None:
        async with simulated_swarm(4, **LONG) as swarm:
            members = list(swarm.members.values())
            plan = await all_work_by_one_plan(members)
            chain, here = members[0].swarm.chains[0], members[0].replica.place
            told = listen(members[0])
            there = here
            if how != "diverged":
                there = replace(here, round=here.round + 1, previous=bytes(32), work=10**9)

            async def jump() -> None:
                assert chain.exchange.closed

            is_diverged, is_forked = how == "diverged", how == "forked"
            await chain.move(
                jump, there, None, chain.lineage, diverged=is_diverged, forked=is_forked
            )
            assert told == ([] if how == "on" else [(plan, None)])

    virtual_time.run(main())
