"""The directory of a run over hivemind's DHT: entries, attacks on them, upkeep."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgpack
import pytest
from identity_kit import identity

from bootstrap import records
from bootstrap.dht import Dht
from bootstrap.handshake import Gate, greet
from bootstrap.seeds import find_peers
from protocols.addresses import PeerAddress
from protocols.envelope import seal
from protocols.errors import Malformed
from protocols.http.transport import HttpTransport
from protocols.identity import PeerId
from protocols.memory.transport import Link, MemoryNetwork, MemoryTransport
from protocols.messages import Envelope, PeerRecord
from protocols.p2p import BURST, bindings
from protocols.tasks import Background, beside
from protocols.whereabouts import Whereabouts

RUN = bytes(range(32))


class Swarm:
    """Nodes on a memory network; the first is everybody's seed."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(seed=3, link=Link(latency=0.0005))
        self.dhts: list[Dht] = []
        self.whereabouts: list[Whereabouts] = []
        self.transports: list[MemoryTransport] = []
        self.upkeep = Background()

    async def add(self, run: bytes = RUN, refresh: float = 60.0, **options: Any) -> Dht:
        who = identity(len(self.dhts) + 1)
        transport = self.network.join(who.peer_id)
        whereabouts = Whereabouts(transport, who)
        whereabouts.publish([f"192.0.2.{len(self.dhts) + 1}:4390"])
        seeds = [self.transports[0].peer_id] if self.transports else []
        dht = await Dht.start(transport, whereabouts, seeds, run, **options)
        self.upkeep.spawn(dht.maintain(refresh))
        self.dhts.append(dht)
        self.whereabouts.append(whereabouts)
        self.transports.append(transport)
        return dht

    async def grow(self, count: int) -> None:
        for _ in range(count):
            await self.add()

    def record(self, index: int) -> bytes:
        own = self.whereabouts[index].own
        assert own is not None
        return own.data


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    swarm = Swarm()
    yield swarm
    await swarm.upkeep.aclose()
    for dht in swarm.dhts:
        await dht.aclose()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():  # noqa: ASYNC110  nothing tells when a record has spread
            await asyncio.sleep(0.02)


async def test_everybody_finds_every_island(swarm: Swarm) -> None:
    await swarm.grow(8)
    for dht in swarm.dhts:
        dht.keep_announced()

    async def complete() -> bool:
        return all([len(await dht.islands()) == 8 for dht in swarm.dhts])

    await until(complete)
    found = await swarm.dhts[5].islands()
    assert found[identity(2).peer_id] == PeerRecord(identity(2).peer_id, ("192.0.2.2:4390",), "")
    assert swarm.whereabouts[5].get(identity(2).peer_id) is not None


async def test_runs_do_not_mix(swarm: Swarm) -> None:
    await swarm.add()
    await swarm.add(run=b"\x01" * 32)
    for index, dht in enumerate(swarm.dhts):
        await dht.announce(swarm.record(index))
    for index, dht in enumerate(swarm.dhts):
        assert list(await dht.islands()) == [identity(index + 1).peer_id]
    for dht in swarm.dhts:  # nobody's memory is for another run's records
        assert len(dht._node.protocol.storage) == 1


async def test_a_new_record_replaces_the_old_one_everywhere(swarm: Swarm) -> None:
    await swarm.grow(6)
    assert await swarm.dhts[4].announce(swarm.record(4))
    old = swarm.record(4)
    assert await swarm.dhts[4].announce(old)  # again: it is there
    swarm.whereabouts[4].publish(["192.0.2.5:9999"])
    assert await swarm.dhts[4].announce(swarm.record(4))
    assert not await swarm.dhts[4].announce(old)
    for dht in swarm.dhts:
        assert (await dht.islands())[identity(5).peer_id].addresses == ("192.0.2.5:9999",)


async def test_a_newer_sequence_wins_though_it_expires_sooner(swarm: Swarm) -> None:
    await swarm.grow(5)
    now = time.time()
    who = identity(3)
    for sequence, lifetime in ((10, 900.0), (11, 300.0)):
        record = PeerRecord(who.peer_id, (f"192.0.2.3:{sequence}",), "")
        data = seal(
            who, record, purpose="record", run=RUN, sequence=sequence, expires=now + lifetime
        )
        assert await swarm.dhts[2].announce(data)
    for dht in swarm.dhts:
        entry = (await dht.get("record"))[who.peer_id]
        assert Envelope.decode(entry).sequence == 11


