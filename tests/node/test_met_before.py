"""Peers that nobody tells of any more find each other again: on the virtual clock.

What they say of themselves, how they greet and what they remember is the program's; the DHT is only
what a test says that it holds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from identity_kit import identity

from bootstrap.handshake import OPEN_TO_STRANGERS, Gate, admission, anyone, shared_token
from bootstrap.seeds import PeerCache
from gossip.membership.members import Membership, Patience
from gossip.membership.presence import Presence
from gossip.membership.standing import first_announcement
from gossip.place import Place
from gossip.wiring import Wiring
from node.config import resolve
from node.entry.entrance import Entrance
from node.entry.lookout import DISCOVERY_S, Lookout
from node.entry.met_before import AT_ONCE, LAST_S, MetBefore
from node.monitor.event_log import EventLog
from protocols.addresses import PeerAddress, parse_address
from protocols.codecs import RangeCodec
from protocols.errors import Unreachable, Why
from protocols.identity import PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import Link, MemoryNetwork
from protocols.memory.virtual_time import inline
from protocols.tasks import Tasks
from protocols.whereabouts import Whereabouts

RUN, OTHER = b"\x01" * 32, b"\x02" * 32
PATIENCE = Patience(heartbeat_s=4.0)
START = 1_700_000_000.0  # the wall clock's, in Unix seconds


class Party:
    """Nodes on one network, each with a directory of its own below ``home``."""

    def __init__(self, home: Path, group: asyncio.TaskGroup) -> None:
        self.home, self.group = home, group
        self.network = MemoryNetwork(seed=3, link=Link(latency=0.02))
        self.started: list[asyncio.Task[None]] = []
        self.starts = 0


class Node:
    """One that takes part in ``run``, empty: in none yet."""

    def __init__(self, party: Party, number: int, *, run: bytes = RUN, **flags: Any) -> None:
        loop = asyncio.get_running_loop()
        self.party, self.now, self.run = party, loop.time, run
        self.wall = lambda: START + loop.time()
        self.identity, token = identity(number), flags.get("invitation", "")
        self.peer = peer = self.identity.peer_id
        transport: Any = party.network.join(peer)
        self.transport = transport
        self.where = PeerAddress(*_place(transport.address), peer)
        self.whereabouts = Whereabouts(transport, self.identity, clock=self.wall)
        self.whereabouts.publish([transport.address])
        self.brought: list[bytes] = []
        self.refused: list[str] = []
        self.gate = Gate(
            transport,
            self.whereabouts,
            software="0",
            run=lambda: run,
            admits=shared_token(token) if token else anyone,
            announces=lambda: self.presence.known().announces if run else (),
            brought=lambda peer, run: self.brought.append(run),
            refused=lambda peer, code: self.refused.append(code),
            clock=self.wall,
        )
        if token:
            transport._handlers.admits = lambda peer, name: (
                name in OPEN_TO_STRANGERS
                or self.gate.admitted(peer)
                or peer in self.membership.islands
            )
        party.starts += 1
        places = [Place(run or RUN, 0, 0, b"g" * 32, b"o" * 32, 0)]
        codec, spawn = RangeCodec("int4", dense=1), Tasks(party.group).spawn
        wiring = Wiring(transport, self.identity, run or RUN, codec, spawn, inline, loop.time)
        status = first_announcement(peer, places[0], version="0", incarnation=party.starts)
        status = replace(status, admission=admission(token, RUN, peer))
        self.membership = Membership(peer, PATIENCE)
        self.presence = Presence(
            wiring, self.membership, status, lambda: places, self.wall,
            admission=lambda peer: admission(token, RUN, peer),
        )  # fmt: skip
        home = party.home / str(number)
        self.cache = PeerCache(home / "peers.json")
        nothing: Any = None
        clocks: Any = SimpleNamespace(add=lambda *given: None)
        entrance = Entrance(
            resolve({"dir": str(home), **flags}, {}), transport, self.whereabouts, self.cache,
            clocks, EventLog(), nothing, lambda peer: "", nothing,
        )  # fmt: skip
        dialled: Any = SimpleNamespace(settled=True, greeted=lambda peer: None)
        entrance.reaching = dialled
        entrance.measure = self._greets(entrance.measure)  # type: ignore[method-assign]
        book = SimpleNamespace(dialled_at=self._dialled_at)
        node: Any = SimpleNamespace(
            identity=self.identity, cache=self.cache, transport=SimpleNamespace(book=book),
            place=SimpleNamespace(moved=False),
        )  # fmt: skip
        swarm: Any = SimpleNamespace(
            presence=self.presence, membership=self.membership, now=loop.time
        )
        replica: Any = SimpleNamespace(place=places[0])
        self.rejected: list[str] = []
        self.in_dht: list[PeerId] = []
        self.dht: Any = SimpleNamespace()
        self.lookout = Lookout(
            node, entrance, swarm, replica, lambda peer, error: self.rejected.append(str(error))
        )
        self.entrance = entrance
        self.greeted: list[tuple[PeerId, float]] = []

    def _greets(self, measure: Any) -> Any:
        async def noted(peer: PeerId, run: bytes) -> Any:
            self.greeted.append((peer, self.now()))
            return await measure(peer, run)

        return noted

    def _dialled_at(self, peer: PeerId) -> PeerAddress | None:
        found = self.party.network.node(peer)
        return PeerAddress(*_place(found.address), peer) if found is not None else None

    def live(self) -> Node:
        """Take part from now on."""

        async def islands() -> Iterable[PeerId]:
            return self.in_dht

        self.dht.islands = islands
        for work in (self.presence.heartbeats(), self.lookout.run(self.dht)):
            self.party.started.append(self.party.group.create_task(work))
        return self

    async def join(self, seed: Node) -> Node:
        """Come in by greeting another, as a newcomer does."""
        for envelope in (await self.entrance.measure(seed.peer, self.run)).welcome.announces:
            self.lookout.learn(envelope, seed.peer)
        return self.live()

    def sees(self, other: Node) -> bool:
        return self.membership.there(other.peer, self.now())


def _place(address: str) -> tuple[str, int]:
    place = parse_address(address)
    return place.host, place.port


@asynccontextmanager
async def party(home: Path) -> AsyncIterator[Party]:
    async with asyncio.TaskGroup() as group:
        made = Party(home, group)
        yield made
        for task in made.started:
            task.cancel()


def test_who_comes_first_after_a_power_cut_is_found_by_those_that_come_later(
    tmp_path: Path,
) -> None:
    """It was given no peer, and they know where it was; only its cache knows where they are."""

    async def main() -> None:
        async with party(tmp_path) as all_:
            creator, other = Node(all_, 1), Node(all_, 2)
            creator.cache.remember([other.where])
            all_.network.kill(other.peer)
            creator.live()
            await asyncio.sleep(120.0)
            assert len(creator.cache.load()) == 1  # though nobody is there to be remembered
            other = Node(all_, 2).live()
            await asyncio.sleep(LAST_S)
            assert creator.sees(other)
            assert other.sees(creator)

    virtual_time.run(main())


@pytest.mark.parametrize("each", [1, 2])
def test_two_sides_meet_again_though_nobody_remembers_the_other(tmp_path: Path, each: int) -> None:
    """Who introduced them is gone, and nothing is left in the DHT."""

    async def main() -> None:
        async with party(tmp_path) as all_:
            seed = Node(all_, 9).live()
            left = [await Node(all_, number).join(seed) for number in range(1, 1 + each)]
            right = [await Node(all_, number).join(seed) for number in range(3, 3 + each)]
            await asyncio.sleep(2 * DISCOVERY_S)  # they are in the cache by then
            all_.network.kill(seed.peer)
            all_.network.partition(*({node.peer for node in side} for side in (left, right)))
            await asyncio.sleep(PATIENCE.forget_s + 60.0)
            for one, other in product(left, right):
                assert other.peer not in one.membership.islands
                assert one.peer not in other.membership.islands
            for side in (left, right):
                assert all(one.sees(other) for one, other in product(side, side))
            all_.network.heal()
            await asyncio.sleep(LAST_S + DISCOVERY_S)
            assert all(one.sees(other) for one, other in product(left + right, left + right))

    virtual_time.run(main())


@pytest.mark.parametrize("flags", [{}, {"invitation": "f3" * 16}])
def test_who_is_found_in_the_dht_alone_is_taken_in(tmp_path: Path, flags: dict[str, str]) -> None:
    """Also where strangers have to greet first: nobody tells one of the other."""

    async def main() -> None:
        async with party(tmp_path) as all_:
            one, other = (Node(all_, number, **flags) for number in (1, 2))
            one.in_dht = [other.peer, one.peer, identity(9).peer_id]
            one.live()
            other.live()
            await asyncio.sleep(DISCOVERY_S / 2)
            assert one.sees(other)
            assert other.sees(one)
            for node in (one, other):
                assert not node.rejected
                assert not node.refused
            assert one.dht.others() == [other.peer]  # by whom it joins again, if it loses all

    virtual_time.run(main())


def test_another_run_is_left_alone_and_who_has_none_is_brought_none(tmp_path: Path) -> None:
    """The directory may have been in another run, whose seed may have started anew."""

    async def main() -> None:
        async with party(tmp_path) as all_:
            one = Node(all_, 1).live()
            other, seed = Node(all_, 2, run=OTHER).live(), Node(all_, 3, run=b"")
            one.cache.remember([other.where, seed.where])
            await asyncio.sleep(2 * LAST_S)
            assert {peer for peer, _ in one.greeted} == {other.peer, seed.peer}
            assert not one.membership.islands
            assert not other.membership.islands
            assert not (seed.brought)
            assert not (other.refused)
            assert not (one.rejected)

    virtual_time.run(main())


def test_those_who_are_gone_are_tried_now_and_then(tmp_path: Path) -> None:
    gone = [PeerAddress("192.0.2.7", n, identity(n).peer_id) for n in range(1, 65)]
    given = PeerAddress("192.0.2.8", 1, identity(100).peer_id)
    nameless = PeerAddress("192.0.2.9", 1, None)
    dials: list[tuple[str, float]] = []

    async def main() -> None:
        now = asyncio.get_running_loop().time

        class Nobody:
            async def dial(self, address: str, expected: PeerId) -> None:
                dials.append((address, now()))
                raise Unreachable(address, Why.REFUSED)

        entrance: Any = SimpleNamespace(
            cache=SimpleNamespace(load=lambda: [*gone, given, nameless]),
            config=SimpleNamespace(peers=[str(given)]),
            transport=Nobody(),
        )
        looking = MetBefore(entrance)
        for _ in range(int(6 * LAST_S / DISCOVERY_S)):
            await looking.look(RUN, lambda peer: peer == gone[0].peer, now())
            await asyncio.sleep(DISCOVERY_S)

    virtual_time.run(main())
    tried = {address for address, _ in dials}
    assert tried == {place.hostport for place in gone[1:]}
    times = [at for _, at in dials]
    assert max(map(times.count, times)) <= AT_ONCE
    last = [at for address, at in dials if address == gone[-1].hostport]
    assert 4 <= len(last) <= 12
    assert all(b - a >= DISCOVERY_S for a, b in itertools.pairwise(last))
