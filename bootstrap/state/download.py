"""Downloading the outer state from all who have it at once, every chunk checked.

Each source is asked for an offer, the list of its chunks' hashes, which must come to the expected
digest; from then on a wrong chunk is told from a right one. Sources take chunks from one queue,
so that each contributes what its link carries. When the queue is empty, whoever is free also
asks for a chunk that another source has been at for longest, or several, each for a while: slow
ones do not hold up the end. A source that sends wrong bytes is dropped at once, one whose link
fails is after a few failures.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from blake3 import blake3

from bootstrap.state.digest import (
    HASH_BYTES,
    MAX_CHUNK,
    MIN_CHUNK,
    StateBytes,
    count_chunks,
    root,
)
from protocols.asking import ask
from protocols.bodies import read_into
from protocols.errors import (
    BadSignature,
    Malformed,
    RemoteProtocolError,
    RemoteRefused,
    TransportError,
)
from protocols.identity import PeerId
from protocols.messages import ChunkRequest, StateOffer, StateRequest
from protocols.tasks import Offload
from protocols.transport import Transport

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

OFFER_TIMEOUT_S = 120.0  # a peer copies and hashes its state before it answers
STALL_S = 15.0  # without a byte of a chunk
MAX_SOURCES = 8  # at a time; further peers take the place of those that fail
LATE_S = 10.0  # a chunk that all who are at it have had for so long is anybody's
STREAMS = 2  # per source, so that its link is not idle while a request travels
MAX_FAILURES = 3  # of a source's link; wrong bytes end it at once

Progress = Callable[[int, int, int], None]
"""Told after every chunk: bytes that are in place, bytes in all, sources in use."""


class NoSourceError(TransportError):
    """No peer is left that would deliver the state."""


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


@dataclass(frozen=True)
class Words:
    """How a copy is asked for: its offer, and the name and header of a chunk's pull."""

    offer: Callable[[PeerId], Awaitable[Offer]]
    pull: str
    header: Callable[[int], bytes]


@dataclass(eq=False)  # two sources that did alike are still two
class Served:
    """What became of one source."""

    bytes: int = 0  # in place
    failures: int = 0  # of its link
    wrong: int = 0  # breaches of protocol: wrong hashes, lengths or offers
    dropped: str = ""  # why it is not asked any more


@dataclass
class Download:
    """What came from where."""

    length: int  # bytes
    sources: dict[PeerId, Served] = field(default_factory=dict)


async def download_state(
    transport: Transport,
    peers: Sequence[PeerId],
    run: bytes,
    round_: int,
    expected_digest: bytes,
    vectors: Sequence[torch.Tensor],
    *,
    fragment: int = 0,
    progress: Progress | None = None,
    offload: Offload = asyncio.to_thread,
    offer_timeout: float = OFFER_TIMEOUT_S,
    stall_timeout: float = STALL_S,
    max_sources: int = MAX_SOURCES,
) -> Download:
    """Fill ``vectors``, float32 each and base first, with the state of that digest.

    On return every byte has been verified. Raises :class:`NoSourceError` when no source is left;
    the vectors may then be partly written.
    """
    request = StateRequest(run, round_, fragment)

    async def offer(peer: PeerId) -> StateOffer:
        return await ask(transport, peer, "state", request, StateOffer, timeout=offer_timeout)

    def header(index: int) -> bytes:
        return ChunkRequest(run, round_, index, fragment).encode()

    return await download(
        transport,
        peers,
        Words(offer, "chunk", header),
        expected_digest,
        vectors,
        what=f"the state of round {round_}",
        progress=progress,
        offload=offload,
        stall_timeout=stall_timeout,
        max_sources=max_sources,
    )


async def download(
    transport: Transport,
    peers: Sequence[PeerId],
    words: Words,
    expected_digest: bytes,
    vectors: Sequence[torch.Tensor],
    *,
    what: str,
    progress: Progress | None = None,
    offload: Offload = asyncio.to_thread,
    stall_timeout: float = STALL_S,
    max_sources: int = MAX_SOURCES,
) -> Download:
    """Fill ``vectors``, float32 each, with the copy of that digest; ``what`` it is, for errors.

    As :func:`download_state`.
    """
    state = StateBytes(vectors)
    work = _Work(state, expected_digest, progress)
    fetch = _Fetch(transport, words, work, offload, stall_timeout)
    slots = asyncio.Semaphore(max_sources)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(fetch.serve(peer, slots)) for peer in dict.fromkeys(peers)]
        await work.ended(tasks)
        for task in tasks:
            task.cancel()
    if not work.complete:
        reasons = [f"{peer}: {one.dropped}" for peer, one in work.sources.items()]
        raise NoSourceError(f"no peer delivers {what} ({'; '.join(reasons) or 'none given'})")
    return Download(state.length, work.sources)


