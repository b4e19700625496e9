"""Lanes of a stranger's own making, and handlers that count what reached them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from http_kit import C

from protocols.bodies import BufferFeed, read_into
from protocols.connections import tls
from protocols.connections.sealing import MAX_FRAME_BYTES
from protocols.connections.tls import PeerSSLSocket
from protocols.http.transport import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.lanes.socket import WOULD_BLOCK, throw_away_unsent
from protocols.lanes.wire import PREAMBLE, PUSH, Reply, Request
from protocols.limits import Limits
from protocols.transport import Feed, Incoming

STRICT = Limits(grace=0.1, handshake=1.0, stall=0.5, min_rate=2000.0, per_ip=20, linger=0.5)
REPLY_BYTES = len(Reply("", 0.0, 0).encode())


class Stranger:
    """The end of a lane past its handshake, with the names of asyncio's streams."""

    def __init__(self, sock: PeerSSLSocket) -> None:
        self.reader = asyncio.StreamReader()
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._piece = memoryview(b"")
        sock.setblocking(False)
        self._loop.add_reader(sock, self._read)

    def write(self, data: bytes) -> None:
        self._unsent += data
        self._write()

    def write_frames_of_a_byte(self, data: bytes) -> None:
        """All at once: ``data`` is what the kernel has room for."""
        sealer = self._sock._sealer
        assert sealer is not None
        frames = b"".join(bytes(sealer.seal(memoryview(bytes([byte])))) for byte in data)
        assert socket.socket.send(self._sock, frames) == len(frames)

    def pause_reading(self) -> None:
        self._loop.remove_reader(self._sock)

    def close(self) -> None:
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        throw_away_unsent(self._sock)
        self._sock.close()

    def _read(self) -> None:
        buffer = bytearray(1 << 16)
        try:
            count = self._sock.recv_into(buffer)
        except WOULD_BLOCK:
            return
        except OSError as error:
            self.reader.set_exception(error)
            self.pause_reading()
            return
        if count:
            self.reader.feed_data(bytes(buffer[:count]))
        else:
            self.reader.feed_eof()
            self.pause_reading()

    def _write(self) -> None:
        try:
            while self._piece or self._unsent:
                if not self._piece:
                    self._piece = memoryview(bytes(self._unsent[:MAX_FRAME_BYTES]))
                    del self._unsent[:MAX_FRAME_BYTES]
                self._sock.send(self._piece)
                self._piece = memoryview(b"")
        except WOULD_BLOCK:
            self._loop.add_writer(self._sock, self._write)
            return
        except OSError:
            self._unsent.clear()
        self._loop.remove_writer(self._sock)


@asynccontextmanager
async def lane(
    target: HttpTransport, identity: Identity = C
) -> AsyncIterator[tuple[asyncio.StreamReader, Stranger]]:
    """A lane of a stranger's own making, past the handshake."""
    assert target.listening is not None
    where = target.listening

    def shaken() -> PeerSSLSocket:
        sock = socket.create_connection(where, timeout=10)
        sock.sendall(PREAMBLE[True])
        name = tls.server_name(target.peer_id)
        secure = tls.client_context(identity).wrap_socket(sock, server_hostname=name)
        assert isinstance(secure, PeerSSLSocket)
        return secure

    async with asyncio.timeout(20):
        stranger = Stranger(await asyncio.to_thread(shaken))
        try:
            yield stranger.reader, stranger
        finally:
            stranger.close()


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
