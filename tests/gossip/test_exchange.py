"""Whole exchanges on a simulated network that breaks."""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from typing import cast

import pytest
from exchange_kit import (
    CODEC,
    LEADER,
    MEMBERS,
    PLAN,
    SHAPE,
    SIZE,
    World,
    header_of,
    run,
    same_bytes,
    until,
    world,
)
from gossip_kit import plan_of

from gossip.exchange.bodies import trailer_size
from gossip.exchange.merging import PartMerge
from gossip.exchange.part_states import PLAN_WAIT_S
from gossip.exchange.retaining import keys_of
from gossip.plans.certificate import basis_of
from protocols.bodies import BufferFeed
from protocols.errors import RemoteRefused
from protocols.identity import PeerId
from protocols.memory.transport import Link
from protocols.messages import Part, Plan
from protocols.transport import Drain, Incoming


def test_all_hold_the_same_bytes_and_they_are_the_mean() -> None:
    async def scene() -> None:
        async with world() as here:
            here.work()
            await until(here.whole)
            assert same_bytes(here.peers)
            wanted = sum(peer.values for peer in here.peers) / 4
            error = (here.peers[0].mean() - wanted).norm() / wanted.norm()
            assert error < 0.02
            for peer in here.peers:
                assert (peer.faults, peer.lost_, peer.refusals) == ([], [], [])
                assert len(peer.held_) == 4
            whole = CODEC.encoded_size(0, SIZE)  # each sends 3/4 of it as slices, and 1/4 thrice
            await until(lambda: all(p.exchange.bytes_sent > 1.45 * whole for p in here.peers))
            assert all(p.exchange.bytes_sent < 1.55 * whole for p in here.peers)
            assert sum(p.exchange.elements_sent for p in here.peers) == 6 * SIZE

    run(scene)


def test_slices_are_begun_with_each_owner_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with world() as here:
            peer, begun = here.peers[0], list[PeerId]()
            outbox = peer.exchange.outbox
            monkeypatch.setattr(outbox, "send", lambda route, *_, **__: begun.append(route.key[2]))
            owners = [member for member in MEMBERS for _ in range(2)]
            peer.exchange.work(plan_of(LEADER, MEMBERS, shape=SHAPE, owners=owners))
            assert begun[:3] == begun[3:]
            assert set(begun) == {other.me for other in here.peers[1:]}

    run(scene)


def test_what_a_contributor_sent_before_it_died_is_merged() -> None:
    """It counts in the chunks that arrived whole, and its result says which these are."""

    async def scene() -> None:
        async with world(upload=1e5) as here:
            dead = here.peers[1]
            plan = plan_of(LEADER, MEMBERS, shape=SHAPE, owners=[here.peers[0].identity])
            for peer in here.peers:
                peer.exchange.work(plan)
            owner = here.peers[0]
            (part,) = owner.exchange.owning._parts.values()
            # its matrices are there, its vectors on the way
            await until(lambda: part.merge.elements(dead.me) > 0)
            here.network.kill(dead.me)
            await until(lambda: all(p.exchange.parts for p in here.peers if p is not dead))
            ((result, _),) = owner.exchange.parts.values()
            counted = {plan.contributors[i.contributor].peer: i.elements for i in result.included}
            assert counted == {p.me: SIZE - 1000 if p is dead else SIZE for p in here.peers}
            alive = sum(p.values for p in here.peers if p is not dead)
            wanted = (alive + dead.values) / 4
            wanted[SIZE - 1000 :] = alive[SIZE - 1000 :] / 3
            assert (owner.mean() - wanted).norm() / wanted.norm() < 0.02

    run(scene)


def test_an_owner_that_dies_before_it_has_merged_is_reported_by_all() -> None:
    async def scene() -> None:
        async with world(upload=1e5) as here:
            here.work()
            await asyncio.sleep(0.1)
            dead, *others = here.peers
            here.network.kill(dead.me)
            await until(lambda: all(dead.me in peer.faults for peer in others))
            assert all(set(peer.faults) == {dead.me} for peer in others)

    run(scene)


def test_broken_connections_are_tried_again() -> None:
    async def scene() -> None:
        async with world(link=Link(latency=0.02, drop=0.15)) as here:
            here.work()
            assert await until(here.whole) < 3.0
            assert same_bytes(here.peers)
            assert not any(peer.faults for peer in here.peers)

    run(scene)


def test_who_gets_the_plan_late_is_sent_everything_all_the_same() -> None:
    """Nobody knows how much later a plan may come than the first slice: it is asked for again."""

    async def scene() -> None:
        patient = dataclasses.replace(PLAN, patience_s=20.0, expected_s=20.0)
        async with world() as here:
            owner = here.of(PLAN.parts[0].owner)
            for peer in here.peers:
                if peer is not owner:
                    peer.exchange.work(patient)
            await asyncio.sleep(2 * PLAN_WAIT_S + 1.0)
            owner.exchange.work(patient)
            await until(here.whole, 10.0)
            assert not any(peer.faults for peer in here.peers)
            assert same_bytes(here.peers)

    run(scene)


def test_another_list_of_contributors_is_merged_anew() -> None:
    async def scene() -> None:
        async with world() as here:
            here.work()
            await until(here.whole)
            fewer = dataclasses.replace(PLAN, ballot=5, contributors=PLAN.contributors[1:])
            here.work(fewer)
            keys = {
                (part.start, part.stop, part.owner, basis_of(fewer.codec, fewer.contributors))
                for part in PLAN.parts
            }
            await until(lambda: all(keys <= set(p.exchange.parts) for p in here.peers))
            for key in keys:
                result, _ = here.peers[0].exchange.parts[key]
                assert [i.contributor for i in result.included] == [0, 1, 2]

    run(scene)


