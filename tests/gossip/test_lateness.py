"""Who is waited for and for how long: dark and slow members, on the virtual clock."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from exchange_kit import LEADER, MEMBERS, World, run, until, world
from gossip_kit import PLACE, plan_of
from simulated_swarm import simulated_swarm

from gossip.exchange.lateness import Lateness, Overdue
from gossip.exchange.part_states import PartState
from gossip.exchange.watches import Watches
from gossip.plans.certificate import basis_of
from gossip.plans.estimating import step_s
from gossip.plans.validity import PartKey, Shape
from protocols.codecs import CHUNK, RangeCodec
from protocols.identity import PeerId
from protocols.memory import virtual_time

SIZE = 40 * CHUNK  # ten chunks a part
UPLOAD = 4e6  # bytes a second
EXPECTED = 1.5 * 1.008 * SIZE / UPLOAD  # 2 s in int8
MEGABYTE = 1_000_000


def test_parts_of_an_earlier_plan_tell_nothing_of_how_long_those_of_this_one_take() -> None:
    """Links are slower than thought, so nobody is late; one part had come before."""

    async def main() -> None:
        loop, faults = asyncio.get_running_loop(), list[PeerId]()
        plan = plan_of(LEADER, MEMBERS, shape=Shape(SIZE, ("int8",)))
        plan = dataclasses.replace(plan, patience_s=1.0, expected_s=4.0)
        codec = RangeCodec("int8", dense=SIZE - 1000)
        wiring = SimpleNamespace(now=loop.time, codec=codec)
        transfers = SimpleNamespace(wiring=wiring, start=loop.create_task)
        listener = SimpleNamespace(fault=lambda peer, why: faults.append(peer))
        held, inflow = set[PartKey](), SimpleNamespace(moved=0)
        watches = Watches(cast(Any, transfers), cast(Any, listener), PLACE, held, ())
        basis = basis_of(plan.codec, plan.contributors)
        keys = [(part.start, part.stop, part.owner, basis) for part in plan.parts[:3]]
        first, *others = (PartState(key, plan, inflow=cast(Any, inflow)) for key in keys)
        for state in (first, *others):
            watches.watch(state, plan)
        await asyncio.sleep(0.5)
        held.add(first.key)
        await asyncio.sleep(1.5)
        watches.stop()
        for state in others:
            watches.watch(state, plan)
        size, began = codec.encoded_size(*others[0].key[:2]), loop.time()
        while loop.time() < began + 14.0:
            inflow.moved = int(size * (loop.time() - began) / 14.0)
            await asyncio.sleep(0.125)
        held.update(state.key for state in others)
        await asyncio.sleep(1.0)
        assert faults == []

    run(main)


def fresh() -> Lateness:
    """Four seconds are expected for a megabyte of each."""
    return Lateness(0.0, 1.0, 4.0, MEGABYTE)


def played(judge: Lateness, rates: dict[str, float], seconds: float) -> dict[str, float]:
    """When each is given up on that brings so many bytes a second."""
    late: dict[str, float] = {}
    now = 0.0
    while now < seconds:
        arrived = {p: min(int(r * now), MEGABYTE) for p, r in rates.items() if r}
        waiting = {p for p in rates if p not in late and arrived.get(p, 0) < MEGABYTE}
        whole = sum(count == MEGABYTE for count in arrived.values())
        for peer in judge.late(now, waiting, arrived, whole):
            late[peer] = now
        now += 0.125
    return late


@pytest.mark.parametrize("slowest", [250e3, 255e3, 300e3, 1e6])
def test_who_keeps_to_the_announced_speed_is_never_late(slowest: float) -> None:
    """However fast the others are."""
    for others in (250e3, 1e6, 1e9):
        assert played(fresh(), {"a": others, "b": others, "c": slowest}, 60.0) == {}


def test_a_slice_that_gets_its_turn_last_is_not_late() -> None:
    """A sender may serve another owner first: what counts is the pace of late, too."""
    judge = fresh()
    for tick in range(80):
        now = tick / 8
        mine = int(max(now * 5e3, (now - 3.0) * 300e3))
        arrived = {"a": MEGABYTE, "b": MEGABYTE, "c": min(mine, MEGABYTE)}
        assert not judge.late(now, {"c"} if mine < MEGABYTE else set(), arrived, 2)


def test_half_as_fast_as_announced_is_waited_for_and_a_twentieth_is_not() -> None:
    assert played(fresh(), {"a": 250e3, "b": 250e3, "c": 125e3}, 60.0) == {}
    late = played(fresh(), {"a": 250e3, "b": 250e3, "c": 12.5e3}, 60.0)
    assert 4.0 <= late.pop("c") <= 4.5
    assert late == {}


def test_nothing_at_all_while_others_move() -> None:
    late = played(fresh(), {"a": 250e3, "b": 250e3, "c": 0.0}, 60.0)
    assert set(late) == {"c"}
    assert late["c"] == pytest.approx(2.0, abs=0.2)


@pytest.mark.parametrize("rate", [0.0, 1e3])
def test_who_brought_nothing_before_is_waited_for_while_half_of_the_others_bring_theirs(
    rate: float,
) -> None:
    judge = Lateness(0.0, 1.0, 4.0, MEGABYTE, frozenset("c"))
    late = played(judge, {"a": 4e6, "b": 4e6, "c": rate}, 60.0)
    assert set(late) == {"c"}
    if rate:  # as everybody who trickles
        assert late["c"] >= 4.0
    else:
        assert late["c"] == pytest.approx(0.5, abs=0.2)


def test_nothing_of_anybody_has_time_until_the_deadline() -> None:
    late = played(fresh(), {"a": 0.0, "b": 0.0}, 60.0)
    assert set(late.values()) == {13.0}


def test_one_that_stands_still() -> None:
    judge = fresh()
    arrived = {"a": 250_000, "b": 1}
    assert not judge.late(1.0, {"a", "b"}, arrived, 0)
    assert not judge.late(1.9, {"a", "b"}, {**arrived, "b": 2}, 0)
    assert set(judge.late(2.0, {"a", "b"}, {**arrived, "b": 2}, 0)) == {"a"}


def test_an_owner_is_excused_while_the_others_wait_as_well() -> None:
    overdue = Overdue(0.0, 1.0, 4.0, 100 * CHUNK, MEGABYTE)
    few = 2 * step_s(4.0, 100 * CHUNK)
    assert overdue.left(10.0, 0, others=False) == pytest.approx(8.5)
    assert overdue.left(10.0, 0, others=True) == pytest.approx(0.5 + few)
    moved = MEGABYTE - 1  # all would be here soon, if it went on
    assert overdue.left(10.4, moved, others=True) == pytest.approx(1.5 + few)
    assert overdue.left(12.2, moved, others=True) < 0


def test_an_owner_has_the_expected_time_though_a_small_part_came_early() -> None:
    overdue = Overdue(0.0, 1.0, 40.0, 100 * CHUNK, MEGABYTE)
    assert overdue.left(9.0, 0, others=True) > 30.0


def blamed(arrived: Callable[[float], float], other_at: float | None) -> float | None:
    """When the owner of a megabyte of which so much has arrived is blamed; 4 s are expected."""
    overdue = Overdue(0.0, 1.0, 4.0, 100 * CHUNK, MEGABYTE)
    for tick in range(480):
        now = tick / 8
        moved = int(arrived(now))
        if moved >= MEGABYTE:
            return None
        if overdue.left(now, moved, other_at is not None and now >= other_at) <= 0:
            return now
    raise AssertionError("waited for a minute")


def test_an_owner_that_trickles_is_blamed_by_its_pace() -> None:
    """It moves all the time, at a twentieth of what was announced."""
    when = blamed(lambda now: now * 12.5e3, other_at=3.5)
    assert when is not None
    assert 4.0 <= when <= 6.0
    when = blamed(lambda now: now * 12.5e3, other_at=None)
    assert when == 2.5 + 4 * 4.0


@pytest.mark.parametrize("other_at", [0.5, 4.0, None])
@pytest.mark.parametrize("rate", [125e3, 250e3, 1e6])
def test_an_owner_at_half_its_speed_is_waited_for(rate: float, other_at: float | None) -> None:
    assert blamed(lambda now: now * rate, other_at) is None


def test_an_owner_that_waited_for_somebody_has_time_to_catch_up() -> None:
    """It trickles with its slowest contributor, gives up on that at last, and hurries then."""
    assert blamed(lambda now: now * 12.5e3 + max(0.0, now - 4.5) * 250e3, other_at=4.0) is None


async def played_out(here: World, slow: float, dark_at: float | None) -> float:
    """Seconds until all others have all parts but the victim's, which is dark or slow."""
    victim, *rest = here.peers
    here.plan = dataclasses.replace(here.plan, expected_s=EXPECTED)
    clock = asyncio.get_running_loop().time
    began = clock()
    node = here.network.node(victim.me)
    assert node is not None
    node.upload = UPLOAD * slow
    if dark_at is not None and dark_at <= 0:
        here.network.freeze(victim.me)
    here.work()
    if dark_at is not None and dark_at > 0:
        await asyncio.sleep(dark_at * EXPECTED)
        here.network.freeze(victim.me)
    parts = len(here.plan.parts) - (dark_at is not None or slow < 0.5)
    took = await until(lambda: all(len(p.exchange.parts) >= parts for p in rest)) - began
    given_up = [p for p in rest if victim.me in dict(p.refusals)]
    if dark_at is None:  # else all its slices may have been in already
        assert len(given_up) == (0 if slow >= 0.5 else len(rest))
    others = {p.me for p in rest}
    for peer in rest:
        assert not others & set(peer.faults)
        assert not others & {who for who, _ in peer.refusals}
    if dark_at is not None:
        await until(lambda: all(victim.me in p.faults for p in rest))
        took = clock() - began  # by then it is to be taken over
        here.network.thaw(victim.me)
    return took


