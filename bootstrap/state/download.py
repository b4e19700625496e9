"""Downloading a copy of something large from all who have it at once, every chunk checked.

The outer state of a round (:mod:`bootstrap.state.outer_state`), or an island's optimizer moments
(:mod:`bootstrap.state.moments`).

A source is asked for an offer, the list of its chunks' hashes, which must hash to the
expected digest; from then on every chunk can be checked. Two are asked at first, and more as
long as that helps (:mod:`bootstrap.state.widening`). They take chunks from one queue, so that each
contributes what its link carries. When the queue is empty, free sources are also
asked for the chunk that another one has been at for longest (or several, each for a while), so
that slow ones do not hold up the end. A source out of office that says for longer than usual that
it is making its copy is asked again after those that were not asked yet: names cost nothing.
A source that sends wrong bytes is dropped at once, one whose link fails, after a few tries without
a chunk. Where all links fail, they are tried for two minutes after the last chunk, since losing the
last source would lose all that came. Other newcomers that download the same state are sources as
well, of the chunks that they have.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from blake3 import blake3

from bootstrap.state.chunks import Offer, Served, Work
from bootstrap.state.digest import HASH_BYTES
from bootstrap.state.offers import AGAIN_S, is_making, making_s, turn_s
from bootstrap.state.partial import PartialState
from bootstrap.state.widening import FIRST_SOURCES, QUIET_S, Widening
from protocols.bodies import BufferDrain, read_into
from protocols.errors import (
    BadSignature,
    OperatorError,
    ProtocolError,
    RemoteProtocolError,
    RemoteRefused,
    TransportError,
)
from protocols.identity import PeerId
from protocols.lanes.streams import streams
from protocols.tasks import Offload
from protocols.transport import Transport

log = logging.getLogger(__name__)

OFFER_TIMEOUT_S = 120.0  # until a peer offers a copy, or says that it is making one
STALL_S = 15.0  # without a byte of a chunk
MAX_SOURCES = 8  # at a time; further peers take the place of those that fail
POLL_S = 1.0  # between two questions to a fellow; a quarter of it where something has changed
STREAMS = 2  # per source at least, so that its link is not idle while a request travels
MAX_FAILURES = 4  # of a source's link, one after the other; wrong bytes end it at once
DARK_S = 120.0  # without a chunk, where all links fail: then give up; copies are kept for longer


Introduce = Callable[[PeerId], Awaitable[object]]
"""Greets a peer, which gives nothing to strangers."""


class NoSourceError(TransportError):
    """No peer is left that would deliver the state."""


@dataclass(frozen=True)
class Sources:
    """Whom a copy is asked of, and how long each of them is waited for."""

    peers: Sequence[PeerId]  # the first of them are asked first
    in_office: Container[PeerId] = ()  # these may take their time for a copy
    first: int = FIRST_SOURCES  # how many are asked before it is known whether more would help
    kept_only: bool = False  # only for copies that they keep already: nobody makes one for it
    offer_timeout: float = OFFER_TIMEOUT_S
    stall_timeout: float = STALL_S


@dataclass(frozen=True)
class FellowWords:
    """How others that download the same are asked for what they have of it."""

    introduce: Introduce
    in_place: Callable[[PeerId], Awaitable[bytes]]  # which chunks one has (:meth:`Work.in_place`)


@dataclass(frozen=True)
class Words:
    """How a copy is asked for: its offer, and the name and header of a chunk's pull.

    ``offer`` calls its second argument whenever the peer says that it is still making the copy, and
    waits for that until the time that is its third. ``fellows``: None where there are none.
    """

    offer: Callable[[PeerId, Callable[[], object], float], Awaitable[Offer]]
    pull: str
    header: Callable[[int], bytes]
    fellows: FellowWords | None = None


@dataclass
class Download:
    """What came from where."""

    length: int  # bytes
    sources: dict[PeerId, Served] = field(default_factory=dict)


async def download(
    transport: Transport,
    sources: Sources,
    words: Words,
    work: Work,
    *,
    what: str,
    offload: Offload = asyncio.to_thread,
    on_disk: PartialState | None = None,
) -> Download:
    """Get all chunks of the copy that ``work`` is about; ``what`` names it in errors.

    Also from others that download the same, where ``words`` say how. What comes is kept
    ``on_disk``, too.

    On return every byte has been verified. Raises :class:`NoSourceError` when no source is left;
    then what ``work`` fills may be partly written.
    """
    fetch = _Fetch(transport, sources, words, work, offload, on_disk)
    slots = asyncio.Semaphore(sources.first)
    peers = dict.fromkeys(sources.peers)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(fetch.serve(peer, slots)) for peer in peers]
            helping = [group.create_task(fetch.share(words.fellows))] if words.fellows else []
            helping.append(group.create_task(fetch.widen(slots)))
            await work.ended(tasks)
            for task in (*tasks, *helping):
                task.cancel()
    finally:
        fetch.end()
    if not work.complete:
        reasons = [f"{peer}: {one.dropped}" for peer, one in work.sources.items()]
        raise NoSourceError(f"no peer delivers {what} ({'; '.join(reasons) or 'none given'})")
    return Download(work.state.length, work.sources)


@dataclass
class _Fetch:
    """The transfers."""

    transport: Transport
    sources: Sources
    words: Words
    work: Work
    offload: Offload
    on_disk: PartialState | None = None
    # since when they have answered nothing: no offer, or no byte of their first chunk
    silent: dict[PeerId, float] = field(default_factory=dict)
    _accepting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _accepted: bool = False
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _ended: bool = False

    def end(self) -> None:
        """Write into the vectors no more: from here on they are the caller's again.

        The thread of a transfer that was cancelled may be at a chunk, which takes a millisecond.
        """
        with self._writing:
            self._ended = True

    async def widen(self, slots: asyncio.Semaphore) -> None:
        """Let further sources be asked, as long as that helps; until cancelled."""
        clock = asyncio.get_running_loop().time
        widening = Widening(MAX_SOURCES, clock(), self.sources.first)
        while True:
            await asyncio.sleep(POLL_S)
            now, sources = clock(), self.work.sources
            # a chunk takes a slow link minutes, so those under way count as far as they are
            came = sum(one.came for one in sources.values())
            bringing = sum(1 for one in sources.values() if one.came and not one.dropped)
            quiet = sum(
                not (sources[peer].came or sources[peer].dropped)
                for peer, since in self.silent.items()
                if now - since >= QUIET_S
            )
            left = self.work.state.length - self.work.done
            if widening.due(now, came, left, bringing=bringing, quiet=quiet):
                slots.release()

    async def serve(self, peer: PeerId, slots: asyncio.Semaphore) -> None:
        """Use one peer until the state is complete or the peer is of no use."""
        now, end = asyncio.get_running_loop().time, 0.0
        source = Served()
        while not source.dropped:
            if end:
                await asyncio.sleep(AGAIN_S)
            async with slots:
                self.work.sources.setdefault(peer, source)
                end = end or now() + making_s(self.work.state.length)
                try:
                    await self._offered(peer, end)
                except (TransportError, RemoteProtocolError) as error:
                    if not is_making(error) or now() + AGAIN_S > end:
                        _blame(peer, source, error, fatal=True)
                    continue
                async with asyncio.TaskGroup() as group:

                    def enough() -> None:
                        while source.streams < max(STREAMS, streams(source.round_trip)):
                            source.streams += 1
                            group.create_task(self._stream(peer, source, enough))

                    enough()
                return

    async def _offered(self, peer: PeerId, end: float) -> None:
        """Accept a peer's offer; only for one in office a copy is waited for to its ``end``."""
        now = asyncio.get_running_loop().time
        self.silent[peer] = now()
        turn = min(end, now() + turn_s(self.work.state.length))
        until = end if peer in self.sources.in_office else turn
        try:
            offer = await self.words.offer(peer, lambda: self.silent.pop(peer, None), until)
            self.work.accept(offer)
            await self._accept(offer)
        finally:
            self.silent.pop(peer, None)

    async def _accept(self, offer: Offer) -> None:
        """Have what comes kept on disk, too; the file is there before the first chunk."""
        async with self._accepting:
            if self.on_disk is not None and not self._accepted:
                await self.on_disk.beside(partial(self.on_disk.accept, offer))
            self._accepted = True

    def _write(self, start: int, data: memoryview) -> None:
        with self._writing:
            if not self._ended:
                self.work.write(start, data)

    async def share(self, words: FellowWords) -> None:
        """Also use others that download the same, as they become known; until cancelled."""
        asked = set(self.sources.peers)
        async with asyncio.TaskGroup() as group:
            while True:
                for peer in self.work.fellows.keys() - asked:
                    asked.add(peer)
                    group.create_task(self._from_fellow(peer, words))
                await self.work.changed(POLL_S)

    async def _from_fellow(self, peer: PeerId, words: FellowWords) -> None:
        source, refused = Served(), 0
        try:
            await words.introduce(peer)
            while not source.dropped:
                if self.work.chunk:
                    try:
                        self.work.has(peer, await words.in_place(peer))
                    except RemoteRefused:  # it may not have begun yet
                        refused += 1
                        if refused == MAX_FAILURES:
                            raise
                        await asyncio.sleep(POLL_S)
                    else:
                        self.work.sources.setdefault(peer, source)
                        await self._stream(peer, source, fellow=True)
                await asyncio.sleep(POLL_S / 4)
                await self.work.changed(POLL_S)
        except (TransportError, ProtocolError, OperatorError) as error:
            log.info("state download: nothing from %s, which downloads it too: %s", peer, error)
            source.dropped = source.dropped or str(error)
        finally:
            self.work.fellows.pop(peer, None)  # its place is another's

    async def _stream(
        self,
        peer: PeerId,
        source: Served,
        further: Callable[[], None] = lambda: None,
        *,
        fellow: bool = False,
    ) -> None:
        """Take one chunk after the other; ``further`` is called after each."""
        buffer = memoryview(bytearray(self.work.chunk))
        clock = asyncio.get_running_loop().time
        for number in count():
            await asyncio.sleep(max(0.0, source.again - clock()))
            if fellow:
                index = self.work.take_from(peer, source)
            else:
                index = await self.work.take(source)
            began = clock()
            if index is None:
                return
            try:
                name = "shared" if fellow else self.words.pull
                answered = await self._pull(peer, source, index, buffer, name)
                source.failures = 0
                if number:  # the first one opened a connection
                    source.answered(answered)
                    further()
            except (TransportError, RemoteProtocolError) as error:
                source.failed(began, clock())
                enough = source.failures >= MAX_FAILURES and not self.work.dark(DARK_S)
                _blame(peer, source, error, fatal=enough)
                if fellow:
                    return
            finally:
                self.work.give_back(index, source)

    async def _pull(
        self, peer: PeerId, source: Served, index: int, buffer: memoryview, name: str
    ) -> float:
        """Take one chunk; returns the seconds until its first byte came."""
        work, start = self.work, index * self.work.chunk
        clock = asyncio.get_running_loop().time
        asked = clock()
        data = buffer[: min(work.chunk, work.state.length - start)]
        drain = BufferDrain(data)
        if name == self.words.pull:
            self.silent.setdefault(peer, asked)
        with source.brings(drain):
            async with self.transport.pull(
                peer,
                name,
                self.words.header(index),
                max_length=len(data),
                timeout=self.sources.stall_timeout,
            ) as incoming:
                answered = clock() - asked
                await read_into(incoming, drain)
        expected = work.hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]

        if await self.offload(lambda: blake3(data).digest()) != expected:
            raise BadSignature(f"chunk {index} has another hash")
        # Only one of two streams that pulled it writes: the other's thread could still do so when
        # the state is complete and its vectors are the caller's again.
        if work.claim(index):
            await self.offload(lambda: self._write(start, data))
            if (disk := self.on_disk) is not None:
                keeper = peer if name == self.words.pull else None
                await disk.beside(lambda: disk.write(start, data, keeper))
            work.place(index, len(data), source)
        return answered


def _blame(peer: PeerId, source: Served, error: Exception, *, fatal: bool) -> None:
    """A refusal or wrong bytes end a source at once, whatever ``fatal`` says."""
    if fatal or isinstance(error, RemoteProtocolError | RemoteRefused):
        source.dropped = source.dropped or str(error)
        log.warning("state download: no more from %s: %s", peer, error)
