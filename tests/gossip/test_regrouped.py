"""Two leaders of one round make plans with other groups, and part of the swarm sees both.

What a group's relay adds up goes by whose slices that is, so no sum is read by another list than it
was made by.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Set

import pytest
from exchange_kit import World, run, same_bytes, until
from grouped_kit import counted, grouped, truthful

from gossip.plans.certificate import basis_of
from protocols.counts import pack_counts
from protocols.identity import PeerId
from protocols.messages import Group, Plan


def without(plan: Plan, out: Set[PeerId], turn: int = 0) -> Plan:
    """A plan in which these are in no group; ``turn``: others relay in place of who would."""

    def changed(group: Group) -> Group:
        left = tuple(peer for peer in group.members if peer not in out)
        if len(left) < 2:
            return Group(group.members, (0,) * len(group.relays))
        relays = (relay and 1 + (relay - 1 + turn) % len(left) for relay in group.relays)
        return Group(left, tuple(relays))

    return dataclasses.replace(plan, groups=tuple(map(changed, plan.groups)))


def whole_and_true(here: World) -> None:
    """All hold the same parts, everybody's work is in them, and they are what is said of them."""
    assert same_bytes(here.peers)
    for peer in here.peers:
        assert truthful(here, peer)
        assert counted(here, peer) == {other.me: {0} for other in here.peers}
        assert not peer.faults


def test_who_is_in_no_sum_of_a_part_is_missed() -> None:
    """Its certificate names those alone who are in it."""

    async def scene() -> None:
        async with grouped(8, codec="fp32") as here:
            here.work()
            await until(here.whole)
            whole_and_true(here)
            parts = here.peers[0].exchange.parts
            key, (result, data) = next(iter(parts.items()))
            size = key[1] - key[0]
            left_out = pack_counts([0] + [size] * (len(here.peers) - 1))
            parts[key] = dataclasses.replace(result, counts=left_out), data
            found = counted(here, here.peers[0])
            assert found.pop(here.plan.contributors[0].peer) == {0, size}
            assert all(lacks == {0} for lacks in found.values())

    run(scene)


@pytest.mark.parametrize(
    ("before", "after"),
    [([2], []), ([3], []), ([1], []), ([], [3]), ([], [1]), ([1], [3]), ([2], [3])],
)
@pytest.mark.parametrize("knows", ["relay", "owner", "member"])
def test_a_sum_is_read_by_the_group_that_it_was_made_of(
    before: list[int], after: list[int], knows: str
) -> None:
    """The first plan reaches one member alone; its basis, parts and relays are the second's."""

    async def scene() -> None:
        async with grouped(8, codec="fp32") as here:
            roster = [peer.me for peer in here.peers]
            first, second = (
                without(here.plan, {roster[number] for number in out}) for out in (before, after)
            )
            second = dataclasses.replace(second, ballot=1)
            assert basis_of(first.codec, first.contributors) == basis_of(
                second.codec, second.contributors
            )
            alone = here.peers[{"relay": 0, "owner": 5, "member": 2}[knows]]
            alone.exchange.work(first)
            await asyncio.sleep(0.05)
            here.work(second)
            end = await until(here.whole)
            assert end < second.expected_s + 2 * second.patience_s
            whole_and_true(here)

    run(scene)


@pytest.mark.parametrize("seed", range(12))
def test_whoever_has_seen_which_plan_before_the_last_one_comes(seed: int) -> None:
    """Other members in groups, other relays, and no order in which plans come to members."""

    async def scene() -> None:
        by = random.Random(seed)
        async with grouped(8, codec="fp32") as here:
            call_later = asyncio.get_running_loop().call_later
            for ballot in range(3):
                out = set(by.sample(here.plan.roster, by.randrange(4)))
                plan = dataclasses.replace(
                    without(here.plan, out, turn=by.randrange(3)), ballot=ballot
                )
                last = ballot == 2
                for peer in here.peers:
                    if last or by.random() < 0.6:
                        call_later(ballot * 0.4 + by.uniform(0, 0.3), peer.exchange.work, plan)
            await until(here.whole)
            whole_and_true(here)

    run(scene)


def test_whoever_has_the_plan_a_patience_late_is_merged_though_its_group_is_another() -> None:
    """Without another group it has as long: owners that ask for its slice give it no less."""

    async def scene() -> None:
        async with grouped(8, codec="fp32") as here:
            late = here.peers[2]
            second = dataclasses.replace(here.plan, ballot=1)
            here.work(without(here.plan, {late.me}), without=(late,))
            await asyncio.sleep(0.05)
            here.work(second, without=(late,))
            await asyncio.sleep(second.patience_s)
            late.exchange.work(second)
            end = await until(here.whole)
            assert end < second.expected_s + 3 * second.patience_s
            whole_and_true(here)

    run(scene)
