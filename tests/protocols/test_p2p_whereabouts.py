"""How nodes that hivemind knows by id alone are found, simulated and over real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from identity_kit import identity
from p2p_kit import DHTID, DHTNode, dht_pb2, double, fast_network
from roads_kit import Resident, Roads

from protocols import envelope
from protocols.errors import Malformed, Unreachable, Why
from protocols.http.transport import HttpTransport
from protocols.messages import PeerRecord
from protocols.p2p import P2P, bindings
from protocols.whereabouts import LIFETIME, PURPOSE, Whereabouts


async def test_who_named_an_id_tells_where_it_is() -> None:
    roads = Roads()
    a, b, c = (Resident(roads, n) for n in (1, 2, 3))
    await a.p2p.add_protobuf_handler("ping", double, dht_pb2.PingRequest)
    await c.p2p.add_protobuf_handler("ping", double, dht_pb2.PingRequest)
    ping, pong = dht_pb2.PingRequest(), dht_pb2.PingResponse
    for host in (b, c):
        host.transport.book.add(a.peer, a.address)
        await host.p2p.call_protobuf_handler(a.p2p.peer_id, "ping", ping, pong)
    with pytest.raises(bindings().P2PDaemonError, match="no address"):
        await b.p2p.call_protobuf_handler(c.p2p.peer_id, "ping", ping, pong)
    b.whereabouts.mention(c.peer, by=a.peer)
    await b.p2p.call_protobuf_handler(c.p2p.peer_id, "ping", ping, pong)
    assert b.transport.book.addresses(c.peer) == [c.address]


async def test_a_node_that_moved_is_found_again_through_others() -> None:
    roads = Roads()
    a, b, c = (Resident(roads, n) for n in (1, 2, 3))
    for host in (a, b, c):
        await host.p2p.add_protobuf_handler("ping", double, dht_pb2.PingRequest)
    ping, pong = dht_pb2.PingRequest(), dht_pb2.PingResponse
    for host in (b, c):
        host.transport.book.add(a.peer, a.address)
        await host.p2p.call_protobuf_handler(a.p2p.peer_id, "ping", ping, pong)
    b.whereabouts.mention(c.peer, by=a.peer)
    await b.p2p.call_protobuf_handler(c.p2p.peer_id, "ping", ping, pong)
    before = b.whereabouts.sequence(c.peer)

    c.move("192.0.2.3:5555")
    await c.p2p.call_protobuf_handler(a.p2p.peer_id, "ping", ping, pong)  # only a hears of it
    await b.p2p.call_protobuf_handler(c.p2p.peer_id, "ping", ping, pong)
    assert b.transport.book.addresses(c.peer)[0] == "192.0.2.3:5555"
    assert b.whereabouts.sequence(c.peer) > before


async def test_an_id_nobody_knows_has_no_address() -> None:
    roads = Roads()
    a, b = Resident(roads, 1), Resident(roads, 2)
    await a.p2p.add_protobuf_handler("ping", double, dht_pb2.PingRequest)
    b.transport.book.add(a.peer, a.address)
    await b.p2p.call_protobuf_handler(
        a.p2p.peer_id, "ping", dht_pb2.PingRequest(), dht_pb2.PingResponse
    )
    ghost = identity(99).peer_id
    b.whereabouts.mention(ghost, by=a.peer)
    with pytest.raises(Unreachable) as raised:
        await b.transport.call(ghost, "p2p", b"", timeout=1)
    assert raised.value.why is Why.NO_ADDRESS


async def test_two_unknown_peers_do_not_wait_for_each_other() -> None:
    roads = Roads()
    a = Resident(roads, 1)
    first, second = identity(11).peer_id, identity(12).peer_id
    a.whereabouts.mention(first, by=second)
    a.whereabouts.mention(second, by=first)
    async with asyncio.timeout(2):
        assert await a.whereabouts.ask(first) is None


async def test_forged_and_old_records_are_refused() -> None:
    roads = Roads()
    a, b, c = (Resident(roads, n) for n in (1, 2, 3))
    old = b.whereabouts.own
    assert old is not None
    new = b.whereabouts.publish(["192.0.2.2:7777"])
    a.whereabouts.learn(new, expected=b.peer)
    assert a.whereabouts.learn(old.data).record.addresses == ("192.0.2.2:7777",)
    with pytest.raises(Malformed, match="where that of"):
        a.whereabouts.learn(new, expected=c.peer)
    broken = bytearray(new)
    broken[-1] ^= 1
    with pytest.raises(Exception, match="signed"):
        a.whereabouts.learn(bytes(broken))
    with pytest.raises(Malformed):
        a.whereabouts.learn(bytes(5000))


async def test_nobody_says_where_somebody_else_is() -> None:
    """Whoever is asked could send the peer's callers to itself, for as long as it likes."""
    roads = Roads()
    a, victim, thief = (Resident(roads, n) for n in (1, 2, 3))
    true = a.whereabouts.learn(victim.whereabouts.publish([victim.address]))
    forged = envelope.seal(
        thief.identity,
        PeerRecord(victim.peer, (thief.address,), ""),
        purpose=PURPOSE,
        run=b"",
        sequence=2**62,
        expires=time.time() + LIFETIME,
    )
    with pytest.raises(Malformed, match="somebody else"):
        a.whereabouts.learn(forged, expected=victim.peer)
    assert a.whereabouts.get(victim.peer) == true
    assert a.transport.book.addresses(victim.peer) == [victim.address]


