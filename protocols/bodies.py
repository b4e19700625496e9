"""Long bodies in the usual shapes: whole buffers out and in, and the bridges between the kinds.

A body on its way out is an :class:`~protocols.transport.Outgoing` (made on the event loop) or a
:class:`~protocols.transport.Feed` (asked for pieces, wherever the transport's data is handled);
on its way in it is an asynchronous iterator or goes into a :class:`~protocols.transport.Drain`.

>>> await transport.push(peer, "slice", header, BufferFeed(view), timeout=5)
>>> await incoming.into(BufferDrain(target))          # raises Malformed for another length
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from protocols.errors import LocalProtocolError, Malformed
from protocols.transport import CHUNK_BYTES, Buffer, Drain, Feed, Incoming, Outgoing

_MIN_PIECE = 16 * 1024


class BufferFeed:
    """A body that lies in memory: one buffer, or several one after the other."""

    def __init__(self, *buffers: Buffer) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        self._views = [view for view in reversed(views) if view]
        self._length = sum(map(len, self._views))

    @property
    def length(self) -> int:
        """Bytes of the whole body."""
        return self._length

    def attach(self, wake: Callable[[], None]) -> None:
        """There is always something to send: nobody needs waking."""

    def next(self) -> Buffer:
        """The next buffer as a whole; empty after the last one."""
        return self._views.pop() if self._views else b""


class BufferDrain:
    """Memory of exactly a body's length."""

    def __init__(self, target: memoryview | bytearray) -> None:
        self._left = memoryview(target).cast("B")
        self.length = len(self._left)

    def attach(self, wake: Callable[[], None]) -> None:
        """There is room for all of it from the start."""

    def room(self) -> memoryview:
        """What is not filled yet."""
        return self._left

    def took(self, count: int) -> None:
        """``count`` bytes more are in place."""
        self._left = self._left[count:]

    @property
    def came(self) -> int:
        """Bytes that are in place; may be asked on any thread."""
        return self.length - len(self._left)


async def read_into(incoming: Incoming, target: memoryview | bytearray | BufferDrain) -> None:
    """Fill ``target`` with a body of exactly its length; raises :class:`Malformed` for another."""
    drain = target if isinstance(target, BufferDrain) else BufferDrain(target)
    if incoming.length != drain.length:
        raise Malformed(f"a body of {incoming.length} bytes, expected {drain.length}")
    await incoming.into(drain)


def outgoing(body: Outgoing | Feed) -> Outgoing:
    """Any body as an :class:`Outgoing`; a feed is then asked for its bytes on the event loop."""
    return body if isinstance(body, Outgoing) else Outgoing(body.length, _chunks(body))


async def _chunks(feed: Feed) -> AsyncIterator[Buffer]:
    waker = Waker()
    feed.attach(waker.wake)
    left = feed.length
    while left:
        chunk = feed.next()
        if chunk is None:
            await waker.wait()
            continue
        size = memoryview(chunk).nbytes
        if size == 0:  # too long a body is noticed by its sender
            raise LocalProtocolError(f"body {left} bytes shorter than announced")
        left -= size
        yield chunk


async def pour(chunks: AsyncIterator[Buffer], drain: Drain) -> None:
    """Copy chunks into a drain, on the event loop."""
    waker = Waker()
    drain.attach(waker.wake)
    async for chunk in chunks:
        view = memoryview(chunk)
        while view:
            room = drain.room()
            if room is None:
                await waker.wait()
                continue
            count = min(len(room), len(view))
            if count == 0:
                raise LocalProtocolError("a drain gave room of no bytes")
            room[:count] = view[:count]
            drain.took(count)
            view = view[count:]


class Waker:
    """Wakes one task of the running event loop from any thread; a wake beforehand counts."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def wake(self) -> None:
        """Let :meth:`wait` return, or return at once the next time."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the transfer with it
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        """Until somebody wakes us."""
        await self._event.wait()
        self._event.clear()


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
