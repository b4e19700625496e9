"""hivemind's streams of protobufs over our transports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from p2p_kit import Host, dht_pb2, two_hosts

from protocols.p2p import bindings


@pytest.fixture
def pair() -> tuple[Host, Host]:
    return two_hosts()


async def numbers(count: int) -> AsyncIterator[Any]:
    for number in range(count):
        yield dht_pb2.PingResponse(dht_time=float(number))


async def powers(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield dht_pb2.PingResponse(dht_time=request.dht_time**2)
        yield dht_pb2.PingResponse(dht_time=request.dht_time**3)


async def test_streams_both_ways_keep_their_order(pair: tuple[Host, Host]) -> None:
    a, b = pair
    await b.p2p.add_protobuf_handler(
        "powers", powers, dht_pb2.PingResponse, stream_input=True, stream_output=True
    )
    stream = await a.p2p.iterate_protobuf_handler(
        b.peer_id, "powers", numbers(50), dht_pb2.PingResponse
    )
    assert [item.dht_time async for item in stream] == [
        float(n) ** e for n in range(50) for e in (2, 3)
    ]


async def test_a_stream_in_and_one_reply(pair: tuple[Host, Host]) -> None:
    a, b = pair

    async def total(requests: AsyncIterator[Any], context: Any) -> Any:
        return dht_pb2.PingResponse(dht_time=sum([r.dht_time async for r in requests]))

    await b.p2p.add_protobuf_handler("sum", total, dht_pb2.PingResponse, stream_input=True)
    reply = await a.p2p.call_protobuf_handler(b.peer_id, "sum", numbers(10), dht_pb2.PingResponse)
    assert reply.dht_time == 45.0


async def test_closing_a_stream_cancels_its_handler(pair: tuple[Host, Host]) -> None:
    a, b = pair
    ended = asyncio.Event()

    async def endless(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield request
            await asyncio.Event().wait()
        finally:
            ended.set()

    await b.p2p.add_protobuf_handler("endless", endless, dht_pb2.PingResponse, stream_output=True)
    stream = await a.p2p.iterate_protobuf_handler(
        b.peer_id, "endless", dht_pb2.PingResponse(dht_time=1.0), dht_pb2.PingResponse
    )
    assert (await anext(stream)).dht_time == 1.0
    await stream.aclose()
    await asyncio.wait_for(ended.wait(), 5)
    assert not b.p2p._streams._served


async def test_errors_in_a_stream_reach_the_caller(pair: tuple[Host, Host]) -> None:
    a, b = pair
    upstream = bindings()

    async def breaks(request: Any, context: Any) -> AsyncIterator[Any]:
        yield request
        raise ValueError("half way")

    async def bad_input() -> AsyncIterator[Any]:
        yield dht_pb2.PingResponse()
        raise KeyError("my own input")

    await b.p2p.add_protobuf_handler("breaks", breaks, dht_pb2.PingResponse, stream_output=True)
    await b.p2p.add_protobuf_handler(
        "powers", powers, dht_pb2.PingResponse, stream_input=True, stream_output=True
    )
    stream = await a.p2p.iterate_protobuf_handler(
        b.peer_id, "breaks", dht_pb2.PingResponse(), dht_pb2.PingResponse
    )
    with pytest.raises(upstream.P2PHandlerError, match="half way"):
        [item async for item in stream]
    stream = await a.p2p.iterate_protobuf_handler(
        b.peer_id, "powers", bad_input(), dht_pb2.PingResponse
    )
    with pytest.raises(KeyError, match="my own input"):
        [item async for item in stream]
    stream = await a.p2p.iterate_protobuf_handler(
        b.peer_id, "missing", dht_pb2.PingResponse(), dht_pb2.PingResponse
    )
    with pytest.raises(upstream.P2PDaemonError):
        [item async for item in stream]
    assert not b.p2p._streams._served


async def test_one_peer_cannot_hold_all_streams(
    pair: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    monkeypatch.setattr("protocols.p2p_streams.MAX_STREAMS_PER_PEER", 2)

    async def endless(request: Any, context: Any) -> AsyncIterator[Any]:
        yield request
        await asyncio.Event().wait()

    await b.p2p.add_protobuf_handler("endless", endless, dht_pb2.PingResponse, stream_output=True)
    streams = [
        await a.p2p.iterate_protobuf_handler(
            b.peer_id, "endless", dht_pb2.PingResponse(), dht_pb2.PingResponse
        )
        for _ in range(3)
    ]
    await anext(streams[0])
    await anext(streams[1])
    with pytest.raises(bindings().P2PHandlerError, match="busy"):
        await anext(streams[2])
    for stream in streams[:2]:
        await stream.aclose()
    await b.p2p.shutdown()
