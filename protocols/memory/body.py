"""The receiving side of a body on the simulated internet of :mod:`protocols.memory.transport`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from protocols.bodies import pour
from protocols.errors import TransferStalled, TransportError
from protocols.memory.network import Pipe
from protocols.transport import CHUNK_BYTES, Drain

_POISON = memoryview(b"\xdb" * CHUNK_BYTES)


class Body:
    """A body on its way in (:class:`~protocols.transport.Incoming`), pieces as they arrive.

    A view is released and its bytes are overwritten when the next one is asked for, so that
    code which keeps a chunk too long fails in tests.
    """

    def __init__(
        self, length: int, pipe: Pipe, timeout: float, on_read: Callable[[int], None]
    ) -> None:
        self._length = length
        self._pipe = pipe
        self._timeout = timeout
        self._on_read = on_read
        self._missing = length
        self._pieces: deque[bytearray] = deque()
        self._current: tuple[memoryview, bytearray] | None = None
        self._error: TransportError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def length(self) -> int:
        """Bytes announced."""
        return self._length

    @property
    def complete(self) -> bool:
        """Everything was handed out."""
        return self._missing == 0

    def deliver(self, piece: bytearray) -> None:
        """A piece has arrived."""
        self._pieces.append(piece)
        self._wake()

    def fail(self, error: TransportError) -> None:
        """Nothing more will arrive; what is unread is lost, as with a reset connection."""
        if self._error is None:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def into(self, drain: Drain, *, stall: float = 0.0, slow: bool = False) -> None:
        """See :class:`~protocols.transport.Incoming`."""
        self._timeout = max(self._timeout, stall)
        await pour(self, drain)

    def __aiter__(self) -> Body:
        return self

    async def __anext__(self) -> memoryview:
        self._recycle()
        while True:
            if self._missing == 0:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            if self._pieces:
                break
            await self._wait()
        piece = self._pieces.popleft()
        self._missing -= len(piece)
        view = memoryview(piece)
        self._current = (view, piece)
        self._on_read(len(piece))
        return view

    def _recycle(self) -> None:
        if self._current is None:
            return
        view, piece = self._current
        self._current = None
        piece[:] = _POISON[: len(piece)]
        try:
            view.release()
        except BufferError:
            return  # an array over it is still alive; it now holds the poison

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await patiently(self._waiter, self._pipe, self._timeout)


async def patiently(waiter: asyncio.Future[None], pipe: Pipe, timeout: float) -> None:
    """Wait as long as the network works on a stream and ``timeout`` more (TransferStalled)."""
    loop = asyncio.get_running_loop()
    since = loop.time()
    timer: asyncio.TimerHandle

    def check() -> None:
        nonlocal timer
        until = max(since, pipe.working_until()) + timeout
        if until > loop.time():
            timer = loop.call_at(until, check)
        elif not waiter.done():
            waiter.set_exception(TransferStalled(f"nothing moved for {timeout:g} s"))

    timer = loop.call_later(timeout, check)
    try:
        await waiter
    finally:
        timer.cancel()