@pytest.mark.parametrize("dark_at", [0.0, 0.3, 0.6, 0.9])
def test_a_dark_member_is_found_within_seconds(dark_at: float) -> None:
    async def scene() -> None:
        async with world(Shape(SIZE, ("int8",)), upload=UPLOAD) as here:
            took = await played_out(here, 1.0, dark_at)
            assert took - max(EXPECTED, dark_at * EXPECTED) < 2.2

    run(scene)


def test_twenty_times_slower_is_not_waited_for() -> None:
    async def scene() -> None:
        async with world(Shape(SIZE, ("int8",)), upload=UPLOAD) as here:
            assert await played_out(here, 0.05, None) < EXPECTED + 1.5

    run(scene)


@pytest.mark.parametrize("slow", [1.0, 0.6])
def test_slow_but_steady_is_waited_for(slow: float) -> None:
    async def scene() -> None:
        async with world(Shape(SIZE, ("int8",)), upload=UPLOAD) as here:
            await played_out(here, slow, None)
            assert not any(p.faults or p.refusals for p in here.peers)

    run(scene)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_link_that_goes_dark_stalls_a_round_for_less_than_three_seconds(share: float) -> None:
    """Four members, as long an exchange as 25 million elements have in int4 at 100 Mbit/s."""
    size, speed = 4_000_000, 2e6

    async def main() -> None:
        async with simulated_swarm(4, size=size, think=(0.5, 0.5), uploads=[speed] * 4) as swarm:
            members = list(swarm.members.values())
            clock = asyncio.get_running_loop().time
            await until(lambda: min(len(m.replica.history) for m in members) >= 2)
            usual = members[0].swarm.chains[0].round_s
            number = len(members[0].replica.history)
            await until(lambda: members[0].swarm.chains[0].exchange.plan is not None)
            await asyncio.sleep(share * (usual - 0.5))
            assert len(members[0].replica.history) == number
            began, dark = clock() - share * (usual - 0.5), members[1]
            swarm.network.freeze(dark.peer)
            rest = [m for m in members if m is not dark]
            await until(lambda: all(len(m.replica.history) > number for m in rest))
            stall = clock() - began - (usual - 0.5)
            assert stall < 3.0
            swarm.agree()

    virtual_time.run(main())