def test_when_the_round_is_over_nothing_goes_on() -> None:
    async def scene() -> None:
        async with world() as here:
            owner = here.of(PLAN.parts[0].owner)
            owner.exchange.work(PLAN)  # nobody else does: it would wait for four seconds
            await asyncio.sleep(0.2)
            await owner.exchange.stop()
            await until(lambda: not owner.exchange._transfers.tasks, PLAN_WAIT_S + 1.0)
            assert (owner.held_, owner.refusals, owner.faults) == ([], [], [])
            with pytest.raises(RemoteRefused, match="late"):
                await here.of(PLAN.parts[1].owner).wiring.transport.push(
                    owner.me,
                    "slice",
                    header_of(PLAN, PLAN.parts[0]).encode(),
                    BufferFeed(bytes(10)),
                    timeout=5.0,
                )

    run(scene)


def test_when_the_round_is_over_no_more_of_a_merged_part_is_taken() -> None:
    """Nobody judges its pace any more, so it might be hours in coming."""

    async def scene() -> None:
        async with world() as here:
            mine = here.peers[0]
            theirs = [part for part in PLAN.parts if part.owner != mine.me][:2]
            mine.exchange.work(PLAN)
            drains: list[Drain] = []
            async with asyncio.TaskGroup() as group:
                tasks = []
                for part in theirs:
                    coming = group.create_task(
                        mine.on_merged(
                            part.owner,
                            header_of(PLAN, part).encode(),
                            cast(Incoming, Trickling(part, drains)),
                        )
                    )
                    tasks.append(coming)
                await until(lambda: len(drains) == 2)
                drains[0].room()
                drains[0].took(1)  # of the other one nothing has come
                await mine.exchange.stop()
                for drain in drains:
                    with pytest.raises(RemoteRefused, match="late"):
                        drain.room()
                for task in tasks:
                    task.cancel()

    run(scene)


class Trickling:
    """A merged part of which next to nothing comes; its drain is noted in ``drains``."""

    def __init__(self, part: Part, drains: list[Drain]) -> None:
        encoded = CODEC.named(PLAN.codec).encoded_size(part.start, part.stop)
        self.length = encoded + trailer_size(len(PLAN.contributors))
        self._drains = drains

    async def into(self, drain: Drain, *, stall: float, slow: bool) -> None:
        self._drains.append(drain)
        await asyncio.Event().wait()


def other_plan(here: World, number: int) -> Plan:
    """A plan of the same parts with a basis of its own, all merged by the first."""
    plan = plan_of(LEADER, MEMBERS, shape=SHAPE, owners=[here.peers[0].identity])
    first, *others = plan.contributors
    lighter = dataclasses.replace(first, weight=first.weight / (number + 1))
    return dataclasses.replace(plan, contributors=(lighter, *others))


def test_what_one_plan_before_has_asked_for_is_kept_and_no_more() -> None:
    async def scene() -> None:
        async with world() as here:
            plans = [other_plan(here, number) for number in range(6)]
            owner = here.peers[0].exchange.owning
            first: list[weakref.ref[PartMerge]] = []
            for number, plan in enumerate(plans):
                here.work(plan)
                if number == 0:
                    first = [weakref.ref(part.merge) for part in owner._parts.values()]
                (key,) = keys_of(plan)
                if number < 3:  # the others do not come to an end
                    await until(lambda key=key: all(key in p.exchange.parts for p in here.peers))
                else:
                    await asyncio.sleep(0.05)
            assert len(owner._parts) == 2
            assert [one() for one in first] == [None]  # and nothing waits for the collector
            await until(lambda: all(keys_of(plans[-1])[0] in p.exchange.parts for p in here.peers))
            for peer in here.peers:
                merged = peer.exchange.merged
                assert len(list(merged.planned.all())) == 2
                assert set(merged.held) <= {keys_of(plan)[0] for plan in plans[-2:]}
                assert peer.dropped_ == [keys_of(plan)[0] for plan in plans[:3]]
            here.work(plans[-2])  # by a leader who knew of no other
            await until(lambda: all(keys_of(plans[-2])[0] in p.exchange.parts for p in here.peers))
            assert same_bytes(here.peers)

    run(scene)


def test_what_was_voted_for_stays_whatever_plans_come() -> None:
    async def scene() -> None:
        async with world() as here:
            voter, other = here.peers[1:3]
            (voted,) = keys_of(other_plan(here, 0))
            for number in range(4):
                here.work(plan := other_plan(here, number))
                (key,) = keys_of(plan)
                await until(lambda key=key: all(key in p.exchange.parts for p in here.peers))
                voter.needed_ = {voted}
            assert set(voter.exchange.parts) == {voted, key}  # that is all that there is room for
            assert voted not in other.exchange.parts

    run(scene)


def test_an_owner_that_let_go_of_a_part_does_not_merge_it_again() -> None:
    """It might come out otherwise, and two results for one part may be voted for."""

    async def scene() -> None:
        async with world() as here:
            owner, other = here.peers[:2]
            for number in range(3):
                here.work(plan := other_plan(here, number))
                (key,) = keys_of(plan)
                await until(lambda key=key: all(key in p.exchange.parts for p in here.peers))
            here.work(first := other_plan(here, 0))
            await until(lambda: owner.me in other.faults)
            assert keys_of(first)[0] not in owner.exchange.owning._parts
            taken_over = plan_of(LEADER, MEMBERS, shape=SHAPE, owners=[other.identity])
            taken_over = dataclasses.replace(taken_over, contributors=first.contributors)
            here.work(taken_over)
            (key,) = keys_of(taken_over)
            await until(lambda: all(key in p.exchange.parts for p in here.peers))

    run(scene)
