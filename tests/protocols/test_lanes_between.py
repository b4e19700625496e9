"""Somebody on the way, as every relay is: can cut and hold back, and put no word into a mouth."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from http_kit import A, two
from lane_kit import STRICT, Takes, push

from protocols.bodies import BufferFeed
from protocols.connections.sealing import KEY_BYTES, OVERHEAD, Sealer
from protocols.errors import TransportError, Unreachable
from protocols.http.transport import HttpTransport
from protocols.lanes.wire import PREAMBLE, Reply
from protocols.tasks import beside

_RECORD = 5  # bytes of a TLS record's header
_FINISHED = 74  # bytes of the record that ends a handshake, with SHA-384
_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def between(
    target: HttpTransport, meddle: Callable[[_Ends, _Ends], Awaitable[None]]
) -> AsyncIterator[str]:
    """The address of somebody who does ``meddle(caller, target)`` with every connection."""
    assert target.listening is not None
    where = target.listening

    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs = await asyncio.open_connection(*where)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await meddle((reader, writer), theirs)
        finally:
            for end in (writer, theirs[1]):
                end.transport.abort()

    server = await asyncio.start_server(taken, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def record(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(_RECORD)
    return head + await reader.readexactly(int.from_bytes(head[3:], "big"))


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)


async def past_handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what one end says up to its first word behind the handshake, that included."""
    said = b""
    while len(said) != _FINISHED:
        writer.write(said := await record(reader))
    writer.write(await record(reader))


async def test_a_call_cannot_be_made_a_lane_whose_key_is_known() -> None:
    """The first bytes of a call are no secret: they must not count as the key of frames."""
    key = b"POST /call/echo HTTP/1.1\r\nHost: "
    assert len(key) == KEY_BYTES

    async def meddle(caller: _Ends, target: _Ends) -> None:
        target[1].write(PREAMBLE[True])
        async with beside(pump(target[0], caller[1])) as answers:
            await past_handshake(caller[0], target[1])
            target[1].write(Sealer(key).seal(memoryview(push("push", 9, b"a forgery"))))
            await asyncio.wait([answers])

    async with two(STRICT, known=False) as (a, b):
        takes = Takes(a)
        async with between(a, meddle) as where:
            b.book.add(A.peer_id, where)
            with pytest.raises(TransportError):
                await b.call(A.peer_id, "echo", b"x", timeout=5)
        assert takes.runs == 0


async def test_a_lane_cannot_be_made_a_call_whose_answer_is_the_key() -> None:
    """A server that takes the key of a lane for a bad request says what everybody can know."""
    key = b"HTTP/1.0 400 Bad Request\r\nServer: "[:KEY_BYTES]

    async def meddle(caller: _Ends, target: _Ends) -> None:
        await caller[0].readexactly(len(PREAMBLE[True]))
        async with asyncio.TaskGroup() as group:
            group.create_task(past_handshake(caller[0], target[1]))
            group.create_task(past_handshake(target[0], caller[1]))
        forgery = Reply("", 0.0, 9, b"a forgery").encode()
        caller[1].write(Sealer(key).seal(memoryview(forgery)))
        await caller[0].read()

    async with two(STRICT, known=False) as (a, b), between(a, meddle) as where:
        b.book.add(A.peer_id, where)
        with pytest.raises(Unreachable, match="broke"):
            await b.push(A.peer_id, "push", b"", BufferFeed(bytes(9)), timeout=5)


async def test_a_frame_that_was_taken_out_is_missed_by_whoever_reads_several_at_once() -> None:
    """Where some frames open and the next does not, that is found at the next look."""

    async def meddle(caller: _Ends, target: _Ends) -> None:
        async with beside(pump(target[0], caller[1])) as answers:
            target[1].write(await caller[0].readexactly(len(PREAMBLE[True])))
            await past_handshake(caller[0], target[1])
            target[1].write(await sealed(caller[0]))  # the request
            frames = [await sealed(caller[0]) for _ in range(4)]
            target[1].write(frames[0] + frames[2] + frames[3])
            await asyncio.wait([answers])

    body = bytes(range(256)) * 16
    pieces = [body[at : at + 1024] for at in range(0, len(body), 1024)]
    async with two(STRICT, known=False) as (a, b):
        takes = Takes(a)
        async with between(a, meddle) as where:
            b.book.add(A.peer_id, where)
            with pytest.raises(Unreachable, match="broke"):
                await b.push(A.peer_id, "large", b"", BufferFeed(*pieces), timeout=5)
        assert takes.received <= 1024


async def sealed(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(4)
    inside = int.from_bytes(head, "big")
    return head + await reader.readexactly(inside + OVERHEAD - len(head))