@pytest.mark.parametrize("times", [4, 20, 100])
def test_links_that_are_all_slower_than_thought_leave_nobody_out(times: int) -> None:
    """What is expected may be a guess: nobody has measured anything before the first round."""

    async def scene() -> None:
        async with world(Shape(SIZE, ("int8",)), upload=UPLOAD) as here:
            here.plan = dataclasses.replace(here.plan, expected_s=EXPECTED / times)
            here.work()
            assert EXPECTED < await until(here.whole) < 1.3 * EXPECTED
            assert not any(p.faults or p.refusals for p in here.peers)

    run(scene)


@pytest.mark.parametrize("count", [2, 4])
def test_the_first_round_of_slow_links_is_whole(count: int) -> None:
    """Half a megabyte a second, where 25 times as much is assumed until it is measured."""

    async def main() -> None:
        async with simulated_swarm(
            count, size=2_000_000, think=(0.5, 0.5), uploads=[5e5] * count
        ) as swarm:
            members = list(swarm.members.values())
            for member in members:
                member.swarm.presence.note(upload=0.0, download=0.0)
            await until(lambda: all(m.replica.history for m in members))
            for part in members[0].replica.certificates[0].outcome.parts:
                brought = [one.elements for one in part.included]
                assert brought == [part.stop - part.start] * count

    virtual_time.run(main())


def test_parts_that_all_stand_still_are_overdue_as_well() -> None:
    """What they would need at their pace is no reason to wait for them ever longer."""

    async def scene() -> None:
        async with world(Shape(SIZE, ("int8",)), upload=1e6) as here:
            me, *others = here.peers
            node = here.network.node(me.me)
            assert node is not None
            node.upload = 1e8  # what others need of me is with them soon
            here.plan = dataclasses.replace(here.plan, expected_s=1.5 * SIZE / 1e6)
            here.work()
            routes = [r for r in me.exchange.merged.planned.all() if r.key[2] != me.me]
            await until(lambda: all(r.sending is not None and r.sending.done() for r in routes))
            await until(lambda: all(r.inflow is not None and r.inflow.moved for r in routes))
            for peer in others:
                here.network.freeze(peer.me)
            frozen = asyncio.get_running_loop().time()
            await until(lambda: len(me.faults) == len(others), 600.0)
            bound = 2.5 * here.plan.patience_s + 4 * here.plan.expected_s
            assert asyncio.get_running_loop().time() < frozen + bound

    run(scene)
