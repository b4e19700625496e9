"""Lanes to a server that answers as it pleases: none of it is more than a transport error."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from http_kit import A, B, address, echo, fake, two
from lane_kit import STRICT, Takes

from protocols.bodies import BufferFeed, read_into
from protocols.connections import tls
from protocols.errors import RemoteRefused, TransferStalled, TransportError, Unreachable, Why
from protocols.http.transport import HttpTransport
from protocols.lanes.wire import PREAMBLE, Reply, claim
from protocols.limits import Limits

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def against(serve: Answer, limits: Limits = STRICT) -> AsyncIterator[HttpTransport]:
    """B, for whom A is a server that has the key of A and answers as it pleases."""

    async def lane_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readexactly(8) != PREAMBLE[False]:
            return
        await reader.readexactly(1 + len(B.peer_id))
        writer.write(claim(A.peer_id))
        await serve(reader, writer)

    async with (
        fake(lane_server, None) as where,
        HttpTransport(B, limits=limits, tls=False) as b,
    ):
        b.book.add(A.peer_id, where)
        yield b


async def pull_all(transport: HttpTransport, max_length: int, timeout: float) -> None:
    pull = transport.pull(A.peer_id, "x", b"", max_length=max_length, timeout=timeout)
    async with pull as incoming:
        await read_into(incoming, bytearray(incoming.length))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (Reply("", 0, 10**15).encode(), RemoteRefused),
        (Reply("busy", 0, 10**15).encode(), RemoteRefused),
        (Reply("busy", 0, 2, b"\xff\xfe").encode(), RemoteRefused),
        (Reply("", 0, 200).encode() + bytes(200), RemoteRefused),
        (Reply("", 0, 50).encode() + bytes(49), Unreachable),
        (b"\x03" + bytes(13), Unreachable),
        (b"\x00" + bytes(13), Unreachable),
        (b"\x01\x05" + bytes(12) + b"abcde", Unreachable),
        (b"\x00\x03" + bytes(12) + b"a\r\n", Unreachable),
        (b"HTTP/1.1 200 OK\r\n\r\n", Unreachable),
        (b"", Unreachable),
    ],
)
async def test_what_a_hostile_server_answers_is_a_transport_error(
    data: bytes, error: type[Exception]
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(14 + 1)
        writer.write(data)
        await writer.drain()

    async with against(serve) as b:
        with pytest.raises(error):
            await pull_all(b, 100, 5)
    if data != Reply("", 0, 200).encode() + bytes(200):  # for a push that is a good answer
        async with against(serve) as b:
            with pytest.raises(error):
                await b.push(A.peer_id, "x", b"", BufferFeed(b""), timeout=5)


async def test_a_server_that_trickles_its_answer_is_left() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(15)
        writer.write(Reply("", 0, 1_000_000).encode())
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with against(serve) as b:
        with pytest.raises(TransferStalled):
            await pull_all(b, 10**6, 0.5)


async def test_a_server_that_never_answers_is_left() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(100_000):
            pass

    async with against(serve) as b:
        with pytest.raises(TransferStalled):
            await b.push(A.peer_id, "x", b"", BufferFeed(bytes(100_000)), timeout=0.4)


async def test_a_server_that_talks_on_an_idle_lane_loses_it() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readexactly(15)
            writer.write(Reply("", 0, 2, b"ok").encode())
            await asyncio.sleep(0)
            writer.write(b"and more")

    async with against(serve) as b:
        for _ in range(5):
            try:
                assert await b.push(A.peer_id, "x", b"", BufferFeed(b""), timeout=5) == b"ok"
            except TransportError:
                continue  # it may have been in use again before the rest came


async def test_a_peer_that_refuses_our_identity_is_told_apart() -> None:
    """With TLS 1.3 a server looks at the client's certificate after the client's handshake."""
    picky = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    picky.verify_mode = ssl.CERT_REQUIRED  # and trusts no authority at all
    tls.load_chain(picky, tls.certificate(A), A.key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        await writer.start_tls(picky)

    async with fake(serve, None) as where, HttpTransport(B, limits=STRICT) as b:
        b.book.add(A.peer_id, where)
        with pytest.raises(Unreachable) as error:
            await b.push(A.peer_id, "x", b"", BufferFeed(bytes(100)), timeout=5)
        assert error.value.why in (Why.TLS, Why.RESET)


async def test_lanes_and_messages_share_the_port() -> None:
    async with two(STRICT) as (a, b):
        Takes(a)
        a.on_call("echo", echo)
        for _ in range(3):
            assert await b.dial(address(a)) == A.peer_id
            assert await b.push(A.peer_id, "push", b"", BufferFeed(bytes(9)), timeout=5) == b"ok"
            assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
