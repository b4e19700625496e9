"""Copies that a peer keeps for newcomers: made once, served in chunks, given up when idle."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from bootstrap.state.digest import StateBytes, chunk_size, copied, state_digest
from protocols.errors import Malformed, RemoteRefused
from protocols.tasks import Background
from protocols.transport import CHUNK_BYTES, Buffer, Feed

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# one part in this many of the time goes into copies of one kind at most, whoever asks; there are
# two places for states
COPY_COSTS = 10.0
# reads keep a copy from making way for a newer one for as long as all of it takes a newcomer this
# slow (bytes a second), and START_S: else whoever took a chunk now and then would keep it for ever
SLOWEST, START_S = 1e6, 600.0
TIMER_SLACK_S = 0.01


def longest_s(length: int) -> float:
    """For how long a newcomer may take to read so many bytes."""
    return START_S + length / SLOWEST


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
        return ChunkFeed(self.state, start, min(start + self.chunk, self.length), used)


class Use:
    """When a copy of ``length`` bytes was last used. Chunks on their way note it, on any thread."""

    def __init__(self, length: int) -> None:
        self._clock = asyncio.get_running_loop().time
        self.at = self._clock()
        self.most = self.at + longest_s(length)  # until then reads count

    def note(self) -> None:
        """It is in use now."""
        self.at = self._clock()

    def until(self, idle_s: float) -> float:
        """Until when it need not make way, where nobody uses it any more from now on."""
        return min(self.at + idle_s, self.most)


class ChunkFeed:
    """Bytes [start, stop) of a state, in pieces that are copied when it is their turn.

    So a slow reader keeps one piece in memory, neither the chunk nor the vectors, and shows that it
    reads. ``used`` is told of each piece, on the transport's thread, and may raise. Where the state
    is given up meanwhile the rest is ``gone``.
    """

    def __init__(self, state: StateBytes, start: int, stop: int, used: Callable[[], None]) -> None:
        self._state, self._at, self._stop, self._used = weakref.ref(state), start, stop, used
        self.length = stop - start

    def attach(self, wake: Callable[[], None]) -> None:
        """There is always something to send: nobody needs waking."""

    def next(self) -> Buffer:
        """The next piece; empty after the last one."""
        state = self._state()
        if state is None:
            raise RemoteRefused("gone", "the copy was given up")
        start, self._at = self._at, min(self._at + CHUNK_BYTES, self._stop)
        piece = b"".join(state.pieces(start, self._at))
        self._used()  # after that: what it says holds for this piece
        return piece


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
