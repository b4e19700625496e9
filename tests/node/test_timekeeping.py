"""A node's clock where its machine was paused from outside: who is asked, and when it is put."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from greeting_kit import Host
from identity_kit import identity
from simulated_swarm import Member, contributes, simulated_swarm

from bootstrap.dht import CLOCK_LIMIT
from bootstrap.handshake import Clocks, Greeting, greet
from node.clock import SteadyClock
from node.entry.timekeeping import AGAIN_S, ASKED, LAST_AGAIN_S, LOOK_S, Timekeeper
from node.monitor.event_log import EventLog
from node.monitor.events import ClockPut, Problem
from protocols.errors import OperatorError, Unreachable, Why
from protocols.identity import PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import Link, MemoryNetwork

PEERS = [identity(number).peer_id for number in range(2, 8)]
HOUR = 3600.0


@dataclass
class Scene:
    """A node, its machine's clock, and what others answer."""

    others: dict[PeerId, float] = field(default_factory=dict)  # their clocks, ahead of true time
    machine: float = 0.0  # its clock is ahead of true time by
    paused: float = 0.0  # seconds that the machine stood still
    now: float = 1000.0
    trip: float = 0.02
    asked: list[PeerId] = field(default_factory=list)
    log: EventLog = field(default_factory=EventLog)
    clocks: Clocks = field(default_factory=Clocks)

    def __post_init__(self) -> None:
        self.steady = SteadyClock(
            lambda: 1e9 + self.now + self.machine, lambda: self.now - self.paused
        )
        for peer in self.others:
            self.clocks.add(peer, 0.0, 0.02)
        self.keeper = Timekeeper(
            self.steady, self.clocks, self.log, self.greet, None, lambda: self.now, random.Random(1)
        )

    async def greet(self, peer: PeerId) -> Greeting:
        self.asked.append(peer)
        if peer not in self.others:
            raise Unreachable("it is gone", Why.REFUSED)
        welcome: Any = None
        offset = 1e9 + self.now + self.others[peer] - self.steady()
        return Greeting(peer, welcome, offset, self.trip)

    async def look(self, after: float = LOOK_S) -> list[Any]:
        """What is told of it."""
        self.now += after
        before = len(self.log.recent)
        await self.keeper.look()
        return [record.event for record in list(self.log.recent)[before:]]

    @property
    def wrong(self) -> float:
        """How far the node's clock is behind true time."""
        return 1e9 + self.now - self.steady()


async def test_a_machine_that_was_paused_is_put_right_as_it_and_others_say() -> None:
    scene = Scene(dict.fromkeys(PEERS, 0.4))
    assert await scene.look() == []
    assert scene.asked == []
    scene.paused = HOUR
    assert scene.wrong == HOUR
    (put,) = await scene.look()
    assert put == ClockPut(seconds=HOUR, text=put.text)
    assert "1h00m behind" in put.text
    assert "3 peers" in put.text
    assert len(set(scene.asked)) == ASKED
    assert scene.wrong == 0.0
    assert scene.clocks.offset == pytest.approx(0.4)  # measured anew
    assert await scene.look() == []
    assert len(scene.asked) == ASKED


@pytest.mark.parametrize("by", [HOUR, -HOUR])
async def test_that_somebody_sets_the_machine_is_no_matter_and_seldom_asked_about(
    by: float,
) -> None:
    scene = Scene(dict.fromkeys(PEERS, -0.4))
    scene.machine = by
    looks = []
    for _ in range(int(HOUR / LOOK_S)):
        before = len(scene.asked)
        assert await scene.look() == []
        if len(scene.asked) > before:
            looks.append(scene.now)
    assert scene.wrong == 0.0
    pauses = [later - one for one, later in pairwise(looks)]
    assert AGAIN_S <= pauses[0] <= AGAIN_S + LOOK_S
    assert LAST_AGAIN_S / 2 <= pauses[-1] <= LAST_AGAIN_S + LOOK_S
    assert len(looks) < 20
    scene.machine = 2 * by  # and once more
    before = len(scene.asked)
    await scene.look()
    assert len(scene.asked) == before + ASKED


async def test_a_single_peer_does_not_move_it() -> None:
    scene = Scene({PEERS[0]: HOUR})
    scene.keeper.presence = Said(lambda: HOUR, PEERS[:1])  # it announces itself so, too
    (problem,) = await scene.look()
    assert problem.code == "E301"
    assert scene.wrong == 0.0
    scene.machine = 2 * HOUR  # the machine's is set as well, but not to what that peer says
    await scene.look()
    assert scene.wrong == 0.0


async def test_most_of_those_who_are_asked_count() -> None:
    scene = Scene({PEERS[0]: 7.0 * HOUR, PEERS[1]: 0.0, PEERS[2]: 0.3})
    scene.paused = HOUR
    (put,) = await scene.look()
    assert put.seconds == HOUR
    assert scene.wrong == 0.0


async def test_a_long_way_to_others_is_granted_and_one_that_took_too_long_says_nothing() -> None:
    scene = Scene({PEERS[0]: 4.0})
    scene.paused, scene.trip = HOUR, 4.0
    (put,) = await scene.look()
    assert put.seconds == HOUR
    scene = Scene({PEERS[0]: 4.0})
    scene.paused, scene.trip = HOUR, 8.0 * HOUR
    assert await scene.look() == []


