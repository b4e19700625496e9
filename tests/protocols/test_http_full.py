"""Who makes way where there are as many connections as there may be of all."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from asyncio import sslproto
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from http_kit import A, B, C, Hold, echo, post, raw, take, two, wait_for
from lane_kit import bare, lane, push, reply

from protocols.bodies import BufferFeed
from protocols.errors import Unreachable
from protocols.http import listener
from protocols.identity import Identity, PeerId
from protocols.lanes.wire import PREAMBLE as LANE
from protocols.limits import Limits
from protocols.rate_limit import RateLimit
from protocols.relay.wire import PREAMBLE, TOKEN_BYTES
from protocols.tasks import first

FULL = Limits(grace=0.1, total=16)  # one place is for strangers
MANY = [Identity.from_seed(bytes([n]) * 32) for n in range(10, 24)]


async def test_connections_that_say_nothing_make_way() -> None:
    async with two(Limits(grace=0.1, total=2)) as (a, b), raw(a, None) as (reader, _), raw(a, None):
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
        assert await asyncio.wait_for(reader.read(), 5) == b""  # the oldest
        async with raw(a, None), raw(a, None):
            await wait_for(lambda: a.stats.capped_connections == 3)
            assert a.stats.connections == 1
            assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
            assert a.stats.connections == 1  # it is still the same


async def test_an_address_begins_only_so_many_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs this node more than who sends a ClientHello again and again."""
    monkeypatch.setattr(listener, "_HANDSHAKES", (0.0, 2.0))
    async with two(FULL) as (a, b), raw(a, None) as (reader, writer):
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
        async with raw(a, None) as (second, begins):
            for one in (writer, begins):
                one.write(b"\x16\x03\x01")
                await one.drain()
            with contextlib.suppress(ConnectionError):
                assert await first(reader.read(), second.read()) == b""
            await wait_for(lambda: a.stats.capped_connections == 1)
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"  # it has its connection


