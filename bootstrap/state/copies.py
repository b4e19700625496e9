"""Copies that a peer keeps for newcomers: made once, served in chunks, given up when idle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from bootstrap.state.digest import StateBytes, chunk_size, copied, state_digest
from protocols.bodies import BufferFeed
from protocols.errors import Malformed
from protocols.tasks import Background
from protocols.transport import CHUNK_BYTES, Buffer, Feed

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

IDLE_S = 60.0  # a copy that nobody reads is given up
COPY_COSTS = 10.0  # at most one part in this many of the time goes into copies, whoever asks
TIMER_SLACK_S = 0.01


@dataclass(frozen=True)
class Copy:
    """Vectors as bytes, and what an offer of them says."""

    state: StateBytes
    digest: bytes
    chunk: int  # bytes
    hashes: bytes

    @classmethod
    def of(cls, vectors: Sequence[torch.Tensor]) -> Copy:
        """Of float32 vectors that nobody changes any more. Reads and hashes all of them."""
        state = StateBytes(vectors)
        chunk = chunk_size(state.length)
        digest, hashes = state_digest(vectors, chunk)
        return cls(state, digest, chunk, hashes)

    @classmethod
    def taken(cls, vectors: Sequence[torch.Tensor]) -> Copy:
        """Of float32 vectors as they are now, which may change afterwards."""
        chunk = chunk_size(StateBytes(vectors).length)
        copies, digest, hashes = copied(vectors, chunk)
        return cls(StateBytes(copies), digest, chunk, hashes)

    @property
    def length(self) -> int:
        """Bytes."""
        return self.state.length

    def feed(self, index: int, used: Callable[[], None] = lambda: None) -> Feed:
        """One chunk, on its way to a peer; ``used`` is told as it goes, on the transport's thread.

        Raises :class:`Malformed` where there is none.
        """
        start = index * self.chunk
        if start >= self.length:
            raise Malformed(f"there is no chunk {index}")
        pieces = self.state.pieces(start, min(start + self.chunk, self.length))
        # a slow reader keeps a chunk in memory, not the vectors
        return _ChunkFeed(memoryview(b"".join(pieces)), used)


class Use:
    """When a copy was last used. Chunks on their way note it, from any thread."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self.at = self._clock()

    def note(self) -> None:
        """It is in use now."""
        self.at = self._clock()


class _ChunkFeed(BufferFeed):
    """A chunk in pieces, so that it shows that it is being read."""

    def __init__(self, chunk: memoryview, used: Callable[[], None]) -> None:
        super().__init__(
            *(chunk[at : at + CHUNK_BYTES] for at in range(0, len(chunk), CHUNK_BYTES))
        )
        self._used = used

    def next(self) -> Buffer:
        """The next piece; empty after the last one."""
        self._used()
        return super().next()


class Maker:
    """Makes one copy at a time, to its end: if a caller hangs up, the next one gets it.

    Otherwise callers that hang up could have one copy made after the other.
    """

    def __init__(self) -> None:
        self._background = Background()
        self._making: asyncio.Task[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether a copy is being made."""
        return self._making is not None

    async def make(self, copy: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What ``copy()``, or the one that is under way, returns or raises."""
        if self._making is None:
            self._making = self._background.spawn(copy())
            self._making.add_done_callback(self._on_made)
        making = self._making
        await asyncio.wait([making])
        result: T = making.result()
        return result

    async def wait(self) -> None:
        """Until no copy is being made."""
        while self._making is not None:
            await asyncio.wait([self._making])

    async def aclose(self) -> None:
        """End the one that is being made."""
        await self._background.aclose()

    def _on_made(self, making: asyncio.Task[Any]) -> None:
        self._making = None
        if not making.cancelled():
            making.exception()  # nobody may be waiting any more: that is no error of its own


class Expiry:
    """The timer of what is given up when nobody has used it for ``idle_s``.

    ``expire(by)`` gives up what was last used at ``by`` or before, and returns the earliest last
    use among the rest; None where nothing is left.
    """

    def __init__(self, idle_s: float, expire: Callable[[float], float | None]) -> None:
        self._idle_s, self._expire = idle_s, expire
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Something is in use."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._idle_s, self._look)

    def cancel(self) -> None:
        """Nothing is kept any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        # A timer may fire a clock's tick early; without slack it would be set again for now.
        used = self._expire(loop.time() + TIMER_SLACK_S - self._idle_s)
        if used is not None:
            self._timer = loop.call_at(used + self._idle_s, self._look)