async def test_nobody_writes_under_another_name(swarm: Swarm) -> None:
    await swarm.grow(4)
    thief, victim = identity(1), identity(2)
    assert await swarm.dhts[1].announce(swarm.record(1))
    expires = time.time() + 600
    forged = seal(
        thief,
        PeerRecord(victim.peer_id, ("198.51.100.1:1",), ""),
        purpose="record",
        run=RUN,
        sequence=2**50,
        expires=expires,
    )
    honest = swarm.dhts[0]._node
    honest.protocol.record_validator = None  # the thief's own node checks nothing
    key = f"run/{RUN.hex()}/islands"
    replies = await asyncio.gather(
        *[
            honest.protocol.call_store(
                dht._node.peer_id,
                [_key_id(key)],
                [_packed(forged)],
                [expires],
                subkeys=[victim.peer_id],
            )
            for dht in swarm.dhts[1:]
        ]
    )
    assert replies == [[False]] * 3
    found = (await swarm.dhts[3].islands())[victim.peer_id]
    assert found.addresses == ("192.0.2.2:4390",)


async def test_a_made_up_node_id_is_refused(swarm: Swarm) -> None:
    await swarm.grow(2)
    from hivemind.dht.routing import DHTID

    liar = swarm.dhts[1]._node
    liar.protocol.node_info.node_id = DHTID.generate().to_bytes()
    liar.protocol.routing_table.__init__(liar.node_id, 20, 5)
    assert await liar.protocol.call_ping(swarm.dhts[0]._node.peer_id) is None
    liar_id = swarm.transports[1].peer_id
    table = swarm.dhts[0]._node.protocol.routing_table
    assert table.get(peer_id=bindings().PeerID.from_base58(liar_id)) in (None, liar.node_id)


