"""Lanes of a stranger's own making, and handlers that count what reached them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from http_kit import C

from protocols import tls
from protocols.bodies import BufferFeed, read_into
from protocols.http import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.lane_wire import PREAMBLE, PUSH, Reply, Request
from protocols.limits import Limits
from protocols.transport import Feed, Incoming

STRICT = Limits(grace=0.1, handshake=1.0, stall=0.5, min_rate=2000.0, per_ip=20, linger=0.5)
REPLY_BYTES = len(Reply("", 0.0, 0).encode())


@asynccontextmanager
async def lane(
    target: HttpTransport, identity: Identity = C
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A lane of a stranger's own making, past the handshake."""
    assert target.listening is not None
    async with bare(target) as (reader, writer):
        writer.write(PREAMBLE[True])
        await writer.start_tls(
            tls.client_context(identity), server_hostname=tls.server_name(target.peer_id)
        )
        yield reader, writer


@asynccontextmanager
async def bare(
    target: HttpTransport,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    assert target.listening is not None
    reader, writer = await asyncio.open_connection(*target.listening)
    try:
        async with asyncio.timeout(10):
            yield reader, writer
    finally:
        writer.transport.abort()


async def reply(reader: asyncio.StreamReader) -> Reply:
    head = await reader.readexactly(REPLY_BYTES)
    rest = await reader.readexactly(head[1])
    answer = Reply.decode(head + rest)
    return Reply.decode(head + rest + await reader.readexactly(answer.length))


class Takes:
    """Handlers that count what reached them."""

    def __init__(self, transport: HttpTransport) -> None:
        self.runs = 0
        self.received = 0
        self.errors: list[BaseException] = []
        transport.on_push("push", self.push, max_length=1000)
        transport.on_push("large", self.push, max_length=10**9)
        transport.on_push("whole", self.whole, max_length=10**9)
        transport.on_pull("pull", self.pull)

    async def push(self, peer: PeerId, header: bytes, body: Incoming) -> bytes:
        self.runs += 1
        try:
            async for chunk in body:
                self.received += len(chunk)
        except BaseException as error:
            self.errors.append(error)
            raise
        return b"ok"

    async def whole(self, peer: PeerId, header: bytes, body: Incoming) -> bytes:
        self.runs += 1
        try:
            await read_into(body, bytearray(body.length))
        except BaseException as error:
            self.errors.append(error)
            raise
        return b"ok"

    async def pull(self, peer: PeerId, header: bytes) -> Feed:
        self.runs += 1
        return BufferFeed(bytes(50_000_000))


def push(name: str, length: int, body: bytes = b"") -> bytes:
    return Request(PUSH, name, b"", length).encode() + body
