"""Which chunks of a copy are wanted, under way, and in place, and who is at each."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import reduce
from math import inf
from operator import or_
from typing import Protocol

from bootstrap.state.copies import ChunkFeed
from bootstrap.state.digest import (
    HASH_BYTES,
    MAX_CHUNK,
    MIN_CHUNK,
    StateBytes,
    chunk_size,
    count_chunks,
    root,
)
from protocols.bodies import BufferDrain
from protocols.errors import BadSignature, Malformed
from protocols.identity import PeerId
from protocols.messages import MAX_READERS

LATE_S = 10.0  # a chunk that all its sources have been at for this long is open to others
RETRY_S = 1.0  # until a link that failed is tried again; twice as long after each further failure,
MOST_DOUBLED = 3  # times at most, since a link that was down may be back at any moment

DownloadProgress = Callable[[int, int, int], None]
"""Told after every chunk: bytes that are in place, bytes in all, sources in use.

And first, of no source, with what was there before, where that is looked for.
"""
Came = Callable[[float], object]
"""Told after every chunk: the share that has come, of chunks under way about a half."""


class Offer(Protocol):
    """The shape of a copy that a peer keeps, and the hash of each chunk."""

    @property
    def digest(self) -> bytes:
        """Over shape and hashes."""
        ...

    @property
    def length(self) -> int:
        """Bytes."""
        ...

    @property
    def chunk(self) -> int:
        """Bytes, the last one may be shorter."""
        ...

    @property
    def hashes(self) -> bytes:
        """32 bytes a chunk."""
        ...


@dataclass(eq=False)  # two sources with equal figures are still two
class Served:
    """One source, and how it has done so far."""

    bytes: int = 0  # in place
    failures: int = 0  # of its link, in a row
    dropped: str = ""  # why it is not asked any more
    streams: int = 0  # chunks that it is asked for at once
    round_trip: float = 0.0  # seconds, the shortest so far; 0: not known yet
    _failed_at: float = -inf
    _came: int = 0  # bytes of chunks that it is not at any more
    _arriving: set[BufferDrain] = field(default_factory=set)  # chunks that it is at

    @property
    def came(self) -> int:
        """Bytes that have come of it, whether or not their chunks are whole by now."""
        return self._came + sum(chunk.came for chunk in self._arriving)

    @contextmanager
    def brings(self, chunk: BufferDrain) -> Iterator[None]:
        """While it is at a chunk."""
        self._arriving.add(chunk)
        try:
            yield
        finally:
            self._arriving.discard(chunk)
            self._came += chunk.came

    @property
    def again(self) -> float:
        """When its link may be tried again: later after each failure in a row."""
        if not self.failures:
            return -inf
        pause: float = RETRY_S * 2 ** min(self.failures - 1, MOST_DOUBLED)
        return self._failed_at + pause

    def failed(self, began: float, now: float) -> None:
        """A transfer begun at ``began`` failed. Those under way with it do not count again."""
        if began > self._failed_at:
            self.failures += 1
            self._failed_at = now

    def answered(self, seconds: float) -> None:
        """The first byte came ``seconds`` after its request."""
        self.round_trip = min(self.round_trip or seconds, seconds)


class Work:
    """Which chunks are wanted, under way, and in place."""

    def __init__(
        self,
        state: StateBytes,
        digest: bytes,
        me: PeerId,
        progress: DownloadProgress | None = None,
        came: Came = lambda share: None,
    ) -> None:
        self.state = state
        self.digest = digest
        self.fellows: dict[PeerId, int] = {}  # downloaders of the same: a bit per chunk they have
        self._dice = random.Random(digest + me.encode())
        self.sources: dict[PeerId, Served] = {}
        self.chunk = 0  # bytes, once an offer has been accepted
        self.hashes = b""
        self._progress = progress
        self._tell_came = came
        self._wanted: deque[int] = deque()
        self._wanted_bits = 0  # the same chunks, a bit each: sets of ten thousand are slow
        # by chunk, in the order they were begun: its sources, and since when each is at it
        self._pulling: dict[int, dict[Served, float]] = {}
        self._claimed: set[int] = set()
        self._placed: set[int] = set()
        self._bytes = 0
        self._came = -inf  # when a chunk was last put in place
        self._changed = asyncio.Event()

    @property
    def complete(self) -> bool:
        """Whether every chunk is in place."""
        return bool(self.chunk) and self._bytes == self.state.length

    def dark(self, seconds: float) -> bool:
        """Whether all links have failed, and the last chunk came less than ``seconds`` ago.

        Then the link that is down may be this node's own.
        """
        late = asyncio.get_running_loop().time() - seconds
        used = [one for one in self.sources.values() if not one.dropped]
        return self._came > late and all(one.failures for one in used)

    @property
    def done(self) -> int:
        """Bytes in place."""
        return self._bytes

    async def ended(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait until the state is complete or all ``tasks`` have ended."""
        for task in tasks:
            task.add_done_callback(lambda _: self._wake())
        while not self.complete and not all(task.done() for task in tasks):
            await self._changed.wait()

    def accept(self, offer: Offer) -> None:
        """Take an offer's hashes; raises :class:`Malformed` or :class:`BadSignature`."""
        check_offer(offer, self.state.length)
        if offer.digest != self.digest:
            raise BadSignature("offers another state than the announced one")
        if not self.chunk:
            self.chunk, self.hashes = offer.chunk, offer.hashes
            order = list(range(count_chunks(offer.length, offer.chunk)))
            self._dice.shuffle(order)  # else all who begin together would have the same ones
            self._wanted.extend(order)
            self._wanted_bits = (1 << len(order)) - 1
            self._wake()

    def had(self, indices: Set[int]) -> None:
        """These chunks are in place from before: of those wanted, before anything was begun."""
        if indices:
            self._wanted = deque(index for index in self._wanted if index not in indices)
            self._wanted_bits &= ~sum(1 << index for index in indices)
            self._claimed.update(indices)
            for index in indices:
                start = index * self.chunk
                self._placed.add(index)
                self._bytes += min(self.chunk, self.state.length - start)
        if self._progress is not None:
            self._progress(self._bytes, self.state.length, 0)

    async def take(self, source: Served) -> int | None:
        """The next chunk for ``source``; None when it has nothing more to do."""
        while not self.complete and not source.dropped:
            index = self._rarest() if self._wanted else self._slowest(source)
            if index is not None:
                self._begin(index, source)
                return index
            await self.changed(LATE_S)
        return None

    def take_from(self, peer: PeerId, source: Served) -> int | None:
        """A chunk that a fellow has and this node wants; None where there is none now."""
        has = self.fellows.get(peer, 0) & self._wanted_bits
        if not has:
            return None
        index = self._next_of(has)
        self._begin(index, source)
        return index

    async def changed(self, seconds: float) -> None:
        """Wait until something has changed, at most for ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def claim(self, index: int) -> bool:
        """Whether the caller, which holds the verified chunk, is to write it: only the first is."""
        if index in self._claimed:
            return False
        self._claimed.add(index)
        return True

    def give_back(self, index: int, source: Served) -> None:
        """``source`` is not at this chunk any more, with or without success."""
        pulling = self._pulling[index]
        del pulling[source]
        if not pulling:
            del self._pulling[index]
            if index not in self._claimed:
                self._wanted.appendleft(index)
                self._wanted_bits |= 1 << index
        self._wake()

    def write(self, start: int, data: memoryview) -> None:
        """Put a claimed chunk where it belongs; on whatever thread."""
        self.state.write(start, data)

    def place(self, index: int, size: int, source: Served) -> None:
        """A claimed chunk is written."""
        self._placed.add(index)
        self._came = asyncio.get_running_loop().time()
        self._bytes += size
        source.bytes += size
        if self._progress is not None:
            using = sum(1 for one in self.sources.values() if not one.dropped and one.bytes)
            self._progress(self._bytes, self.state.length, max(1, using))
        # a small state has few chunks, and its last ones come at once: those in place tell little
        under_way = self.chunk * len(self._pulling.keys() - self._placed)
        self._tell_came(min(1.0, (self._bytes + under_way / 2) / self.state.length))

    # --- shared with others who download the same -------------------------------------------------

    def in_place(self) -> bytes:
        """A bit for each chunk, the lowest of a byte first."""
        bits = bytearray(-(-count_chunks(self.state.length, self.chunk) // 8) if self.chunk else 0)
        for index in self._placed:
            bits[index // 8] |= 1 << index % 8
        return bytes(bits)

    def chunk_in_place(self, index: int, used: Callable[[], None]) -> ChunkFeed | None:
        """A chunk on its way to a fellow; None where it is not here."""
        if index not in self._placed:
            return None
        start = index * self.chunk
        return ChunkFeed(self.state, start, min(start + self.chunk, self.state.length), used)

    def is_shared_by(self, peer: PeerId) -> None:
        """A peer downloads the same."""
        if peer not in self.fellows and len(self.fellows) < MAX_READERS:
            self.fellows[peer] = 0
            self._wake()

    def has(self, peer: PeerId, bits: bytes) -> None:
        """Note which chunks a fellow has. Raises :class:`Malformed` for more than there are."""
        count = count_chunks(self.state.length, self.chunk)
        found = int.from_bytes(bits, "little")
        if found.bit_length() > count:
            raise Malformed("more chunks than the state has")
        self.fellows[peer] = found

    def _rarest(self) -> int:
        """A wanted chunk, if possible one that no fellow has: fellows can then get it here."""
        elsewhere = reduce(or_, self.fellows.values(), 0)
        return self._next_of(self._wanted_bits & ~elsewhere or self._wanted_bits)

    def _next_of(self, some: int) -> int:
        """Take the next in order of the wanted chunks whose bits are set in ``some``."""
        bits = some.to_bytes(-(-some.bit_length() // 8), "little")

        def among(index: int) -> int:
            return index >> 3 < len(bits) and bits[index >> 3] >> (index & 7) & 1

        index = next(index for index in self._wanted if among(index))
        self._wanted.remove(index)
        self._wanted_bits ^= 1 << index
        return index

    def _begin(self, index: int, source: Served) -> None:
        self._pulling.setdefault(index, {})[source] = asyncio.get_running_loop().time()

    def _slowest(self, source: Served) -> int | None:
        """The oldest chunk that one other source is at, or that all have been at for too long."""
        late = asyncio.get_running_loop().time() - LATE_S
        for index, pulling in self._pulling.items():
            if source in pulling or index in self._claimed:
                continue
            if len(pulling) == 1 or max(pulling.values()) <= late:
                return index
        return None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def check_offer(offer: Offer, length: int) -> None:
    """Check that an offer is of ``length`` bytes, and that its hashes come to its digest.

    Raises :class:`Malformed` or :class:`BadSignature`.
    """
    if offer.length != length or not MIN_CHUNK <= offer.chunk <= max(MAX_CHUNK, chunk_size(length)):
        raise Malformed(f"offers {offer.length} bytes by {offer.chunk}")
    if len(offer.hashes) != HASH_BYTES * count_chunks(offer.length, offer.chunk):
        raise Malformed("offers a list of hashes of the wrong length")
    # The digest covers the shape: all offers that pass have the same chunks and hashes.
    if root(offer.length, offer.chunk, offer.hashes) != offer.digest:
        raise BadSignature("offers hashes of another digest")
