"""Between the event loop's kind of bodies and the data thread's.

``Outgoing`` and asynchronous iteration are convenient and cost a hop between two threads for each
chunk; feeds and drains (:mod:`protocols.bodies`) do not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from protocols.errors import LocalProtocolError
from protocols.tasks import beside
from protocols.transport import CHUNK_BYTES, Buffer, Feed, Outgoing

_AHEAD = 2  # chunks taken from a source before they can be sent
_SCRATCH_BYTES = 64 * 1024  # of what nobody wants, read at once
_BUFFERS = 3  # chunks that wait for their reader, the one it holds included


@asynccontextmanager
async def feeding(body: Outgoing | Feed) -> AsyncIterator[Feed]:
    """Any body as a feed; closes an Outgoing's source in the end."""
    if not isinstance(body, Outgoing):
        yield body
        return
    feed = _ChunkFeed(body)
    try:
        async with beside(feed.pump()):
            yield feed
    finally:
        close = getattr(body.chunks, "aclose", None)
        if close is not None:
            await close()


class _ChunkFeed:
    """What an Outgoing yields, a few chunks ahead."""

    def __init__(self, body: Outgoing) -> None:
        self.length = body.length
        self._body = body
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[memoryview] = deque()
        self._taken = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None
        self._wake: Callable[[], None] = lambda: None

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def next(self) -> Buffer | None:
        if self._chunks:
            chunk = self._chunks.popleft()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._taken.set)
            return chunk
        if self._error is not None:
            raise self._error
        return b"" if self._ended else None

    async def pump(self) -> None:
        """Take from the source as the chunks are sent."""
        left = self.length
        try:
            if not left:
                return
            async for chunk in self._body.chunks:
                view = memoryview(chunk).cast("B")
                if not view:
                    continue
                left -= len(view)
                self._chunks.append(view)
                self._wake()
                if left <= 0:
                    break
                while len(self._chunks) >= _AHEAD:
                    await self._taken.wait()
                    self._taken.clear()
        except Exception as error:  # noqa: BLE001  # the source's own: next() raises it
            self._error = error
        finally:
            self._ended = True
            self._wake()


class Nowhere:
    """A drain for bytes that nobody wants."""

    def attach(self, wake: Callable[[], None]) -> None:
        """There is always room."""

    def room(self) -> memoryview:
        return memoryview(bytearray(_SCRATCH_BYTES))

    def took(self, count: int) -> None:
        """They are gone."""


class ChunkDrain:
    """Hands a body to one reader on the event loop, as it comes, each view valid until the next."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._free = deque(bytearray(CHUNK_BYTES) for _ in range(_BUFFERS))
        self._buffer: bytearray | None = None  # being filled
        self._at = 0
        self._wake: Callable[[], None] = lambda: None
        self._ready: deque[tuple[memoryview, bytearray | None]] = deque()
        self._held: bytearray | None = None  # to be given back with the view that is out
        self._arrived = asyncio.Event()

    # --- on the data thread -------------------------------------------------------------------

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def room(self) -> memoryview | None:
        if self._buffer is None:
            if not self._free:
                return None
            self._buffer, self._at = self._free.popleft(), 0
        return memoryview(self._buffer)[self._at :]

    def took(self, count: int) -> None:
        buffer = self._buffer
        if buffer is None:
            raise LocalProtocolError("bytes without a room")
        view = memoryview(buffer)[self._at : self._at + count]
        self._at += count
        full = self._at == len(buffer)
        self._ready.append((view, buffer if full else None))
        if full:
            self._buffer = None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._arrived.set)

    # --- on the event loop --------------------------------------------------------------------

    async def next(self, ended: asyncio.Future[None]) -> memoryview | None:
        """The next bytes; None when there are none and ``ended`` is done."""
        if self._held is not None:
            self._free.append(self._held)
            self._held = None
            self._wake()
        while not self._ready:
            if ended.done():
                return None
            self._arrived.clear()
            ended.add_done_callback(self._end)
            try:
                await self._arrived.wait()
            finally:
                ended.remove_done_callback(self._end)
        view, self._held = self._ready.popleft()
        return view

    def _end(self, ended: asyncio.Future[None]) -> None:
        self._arrived.set()