async def test_a_stranger_cannot_keep_a_node_busy_with_signatures(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has one signature verified, or one key looked up, for each call that it may make."""
    await swarm.grow(2)
    verified: list[bytes] = []
    real = records.open_entry

    def counting(data: bytes, now: float) -> Any:
        verified.append(data)
        return real(data, now)

    monkeypatch.setattr(records, "open_entry", counting)
    node, stranger = swarm.dhts[0]._node.peer_id, swarm.dhts[1]._node.protocol
    who, expires = identity(2), time.time() + 600
    key, numbers = _key_id(f"run/{RUN.hex()}/islands"), itertools.count()

    async def store(count: int) -> Any:
        about = PeerRecord(who.peer_id, ("192.0.2.2:4390",), "")
        many = [
            _packed(seal(who, about, purpose="record", run=RUN, expires=expires, sequence=n))
            for n in itertools.islice(numbers, count)
        ]
        keys, subkeys = [key] * count, [who.peer_id] * count
        return await stranger.call_store(node, keys, many, [expires] * count, subkeys=subkeys)

    assert await store(records.MAX_RECORDS_PER_CALL + 1) is None
    assert verified == []
    monkeypatch.setattr(swarm.dhts[0]._p2p._limit, "_rate", 0.0)
    while await store(100) is not None:
        assert len(verified) < BURST
    assert len(verified) >= BURST // 2
    keys = [_key_id(str(n)) for n in range(64)]
    answered = [await stranger.call_find(node, keys) is not None for _ in range(3)]
    assert not answered[-1]  # of less than a hundred calls that were left


async def test_nobody_puts_a_record_into_a_cache(swarm: Swarm) -> None:
    """hivemind's has no bounds, and what is in it hides what is stored."""
    await swarm.grow(2)
    assert await swarm.dhts[0].announce(swarm.record(0))
    node, stranger = swarm.dhts[0]._node, swarm.dhts[1]._node.protocol
    who, expires = identity(2), time.time() + 3600
    about = PeerRecord(who.peer_id, ("192.0.2.2:4390",), "")
    data = _packed(seal(who, about, purpose="record", run=RUN, sequence=1, expires=expires))
    key = _key_id(f"run/{RUN.hex()}/islands")

    async def store() -> Any:
        return await stranger.call_store(
            node.peer_id, [key], [data], [expires], subkeys=[who.peer_id], in_cache=True
        )

    assert await store() is None  # refused
    swarm.dhts[0]._p2p._inspector = None
    assert await store() == [False]  # nothing is kept there, whoever asks for it
    assert list(await swarm.dhts[0].islands()) == [identity(1).peer_id]


async def test_nobody_gets_past_the_bounds_by_a_stream(swarm: Swarm) -> None:
    await swarm.grow(2)
    node, stranger = swarm.dhts[0]._node, swarm.dhts[1]._p2p
    from hivemind.proto import dht_pb2

    oversized = dht_pb2.StoreRequest(keys=[bytes(20)], subkeys=[b""], values=[bytes(5000)])
    for one in ("rpc_store", "rpc_ping", "rpc_find"):
        with pytest.raises(bindings().P2PDaemonError, match="no streams"):
            async for _ in await stranger.iterate_protobuf_handler(
                node.peer_id, f"DHTProtocol.{one}", oversized, dht_pb2.StoreResponse
            ):
                pass


async def test_records_survive_the_death_of_most_nodes(swarm: Swarm) -> None:
    await swarm.grow(12)
    for index, dht in enumerate(swarm.dhts):
        assert await dht.announce(swarm.record(index))
    for index in range(3):  # of the five replicas at most these die
        await swarm.transports[index].aclose()
    found = await swarm.dhts[-1].islands()
    assert len(found) == 12


async def test_records_are_announced_again_at_half_their_lifetime(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocols.whereabouts.LIFETIME", 1.0)
    monkeypatch.setattr("bootstrap.dht.RETRY", 0.1)
    await swarm.grow(3)
    swarm.dhts[1].keep_announced()
    seen: set[int] = set()

    async def thrice() -> bool:
        found = await swarm.dhts[2].get("record")
        seen.update(Envelope.decode(entry).sequence for entry in found.values())
        return len(seen) == 3

    await until(thrice)


async def test_who_lost_everybody_meets_the_seeds_again(swarm: Swarm) -> None:
    await swarm.add()
    late = await swarm.add(refresh=0.1)
    seed = swarm.transports[0].peer_id
    assert late.neighbours() == [seed]
    table = late._node.protocol.routing_table
    del table[table.get(peer_id=bindings().PeerID.from_base58(seed))]
    assert late.neighbours() == []

    async def met() -> bool:
        return late.neighbours() == [seed]

    await until(met)


async def test_alone_and_with_dead_seeds_it_still_starts() -> None:
    network = MemoryNetwork(seed=3, link=Link(latency=0.0005))
    who = identity(1)
    transport = network.join(who.peer_id)
    whereabouts = Whereabouts(transport, who)
    whereabouts.publish(["192.0.2.1:4390"])
    dht = await Dht.start(transport, whereabouts, [identity(50).peer_id], RUN)
    assert await dht.join([identity(51).peer_id]) == 0
    own = whereabouts.own
    assert own is not None
    assert await dht.announce(own.data)
    assert list(await dht.islands()) == [who.peer_id]
    await dht.aclose()
    with pytest.raises(Malformed):
        await dht.get("diary")


async def test_a_client_is_in_nobodys_table(swarm: Swarm) -> None:
    await swarm.grow(2)
    client = await swarm.add(client_mode=True)
    assert await client.announce(swarm.record(2))
    for dht in swarm.dhts[:2]:
        assert identity(3).peer_id not in dht.neighbours()
        assert identity(3).peer_id in await dht.islands()


def _key_id(key: str) -> Any:
    from hivemind.dht.routing import DHTID

    return DHTID.generate(key)


def _packed(data: bytes) -> bytes:
    """As hivemind stores it."""
    packed: bytes = msgpack.packb(data, use_bin_type=True)
    return packed


async def test_from_a_seeds_address_to_the_list_of_islands_over_http() -> None:
    """What a newcomer does: dial, greet, join, announce, read."""
    async with AsyncExitStack() as stack:

        async def island(number: int, seeds: list[PeerAddress]) -> tuple[Dht, PeerAddress]:
            who = identity(number)
            transport = await stack.enter_async_context(HttpTransport(who, listen="127.0.0.1:0"))
            assert transport.listening is not None
            address = PeerAddress(*transport.listening, who.peer_id)
            whereabouts = Whereabouts(transport, who, transport.book)
            whereabouts.publish([address.hostport])
            run = RUN if not seeds else b""
            known: list[PeerId] = []
            for reached in (await find_peers(transport, seeds)).reached if seeds else []:
                greeting = await greet(transport, whereabouts, reached.peer, software="0.1.0")
                run = greeting.welcome.run
                known.append(reached.peer)
            Gate(transport, whereabouts, software="0.1.0", run=lambda: run)
            dht = await Dht.start(transport, whereabouts, known, run)
            stack.push_async_callback(dht.aclose)
            await stack.enter_async_context(beside(dht.maintain()))
            dht.keep_announced()
            return dht, address

        first, seed = await island(1, [])
        dhts = [first]
        for number in range(2, 6):
            dht, _ = await island(number, [PeerAddress(seed.host, seed.port)])
            dhts.append(dht)

        async def complete() -> bool:
            return all([len(await dht.islands()) == 5 for dht in dhts])

        await until(complete)
        assert set(dhts[4].neighbours()) == {identity(n).peer_id for n in range(1, 5)}


def test_hivemind_is_imported_beside_the_event_loop() -> None:
    """On a busy machine that takes seconds: in the loop the node would neither hear nor speak."""
    program = """
import asyncio, sys, threading
from identity_kit import identity
from bootstrap.dht import Dht
from protocols.memory.transport import MemoryNetwork
from protocols.whereabouts import Whereabouts

class Witness:
    asked = set()
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hivemind" or name == "bootstrap.records":
            self.asked.add(threading.current_thread() is threading.main_thread())

async def main():
    transport = MemoryNetwork(seed=3).join(identity(1).peer_id)
    dht = await Dht.start(transport, Whereabouts(transport, identity(1)), [], bytes(32))
    await dht.aclose()

assert "hivemind" not in sys.modules
sys.meta_path.insert(0, Witness())
asyncio.run(main())
print(Witness.asked)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "{False}\n", done.stderr
