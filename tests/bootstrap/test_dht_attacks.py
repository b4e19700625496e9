"""Attacks on the directory of a run: forged records, made-up ids, floods, caches and streams."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import msgpack
import pytest
from dht_kit import RUN, Swarm
from identity_kit import identity

from bootstrap import records
from bootstrap.dht import RPC_TIMEOUT
from protocols.envelope import seal
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.messages import PeerRecord
from protocols.p2p import bindings
from protocols.rate_limit import BURST


def _key_id(key: str) -> Any:
    from hivemind.dht.routing import DHTID

    return DHTID.generate(key)


def _packed(data: bytes) -> bytes:
    """As hivemind stores it."""
    packed: bytes = msgpack.packb(data, use_bin_type=True)
    return packed


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


def test_made_up_ids_take_a_look_up_no_longer_than_one_of_them() -> None:
    """One stranger may name as many as it likes, which take a call each and answer none."""

    async def unanswered(peer: PeerId, body: bytes) -> bytes:
        await asyncio.sleep(3600)
        return b""

    async def main() -> None:
        from hivemind.dht.routing import DHTID

        swarm = Swarm()
        await swarm.grow(6)
        for index, dht in enumerate(swarm.dhts):
            assert await dht.announce(swarm.record(index))
        named = []
        for number in range(records.MAX_NEIGHBOURS):
            peer = Identity.from_seed((1000 + number).to_bytes(32, "big")).peer_id
            swarm.network.join(peer).on_call("p2p", unanswered)
            place = DHTID.from_bytes(records.node_id(peer))
            named.append((place, bindings().PeerID.from_base58(peer)))
        table = swarm.dhts[-1]._node.protocol.routing_table
        table.get_nearest_neighbors = lambda *_, **__: named
        clock = asyncio.get_running_loop().time
        began = clock()
        newcomer = await swarm.add()
        met = clock()
        found = await newcomer.islands()
        done = clock()
        await swarm.upkeep.aclose()
        for dht in swarm.dhts:
            await dht.aclose()
        assert len(found) == 6
        assert met - began < RPC_TIMEOUT + 1
        assert done - met < RPC_TIMEOUT + 1

    virtual_time.run(main())