async def test_an_address_begins_only_so_many_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which cost as much. Calls are counted apart, and so is another address."""
    asked: list[str] = []

    class Seen(RateLimit):
        def take(self, peer: str, count: int = 1) -> bool:
            asked.append(peer)
            return super().take(peer, count)

    monkeypatch.setattr(listener, "RateLimit", Seen)
    monkeypatch.setattr(listener, "_HANDSHAKES", (0.0, 1.0))
    async with two(FULL) as (a, b), bare(a) as (_, begins), bare(a) as (reader, writer):
        begins.write(LANE[True])
        await begins.drain()
        await wait_for(lambda: bool(asked))
        writer.write(LANE[True])
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        assert a.stats.capped_connections == 1
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
        assert a.listening is not None
        _, elsewhere = await asyncio.open_connection(*a.listening, local_addr=("127.0.0.2", 0))
        try:
            elsewhere.write(LANE[True])
            await wait_for(lambda: "127.0.0.2" in asked)
            assert a.stats.capped_connections == 1
        finally:
            elsewhere.transport.abort()


def test_all_connections_of_an_address_can_be_begun_anew_at_once() -> None:
    """As after a cut of the link of many nodes behind one router, more than once."""
    rate, burst = listener._HANDSHAKES
    assert burst >= 3 * Limits().per_ip
    assert rate >= Limits().per_ip / 10


async def test_a_connection_that_proves_nothing_yet_costs_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    class Seen(sslproto.SSLProtocol):
        max_size = 256 * 1024

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(sslproto, "SSLProtocol", Seen)
    monkeypatch.setattr(listener, "SSLProtocol", Seen)
    async with two() as (a, b), raw(a, None) as (_, writer):
        writer.write(b"\x16\x03\x01")
        await wait_for(lambda: bool(made))
        long = bytes(300_000)
        a.on_call("long", echo, max_body=len(long))
        told = await b.call(A.peer_id, "long", long, timeout=20, max_reply=len(long))
        assert told == long
        assert {len(one._ssl_buffer) for one in made} == {32 * 1024}


async def test_who_is_not_admitted_makes_way_and_who_is_does_not() -> None:
    admitted = {B.peer_id}
    async with two(Limits(grace=0.1, total=2)) as (a, b):
        a.admit(lambda peer, name: peer in admitted)
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
        async with raw(a) as (first, _), raw(a) as (second, _):
            assert await asyncio.wait_for(first.read(), 5) == b""
            admitted.add(C.peer_id)  # it has greeted meanwhile
            async with raw(a, None) as (third, _):
                assert await asyncio.wait_for(third.read(), 5) == b""
            assert not second.at_eof()
        assert a.stats.capped_connections == 2
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
        assert a.stats.connections == 3


async def test_idle_connections_of_made_up_keys_make_way_for_a_newcomer() -> None:
    """Without an invitation whoever proves a key is admitted."""
    async with two(FULL) as (a, b), AsyncExitStack() as stack:
        a.on_push("take", take, max_length=9)
        first, _ = await stack.enter_async_context(lane(a))
        await wait_for(lambda: a.stats.connections == 1)
        held = [await stack.enter_async_context(raw(a, one)) for one in MANY]
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(first.read(), 5) == b""
        reader, writer = await stack.enter_async_context(lane(a))
        writer.write(push("take", 9, bytes(9)))
        assert (await reply(reader)).detail == b"9"
        assert await asyncio.wait_for(held[0][0].read(), 5) == b""
        assert a.stats.capped_connections == 2


async def test_a_call_that_nobody_waits_for_takes_no_place_of_those_admitted() -> None:
    async with two(FULL) as (a, b), AsyncExitStack() as stack:
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
        for one in MANY:
            await stack.enter_async_context(raw(a, one))
        reader, writer = await asyncio.open_connection(*(a.listening or ("", 0)))
        writer.write(PREAMBLE + secrets.token_bytes(TOKEN_BYTES))
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert a.stats.garbage_connections == 1
        assert a.stats.capped_connections == 0


async def test_who_is_served_makes_no_way() -> None:
    size = 16 << 20  # more than the system keeps of an answer
    roomy = replace(FULL, bodies=1 << 30)
    call, held = Hold(), Hold()

    async def tell(peer: PeerId, body: bytes) -> bytes:
        return bytes(size)

    async with two(roomy) as (a, b), lane(a) as (_, user), AsyncExitStack() as stack:
        a.on_push("hold", held.push, max_length=9)
        a.on_call("hold", call.call)
        a.on_call("tell", tell)
        user.write(push("hold", 0))
        links = [await stack.enter_async_context(raw(a, one)) for one in MANY]
        for number, (_, writer) in enumerate(links[1:]):
            writer.write(post("/call/hold") if number % 2 else 2 * post("/call/tell"))
        tellers = (len(links)) // 2  # none is asked a second time before its answer is taken
        await wait_for(lambda: a.stats.requests_by_name["tell"] == tellers)
        await asyncio.wait_for(call.begun.wait(), 5)
        await asyncio.wait_for(held.begun.wait(), 5)
        links[0][1].write(post("/call/hold"))
        await wait_for(lambda: len(a._server._serving) == len(links) - tellers)
        with contextlib.suppress(Unreachable):  # else its request came before it was cut
            await b.call(A.peer_id, "echo", b"x", timeout=5)
        await wait_for(lambda: a.stats.capped_connections == 1)  # its own
        assert not call.ended.is_set()
        assert not held.ended.is_set()
        for reader, _ in links[1::2]:
            for _ in range(2):
                await reader.readuntil(b"\r\n\r\n")
                assert len(await reader.readexactly(size)) == size
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
        assert not held.ended.is_set()


async def test_bodies_of_calls_are_bounded_all_together() -> None:
    async with two(Limits(grace=0.1, bodies=1_000_000)) as (a, b), AsyncExitStack() as stack:
        a.on_call("large", echo, max_body=10**6)
        links = [await stack.enter_async_context(raw(a, one)) for one in MANY[:3]]
        for number, (_, writer) in enumerate(links):
            writer.write(post("/call/large", length=10**6, body=bytes(400_000)))
            come = min((number + 1) * 400_000, 10**6)  # the third is cut as soon as it is too much
            await wait_for(lambda come=come: a.stats.in_by_name["large"] >= come)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(links[2][0].read(), 5) == b""
        assert await b.call(A.peer_id, "large", bytes(60_000), timeout=5) == bytes(60_000)
        links[1][1].transport.abort()
        await wait_for(lambda: len(a._server._serving) == 1)
        reader, writer = links[0]
        writer.write(bytes(600_000))
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert a.stats.capped_connections == 1


async def test_answers_that_nobody_takes_are_bounded_with_them() -> None:
    size = 16 << 20  # more than the system keeps of an answer

    async def tell(peer: PeerId, body: bytes) -> bytes:
        return bytes(size)

    async with two(Limits(grace=0.1, bodies=2 * size + 1000)) as (a, b), AsyncExitStack() as stack:
        a.on_call("tell", tell)
        links = [await stack.enter_async_context(raw(a, one)) for one in MANY[:3]]
        for number, (_, writer) in enumerate(links):
            writer.write(post("/call/tell"))
            await wait_for(lambda so=number: a.stats.requests_by_name["tell"] == so + 1)
        await wait_for(lambda: a.stats.capped_connections == 1)
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
        cut = 0
        for reader, _ in links:
            try:
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
                assert len(await asyncio.wait_for(reader.readexactly(size), 20)) == size
            except (ConnectionError, asyncio.IncompleteReadError):
                cut += 1
        assert cut == 1
        await wait_for(lambda: a._server._listener._connections._held == 0)
        assert a.stats.capped_connections == 1
        assert a.stats.stalled_bodies == 0


async def test_the_lane_of_a_peer_that_is_idle_the_longest_makes_way() -> None:
    """Who comes again, from another address or after a power cut, has lanes here that are dead."""
    async with (
        two(Limits(grace=0.1, per_peer=1)) as (a, b),
        lane(a) as (first, user),
        lane(a) as (second, _),
    ):
        a.on_push("take", take, max_length=9)
        lanes = a._server._lanes._by_peer
        await wait_for(lambda: len(lanes.get(C.peer_id, ())) == 2)
        user.write(push("take", 9, bytes(9)))
        assert (await reply(first)).detail == b"9"
        async with lane(a) as (third, newcomer):
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(second.read(), 5) == b""
            for reader, writer in ((first, user), (third, newcomer)):
                writer.write(push("take", 9, bytes(9)))
                assert (await reply(reader)).detail == b"9"
            assert a.stats.capped_connections == 1
            assert len(lanes[C.peer_id]) == 2
            assert await b.push(A.peer_id, "take", b"", BufferFeed(bytes(9)), timeout=5) == b"9"
        await wait_for(lambda: len(lanes[C.peer_id]) == 1)


async def test_lanes_of_one_peer_that_serve_are_not_cut_for_more() -> None:
    hold, more = Hold(), Hold()
    async with (
        two(Limits(grace=0.1, per_peer=1)) as (a, b),
        lane(a) as (_, one),
        lane(a) as (_, other),
    ):
        a.on_push("take", take, max_length=9)
        for writer, name, held in ((one, "hold", hold), (other, "more", more)):
            a.on_push(name, held.push, max_length=9)
            writer.write(push(name, 0))
            await asyncio.wait_for(held.begun.wait(), 5)
        async with lane(a) as (reader, _):
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 5) == b""
        assert a.stats.capped_connections == 1
        assert not hold.ended.is_set()
        assert not more.ended.is_set()
        assert await b.push(A.peer_id, "take", b"", BufferFeed(bytes(9)), timeout=5) == b"9"