class _Work:
    """Which chunks are wanted, under way, and in place."""

    def __init__(self, state: StateBytes, digest: bytes, progress: Progress | None) -> None:
        self.state = state
        self.digest = digest
        self.sources: dict[PeerId, Served] = {}
        self.chunk = 0  # bytes, once an offer has been accepted
        self.hashes = b""
        self._progress = progress
        self._wanted: deque[int] = deque()
        # in the order they were begun: who is at a chunk, and since when
        self._pulling: dict[int, dict[Served, float]] = {}
        self._claimed: set[int] = set()
        self._bytes = 0
        self._changed = asyncio.Event()

    @property
    def complete(self) -> bool:
        """Whether every chunk is in place."""
        return bool(self.chunk) and self._bytes == self.state.length

    async def ended(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait until the state is complete or nobody is at it any more."""
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
            self._wanted.extend(range(count_chunks(offer.length, offer.chunk)))

    async def take(self, source: Served) -> int | None:
        """The next chunk for ``source``; None when it has nothing more to do."""
        while not self.complete and not source.dropped:
            index = self._wanted.popleft() if self._wanted else self._slowest(source)
            if index is not None:
                self._pulling.setdefault(index, {})[source] = asyncio.get_running_loop().time()
                return index
            with suppress(TimeoutError):
                async with asyncio.timeout(LATE_S):
                    await self._changed.wait()
        return None

    def claim(self, index: int) -> bool:
        """Whether the caller, who holds the verified chunk, is to write it: the first one is."""
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
        self._wake()

    def place(self, size: int, source: Served) -> None:
        """A claimed chunk is written."""
        self._bytes += size
        source.bytes += size
        if self._progress is not None:
            using = sum(1 for one in self.sources.values() if not one.dropped and one.bytes)
            self._progress(self._bytes, self.state.length, using)

    def _slowest(self, source: Served) -> int | None:
        """The chunk that one other source has been at for longest, or several for too long."""
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
    """Whether an offer is of so many bytes and true to its digest.

    Raises :class:`Malformed` or :class:`BadSignature`.
    """
    if offer.length != length or not MIN_CHUNK <= offer.chunk <= MAX_CHUNK:
        raise Malformed(f"offers {offer.length} bytes by {offer.chunk}")
    if len(offer.hashes) != HASH_BYTES * count_chunks(offer.length, offer.chunk):
        raise Malformed("offers a list of hashes of the wrong length")
    # The digest covers the shape: whoever passes here has the same chunks and hashes.
    if root(offer.length, offer.chunk, offer.hashes) != offer.digest:
        raise BadSignature("offers hashes of another digest")


@dataclass
class _Fetch:
    """The transfers."""

    transport: Transport
    words: Words
    work: _Work
    offload: Offload
    stall_timeout: float

    async def serve(self, peer: PeerId, slots: asyncio.Semaphore) -> None:
        """Use one peer until the state is complete or the peer is of no use."""
        async with slots:
            source = self.work.sources.setdefault(peer, Served())
            try:
                self.work.accept(await self.words.offer(peer))
            except (TransportError, RemoteProtocolError) as error:
                _blame(peer, source, error, fatal=True)
                return
            async with asyncio.TaskGroup() as streams:
                for _ in range(STREAMS):
                    streams.create_task(self._stream(peer, source))

    async def _stream(self, peer: PeerId, source: Served) -> None:
        buffer = memoryview(bytearray(self.work.chunk))
        while (index := await self.work.take(source)) is not None:
            try:
                await self._pull(peer, source, index, buffer)
            except (TransportError, RemoteProtocolError) as error:
                _blame(peer, source, error, fatal=source.failures + 1 >= MAX_FAILURES)
            finally:
                self.work.give_back(index, source)

    async def _pull(self, peer: PeerId, source: Served, index: int, buffer: memoryview) -> None:
        work, start = self.work, index * self.work.chunk
        data = buffer[: min(work.chunk, work.state.length - start)]
        async with self.transport.pull(
            peer,
            self.words.pull,
            self.words.header(index),
            max_length=len(data),
            timeout=self.stall_timeout,
        ) as incoming:
            await read_into(incoming, data)
        expected = work.hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]

        if await self.offload(lambda: blake3(data).digest()) != expected:
            raise BadSignature(f"chunk {index} has another hash")
        # Only one of two who pulled it writes: the other's thread could still be at it when the
        # state is complete and its vectors are the caller's again.
        if work.claim(index):
            await self.offload(lambda: work.state.write(start, data))
            work.place(len(data), source)


def _blame(peer: PeerId, source: Served, error: Exception, *, fatal: bool) -> None:
    """Count a failure. A refusal or wrong bytes end a source at once, whatever ``fatal`` says."""
    if isinstance(error, RemoteProtocolError):
        source.wrong += 1
    else:
        source.failures += 1
    if fatal or isinstance(error, RemoteProtocolError | RemoteRefused):
        source.dropped = source.dropped or str(error)
        log.warning("state download: no more from %s: %s", peer, error)
