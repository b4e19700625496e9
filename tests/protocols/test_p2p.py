"""hivemind's calls over our transports: plain, refused, bounded."""

from __future__ import annotations

import time
from typing import Any

import pytest
from identity_kit import identity
from p2p_kit import Host, dht_pb2, double, fast_network, two_hosts

from protocols.p2p import bindings
from protocols.rate_limit import RateLimit
from protocols.whereabouts import Whereabouts


@pytest.fixture
def pair() -> tuple[Host, Host]:
    return two_hosts()


async def test_a_plain_call_knows_its_caller(pair: tuple[Host, Host]) -> None:
    a, b = pair
    seen = []

    async def handler(request: Any, context: Any) -> Any:
        seen.append((context.remote_id, context.local_id, context.handle_name))
        return await double(request, context)

    await b.p2p.add_protobuf_handler("ping", handler, dht_pb2.PingRequest)
    reply = await a.p2p.call_protobuf_handler(
        b.peer_id, "ping", dht_pb2.PingRequest(validate=True), dht_pb2.PingResponse
    )
    assert reply.available
    assert seen == [(a.peer_id, b.peer_id, "ping")]


async def test_a_call_brings_both_records(pair: tuple[Host, Host]) -> None:
    a, b = pair
    await b.p2p.add_protobuf_handler("ping", double, dht_pb2.PingRequest)
    ping = dht_pb2.PingRequest()
    await a.p2p.call_protobuf_handler(b.peer_id, "ping", ping, dht_pb2.PingResponse)
    first = a.whereabouts.get(b.identity.peer_id)
    assert first is not None
    assert first.record.addresses == ("192.0.2.2:4390",)
    assert b.whereabouts.get(a.identity.peer_id) is not None
    b.whereabouts.publish(["192.0.2.9:4390"])
    await a.p2p.call_protobuf_handler(b.peer_id, "ping", ping, dht_pb2.PingResponse)
    moved = a.whereabouts.get(b.identity.peer_id)
    assert moved is not None
    assert moved.record.addresses == ("192.0.2.9:4390",)
    assert moved.sequence > first.sequence


@pytest.mark.parametrize("off", [-3 * 3600.0, 3 * 3600.0])
async def test_a_call_is_answered_though_one_of_the_clocks_is_hours_off(off: float) -> None:
    """The records that go along have expired, or live too long: a greeting tells of that."""
    network = fast_network()
    a, b = Host(network, 1), Host(network, 2)
    a.whereabouts = a.p2p.whereabouts = Whereabouts(
        a.transport, a.identity, clock=lambda: time.time() + off
    )
    a.whereabouts.publish(["192.0.2.1:4390"])
    await b.p2p.add_protobuf_handler("ping", double, dht_pb2.PingRequest)
    ping = dht_pb2.PingRequest(validate=True)
    assert (
        await a.p2p.call_protobuf_handler(b.peer_id, "ping", ping, dht_pb2.PingResponse)
    ).available
    assert a.whereabouts.get(b.identity.peer_id) is None
    assert b.whereabouts.get(a.identity.peer_id) is None


async def test_errors_are_those_hivemind_knows(pair: tuple[Host, Host]) -> None:
    a, b = pair
    upstream = bindings()

    async def boom(request: Any, context: Any) -> Any:
        raise ValueError("boom")

    await b.p2p.add_protobuf_handler("boom", boom, dht_pb2.PingRequest)
    ping = dht_pb2.PingRequest()
    with pytest.raises(upstream.P2PHandlerError, match="boom"):
        await a.p2p.call_protobuf_handler(b.peer_id, "boom", ping, dht_pb2.PingResponse)
    with pytest.raises(upstream.P2PDaemonError):
        await a.p2p.call_protobuf_handler(b.peer_id, "missing", ping, dht_pb2.PingResponse)
    with pytest.raises(upstream.P2PDaemonError):
        await a.p2p.call_protobuf_handler(a.peer_id, "boom", ping, dht_pb2.PingResponse)
    with pytest.raises(upstream.P2PDaemonError):
        await b.p2p.add_protobuf_handler("boom", boom, dht_pb2.PingRequest)
    await b.p2p.remove_protobuf_handler("boom")
    with pytest.raises(upstream.P2PDaemonError):
        await a.p2p.call_protobuf_handler(b.peer_id, "boom", ping, dht_pb2.PingResponse)
    nobody = upstream.PeerID.from_base58(identity(77).peer_id)
    with pytest.raises(upstream.P2PDaemonError):
        await a.p2p.call_protobuf_handler(nobody, "boom", ping, dht_pb2.PingResponse)


async def test_oversized_protobufs_stay_errors_of_the_call(pair: tuple[Host, Host]) -> None:
    a, b = pair
    upstream = bindings()

    async def huge(request: Any, context: Any) -> Any:
        return dht_pb2.FindResult(value=bytes(2**20))

    await b.p2p.add_protobuf_handler("huge", huge, dht_pb2.PingRequest)
    with pytest.raises(upstream.P2PHandlerError, match="exceeds"):
        await a.p2p.call_protobuf_handler(
            b.peer_id, "huge", dht_pb2.PingRequest(), dht_pb2.FindResult
        )
    with pytest.raises(upstream.P2PDaemonError, match="exceed"):
        await a.p2p.call_protobuf_handler(
            b.peer_id, "huge", dht_pb2.FindResult(value=bytes(2**20)), dht_pb2.FindResult
        )


async def test_a_peer_that_calls_too_often_is_refused() -> None:
    network = fast_network()
    a = Host(network, 1)
    b = Host(network, 2, limit=RateLimit(rate=0.0, burst=2))
    await b.p2p.add_protobuf_handler("ping", double, dht_pb2.PingRequest)
    ping, pong = dht_pb2.PingRequest(), dht_pb2.PingResponse
    for _ in range(2):
        await a.p2p.call_protobuf_handler(b.peer_id, "ping", ping, pong)
    with pytest.raises(bindings().P2PHandlerError, match="busy"):
        await a.p2p.call_protobuf_handler(b.peer_id, "ping", ping, pong)
