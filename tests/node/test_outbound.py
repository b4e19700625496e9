"""Which relay a hidden node has, and what it does when that goes away: real transports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from http_kit import QUICK, A, B, C, address, echo, wait_for

from node.entry.outbound import Outbound, none_found
from node.monitor.event_log import EventLog
from node.monitor.events import Event, Notice, Problem, Record
from protocols.addresses import PeerAddress, parse_address, relay_address
from protocols.http.transport import HttpTransport
from protocols.identity import Identity

D, E = (Identity.from_seed(bytes([n]) * 32) for n in (4, 5))


class Swarm:
    """A hidden node, two that can be dialled, and one that calls."""

    def __init__(self, group: asyncio.TaskGroup, nodes: dict[str, HttpTransport]) -> None:
        self.hidden, self.first, self.second, self.caller = nodes.values()
        self.events: list[Event] = []
        log = EventLog()
        log.subscribe(self.on_event)
        self.keeping: list[asyncio.Task[None]] = []
        self.outbound = Outbound(
            self.hidden, log, lambda work: self.keeping.append(group.create_task(work))
        )
        self.hidden.relays.mine = list
        self.hidden.on_call("echo", echo)
        self.outbound.moved = self.on_moved

    def on_event(self, record: Record) -> None:
        self.events.append(record.event)

    def on_moved(self) -> None:
        """Others hear of the address, as by its announcements."""
        if self.outbound.address:
            self.caller.book.add(self.hidden.peer_id, self.outbound.address)

    def place(self, node: HttpTransport) -> PeerAddress:
        where = parse_address(address(node))
        return PeerAddress(where.host, where.port, node.peer_id)

    async def called(self) -> bytes:
        return await self.caller.call(self.hidden.peer_id, "echo", b"hello", timeout=5)


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    names = {"hidden": A, "first": B, "second": C, "caller": D}
    async with AsyncExitStack() as stack:
        nodes = {
            name: await stack.enter_async_context(
                HttpTransport(identity, listen="127.0.0.1:0", limits=QUICK)
            )
            for name, identity in names.items()
        }
        for node in nodes.values():
            node.relay.offer(1e6)
        async with asyncio.TaskGroup() as group:
            made = Swarm(group, nodes)
            yield made
            for task in made.keeping:
                task.cancel()


async def test_the_first_that_carries_is_taken(swarm: Swarm) -> None:
    swarm.first.relay.offer(0)  # it only tells
    places = [swarm.place(swarm.first), swarm.place(swarm.second)]
    assert await swarm.outbound.enter(places) == places[1]
    assert swarm.outbound.address == relay_address(address(swarm.second), swarm.second.peer_id)
    assert swarm.outbound.describe() == f"outbound only, relay {places[1]}"
    assert await swarm.called() == b"hello"
    assert await swarm.outbound.enter(places) == places[1]  # again, at a second greeting
    assert len(swarm.keeping) == 1


async def test_one_that_only_tells_is_better_than_none(swarm: Swarm) -> None:
    swarm.first.relay.offer(0)
    assert await swarm.outbound.enter([swarm.place(swarm.first)]) == swarm.place(swarm.first)
    assert await swarm.called() == b"hello"


async def test_without_any_the_operator_is_told_what_to_do(swarm: Swarm) -> None:
    await swarm.first.aclose()
    assert await swarm.outbound.enter([swarm.place(swarm.second)][:0]) is None
    assert swarm.outbound.describe() == "outbound only, no relay"
    assert swarm.keeping == []
    error = none_found("192.168.1.4:4390", "no answer in time (5 s)")
    assert error.code == "E302"
    assert "none of the peers would be its relay" in error.why
    assert "--public-addr" in error.fix


async def test_when_the_relay_goes_away_another_is_found(swarm: Swarm) -> None:
    first, second = swarm.place(swarm.first), swarm.place(swarm.second)
    assert await swarm.outbound.enter([first]) == first
    assert await swarm.called() == b"hello"
    swarm.outbound.candidates = lambda: [first, second]
    async with HttpTransport(E, listen="127.0.0.1:0", limits=QUICK) as other:
        swarm.caller = other  # which has no connection yet
        await swarm.first.aclose()
        await wait_for(lambda: any(isinstance(event, Notice) for event in swarm.events))
        [problem] = [event for event in swarm.events if isinstance(event, Problem)]
        assert problem.code == "E302"
        assert problem.what == f"the relay {first} is gone"
        assert not problem.fatal
        assert swarm.outbound.relay == second
        assert await swarm.called() == b"hello"  # at the new address


async def test_a_relay_that_does_not_know_it_is_greeted(swarm: Swarm) -> None:
    greeted: list[PeerAddress] = []
    swarm.first.relay.may_wait = lambda peer: bool(greeted)

    async def greet(place: PeerAddress) -> None:
        greeted.append(place)

    swarm.outbound.greet = greet
    assert await swarm.outbound.enter([swarm.place(swarm.first)]) == swarm.place(swarm.first)
    assert greeted == [swarm.place(swarm.first)]