@pytest.mark.parametrize("by", [HOUR, -HOUR])
async def test_where_nobody_else_is_the_machines_is_taken(by: float) -> None:
    """As of a creator that has started with a wrong clock: a newcomer's would be called wrong."""
    scene = Scene(machine=-by)
    scene.machine = 0.0
    assert scene.wrong == by
    (put,) = await scene.look()
    assert put.seconds == by
    assert "nobody" in put.text
    assert scene.wrong == 0.0
    assert not scene.asked


async def test_where_others_are_known_and_do_not_answer_it_stays() -> None:
    scene = Scene(dict.fromkeys(PEERS, 0.0))
    scene.others.clear()  # the network is not back yet
    scene.paused = HOUR
    assert await scene.look() == []
    assert scene.wrong == HOUR
    scene.others.update(dict.fromkeys(PEERS, 0.0))
    (put,) = await scene.look(AGAIN_S + LOOK_S)
    assert put.seconds == HOUR


async def test_what_is_paused_while_others_are_asked_is_looked_at_anew() -> None:
    scene = Scene(dict.fromkeys(PEERS, 0.0))
    scene.paused = HOUR
    ask = scene.greet

    async def paused_once(peer: PeerId) -> Greeting:
        greeting = await ask(peer)
        scene.paused = 2 * HOUR
        return greeting

    scene.keeper.greet = paused_once
    assert await scene.look() == []
    (put,) = await scene.look()
    assert put.seconds == 2 * HOUR
    assert scene.wrong == 0.0


class Said:
    """What a presence tells of others, who live."""

    def __init__(self, behind_s: Any, peers: list[PeerId]) -> None:
        self.clock_behind_s = behind_s
        self.membership = self
        self.wiring: Any = self
        self.islands = dict.fromkeys(peers)

    def now(self) -> float:
        return 0.0

    def alive(self, now: float) -> list[PeerId]:
        return list(self.islands)


async def test_where_the_machines_clock_stood_still_too_the_operator_is_told_once() -> None:
    scene = Scene(dict.fromkeys(PEERS, 0.0))
    scene.keeper.presence = Said(lambda: scene.wrong, PEERS)
    scene.paused, scene.machine = HOUR, -HOUR
    (problem,) = await scene.look()
    assert isinstance(problem, Problem)
    assert problem.code == "E301"
    assert "3600.0 s behind" in problem.why
    for _ in range(60):
        assert await scene.look() == []
    scene.machine = 0.0  # it is set, as the problem asks for
    (put,) = await scene.look()
    assert put.seconds == HOUR
    assert scene.wrong == 0.0
    scene.paused, scene.machine = 2 * HOUR, -HOUR  # another time
    assert [event.code for event in await scene.look()] == ["E301"]


def test_a_member_whose_machine_was_paused_contributes_again() -> None:
    async def share(member: Member, other: Member, seconds: float) -> bool:
        since = len(other.replica.certificates)
        await asyncio.sleep(seconds)
        assert len(other.replica.certificates) > since
        return contributes(member, other, since)

    async def main() -> None:
        async with simulated_swarm(3, think=(0.9, 1.0)) as swarm:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(5.0)
            one, other, *_ = swarm.members.values()
            presence, paused, log = one.swarm.presence, 0.0, EventLog()
            clock = SteadyClock(presence.wall, lambda: loop.time() - paused)
            presence.wall = clock
            assert await share(one, other, 5.0)
            paused = 600.0
            await asyncio.sleep(5.0)
            assert not await share(one, other, 15.0)
            assert presence.clock_behind_s() == pytest.approx(600.0, abs=CLOCK_LIMIT)

            async def greeted(peer: PeerId) -> Greeting:
                welcome: Any = None
                offset = swarm.members[peer].swarm.presence.wall() - clock()
                return Greeting(peer, welcome, offset, 0.02)

            keeper = Timekeeper(clock, Clocks(), log, greeted, presence, loop.time)
            looking = asyncio.create_task(keeper.run())
            await asyncio.sleep(2 * LOOK_S)
            assert [type(record.event) for record in log.recent] == [ClockPut]
            assert presence.clock_behind_s() <= CLOCK_LIMIT
            assert await share(one, other, 10.0)
            assert len(log.recent) == 1
            looking.cancel()

    virtual_time.run(main())


def test_a_creator_that_was_put_right_sends_no_newcomer_away() -> None:
    """Its machine was an hour ahead when it started, and has been set since."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        network = MemoryNetwork(seed=1, link=Link(latency=0.001))
        creator, newcomer = Host(network, 1), Host(network, 2)
        ahead = HOUR
        clock = SteadyClock(lambda: 1e9 + loop.time() + ahead, loop.time)
        creator.gate(clock=clock)
        ahead = 0.0

        async def check() -> None:
            clocks = Clocks()
            greeting = await greet(
                newcomer.transport,
                newcomer.whereabouts,
                creator.peer,
                software="0",
                clock=lambda: 1e9 + loop.time(),
            )
            clocks.add(creator.peer, greeting.offset, greeting.round_trip)
            clocks.check()

        with pytest.raises(OperatorError, match="clock"):
            await check()
        await Timekeeper(clock, Clocks(), EventLog()).look()
        await check()

    virtual_time.run(main())
