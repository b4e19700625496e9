"""Long bodies over HTTP, the same for both ends: framing, pace, and the rules of progress.

A push carries ``length of header (4 bytes, big endian) | header | body``. The announced length is
known before anything is read, so every bound is checked before anything is allocated.

A reader gives up when nothing arrives for ``stall`` seconds, and when, over ``stall`` seconds of
waiting, less than ``min_rate`` bytes a second came; time in which we ourselves were busy with
what had arrived does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import ClientError, StreamReader
from aiohttp.web import RequestPayloadError

from protocols.bodies import pour
from protocols.errors import LocalProtocolError, Malformed, TransferStalled, Unreachable, Why
from protocols.identity import PeerId
from protocols.transport import CHUNK_BYTES, MAX_HEADER_BYTES, Buffer, Drain, Outgoing

VERSION_HEADER = "Server"  # on every answer: who answers without it is not one of us
PEER_HEADER = "Atoll-Peer"  # the claimed identity; only read where there is no TLS
ERROR_HEADER = "Atoll-Error"  # the code of a refusal
TOOK_HEADER = "Atoll-Took"  # microseconds the handler took
PROTOCOL = "atoll/1"

MAX_ERROR_BYTES = 512
_LENGTH_BYTES = 4
_MIN_PIECE = 16 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one transport. Seconds, bytes, bytes a second, connections."""

    connect: float = 5.0  # for one address, TLS handshake included
    handshake: float = 10.0  # for a stranger's TLS handshake
    stall: float = 15.0  # without progress of a body
    min_rate: float = 1024.0
    idle_server: float = 90.0  # an unused connection, and the time for a request's head
    idle_client: float = 30.0  # less than the server's, so that the server never closes first
    per_ip: int = 256
    total: int = 2048
    per_peer: int = 16  # connections to one peer for calls, and as many for long bodies
    grace: float = 0.5  # for handlers at the end


def checked_header(header: bytes) -> bytes:
    """The header, or :class:`LocalProtocolError` if it exceeds the bound."""
    if len(header) > MAX_HEADER_BYTES:
        raise LocalProtocolError(f"header of {len(header)} bytes exceeds {MAX_HEADER_BYTES}")
    return header


def frame(header: bytes) -> bytes:
    """What stands before the body of a push."""
    return len(checked_header(header)).to_bytes(_LENGTH_BYTES, "big") + header


class BodyReader:
    """A body of known length on its way in; :class:`~protocols.transport.Incoming`."""

    def __init__(
        self,
        stream: StreamReader,
        length: int,
        peer: PeerId,
        *,
        stall: float,
        min_rate: float,
        on_bytes: Callable[[int], None],
    ) -> None:
        self.length = length
        self._stream = stream
        self._left = length
        self._peer = peer
        self._stall = stall
        self._min_rate = min_rate
        self._on_bytes = on_bytes
        self._rest = memoryview(b"")  # read from the stream, not yet handed out
        self._waited = 0.0
        self._window = 0

    @property
    def complete(self) -> bool:
        """Everything was handed out."""
        return self._left == 0

    async def header(self) -> bytes:
        """Take the frame off a push's body; :attr:`length` becomes that of the rest."""
        if self._left < _LENGTH_BYTES:
            raise Malformed("no header")
        size = int.from_bytes(await self._exactly(_LENGTH_BYTES), "big")
        if size > min(MAX_HEADER_BYTES, self._left):
            raise Malformed(f"header of {size} bytes")
        header = await self._exactly(size)
        self.length = self._left
        return header

    async def everything(self) -> bytes:
        """The whole of a short body."""
        return await self._exactly(self._left)

    async def into(self, drain: Drain) -> None:
        """Have all of it written where ``drain`` says."""
        await pour(self, drain)

    def __aiter__(self) -> BodyReader:
        return self

    async def __anext__(self) -> Buffer:
        if self._left == 0:
            raise StopAsyncIteration
        if self._rest:
            chunk: Buffer = self._rest
            self._rest = memoryview(b"")
        else:
            chunk = await self._receive()
        self._left -= len(chunk)
        return chunk

    async def _exactly(self, count: int) -> bytes:
        parts: list[Buffer] = []
        while count:
            chunk = memoryview(await self.__anext__())
            part, self._rest = chunk[:count], chunk[count:]
            self._left += len(self._rest)
            count -= len(part)
            parts.append(part)
        return b"".join(parts)

    async def _receive(self) -> bytes:
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            async with asyncio.timeout(self._stall):
                chunk = await self._stream.readany()
        except TimeoutError as error:
            raise TransferStalled(f"{self._peer}: nothing for {self._stall:g} s") from error
        except (OSError, ClientError, RequestPayloadError) as error:
            raise Unreachable(self._peer, Why.RESET, "in the middle of a body") from error
        if not chunk or len(chunk) > self._left:
            raise Unreachable(self._peer, Why.RESET, "the body is not of the announced length")
        self._waited += clock() - started
        self._window += len(chunk)
        if self._waited >= self._stall:
            if self._window < self._min_rate * self._waited:
                rate = self._window / self._waited
                raise TransferStalled(f"{self._peer}: {rate:.0f} bytes a second")
            self._waited, self._window = 0.0, 0
        self._on_bytes(len(chunk))
        return chunk


async def send_body(
    body: Outgoing,
    write: Callable[[memoryview], Awaitable[None]],
    on_sent: Callable[[int], None],
) -> None:
    """Write exactly ``body.length`` bytes in pieces, each at most ``CHUNK_BYTES``.

    On a slow link the pieces shrink, so that progress shows. Raises
    :class:`LocalProtocolError` if the chunks do not add up; closes the chunks' generator.
    """
    clock = asyncio.get_running_loop().time
    left, size = body.length, CHUNK_BYTES // 4
    try:
        async for chunk in body.chunks:
            view = memoryview(chunk).cast("B")
            if len(view) > left:
                raise LocalProtocolError(f"body longer than the announced {body.length} bytes")
            while view:
                piece = view[:size]
                started = clock()
                await write(piece)
                took = clock() - started
                on_sent(len(piece))
                left -= len(piece)
                view = view[len(piece) :]
                if took < 0.05:
                    size = min(size * 2, CHUNK_BYTES)
                elif took > 0.5:
                    size = max(size // 2, _MIN_PIECE)
    finally:
        close = getattr(body.chunks, "aclose", None)
        if close is not None:
            await close()
    if left:
        raise LocalProtocolError(f"body {left} bytes shorter than announced")