async def test_records_expire_and_are_signed_anew() -> None:
    now = [1000.0]
    network = fast_network()
    someone, other = identity(1), identity(2)
    mine = Whereabouts(network.join(someone.peer_id), someone, clock=lambda: now[0], limit=2)
    theirs = Whereabouts(network.join(other.peer_id), other, clock=lambda: now[0])
    mine.learn(theirs.publish(["192.0.2.2:1"]))
    first = theirs.own
    now[0] += 2000
    assert theirs.own is not first
    assert mine.get(other.peer_id) is not None
    now[0] += 2000
    assert mine.get(other.peer_id) is None
    for number in range(3, 8):
        extra = Whereabouts(
            network.join(identity(number).peer_id), identity(number), clock=lambda: now[0]
        )
        mine.learn(extra.publish([]))
    assert len(mine._known) == 2


async def they_are_one_dht(nodes: list[DHTNode]) -> None:
    """What one stores all find, and a node is found by its place."""
    assert await nodes[3].store("key", b"value", time.time() + 60)
    found = await asyncio.gather(*[node.get("key") for node in nodes])
    assert [item.value for item in found] == [b"value"] * len(nodes)
    wanted = nodes[-1].node_id
    nearest = await nodes[1].find_nearest_nodes([wanted], k_nearest=1)
    assert nearest[wanted] == {wanted: nodes[-1].peer_id}


async def test_twenty_nodes_find_each_other_by_id_alone() -> None:
    roads = Roads()
    hosts = [Resident(roads, n) for n in range(1, 21)]
    nodes = [await DHTNode.create(p2p=hosts[0].p2p, wait_timeout=3)]
    seed = await hosts[0].p2p.get_visible_maddrs()
    assert str(seed[0]) == f"/ip4/192.0.2.1/tcp/4390/p2p/{hosts[0].peer}"
    for host in hosts[1:]:
        host.transport.book.add(hosts[0].peer, hosts[0].address)
        nodes.append(await DHTNode.create(p2p=host.p2p, initial_peers=seed, wait_timeout=3))
    await they_are_one_dht(nodes)
    assert isinstance(nodes[-1].node_id, DHTID)
    # an address was needed, and asked for, for each that was only heard of
    assert len(hosts[7].transport.book.peers()) > 1
    for node in nodes:
        await node.shutdown()


# --- the same over real sockets ---------------------------------------------------------------


class HttpResident:
    """A peer on loopback, over TLS; knows nobody until told."""

    def __init__(self, number: int) -> None:
        self.identity = identity(number)
        self.peer = self.identity.peer_id

    async def start(self) -> None:
        self.transport = HttpTransport(self.identity, listen="127.0.0.1:0")
        await self.transport.start()
        self.whereabouts = Whereabouts(self.transport, self.identity, self.transport.book)
        assert self.transport.listening is not None
        self.address = f"127.0.0.1:{self.transport.listening[1]}"
        self.whereabouts.publish([self.address])
        self.p2p = P2P(self.transport, self.whereabouts)

    async def stop(self) -> None:
        await self.p2p.shutdown()
        await self.transport.aclose()


@pytest.fixture
async def residents() -> AsyncIterator[Callable[[int], Awaitable[list[HttpResident]]]]:
    started: list[HttpResident] = []

    async def start(count: int) -> list[HttpResident]:
        hosts = [HttpResident(number) for number in range(1, count + 1)]
        for host in hosts:
            await host.start()
            started.append(host)
        return hosts

    yield start
    for host in started:
        await host.stop()


async def test_a_node_on_a_new_port_is_found_again_over_http(
    residents: Callable[[int], Awaitable[list[HttpResident]]],
) -> None:
    a, b, c = await residents(3)
    ping, pong = dht_pb2.PingRequest(), dht_pb2.PingResponse
    await a.p2p.add_protobuf_handler("ping", double, dht_pb2.PingRequest)
    await c.p2p.add_protobuf_handler("ping", double, dht_pb2.PingRequest)
    for host in (b, c):
        await host.transport.dial(a.address, a.peer)
        await host.p2p.call_protobuf_handler(a.p2p.peer_id, "ping", ping, pong)
    b.whereabouts.mention(c.peer, by=a.peer)
    await b.p2p.call_protobuf_handler(c.p2p.peer_id, "ping", ping, pong)

    old = c.address
    await c.stop()
    await c.start()
    assert c.address != old
    await c.p2p.add_protobuf_handler("ping", double, dht_pb2.PingRequest)
    await c.transport.dial(a.address, a.peer)
    await c.p2p.call_protobuf_handler(a.p2p.peer_id, "ping", ping, pong)
    await b.p2p.call_protobuf_handler(c.p2p.peer_id, "ping", ping, pong)
    assert b.transport.book.addresses(c.peer)[0] == c.address

    ghost = identity(99).peer_id
    b.whereabouts.mention(ghost, by=a.peer)
    with pytest.raises(Unreachable) as raised:
        await b.transport.call(ghost, "p2p", b"", timeout=5)
    assert raised.value.why is Why.NO_ADDRESS


async def test_a_dht_of_twenty_nodes_over_http(
    residents: Callable[[int], Awaitable[list[HttpResident]]],
) -> None:
    hosts = await residents(20)
    seed = await hosts[0].p2p.get_visible_maddrs()
    nodes = [await DHTNode.create(p2p=hosts[0].p2p)]
    for host in hosts[1:]:
        await host.transport.dial(hosts[0].address, hosts[0].peer)
        nodes.append(await DHTNode.create(p2p=host.p2p, initial_peers=seed))
    await they_are_one_dht(nodes)
    for node in nodes:
        await node.shutdown()
