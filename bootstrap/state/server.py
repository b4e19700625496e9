"""Serving the outer state to newcomers, from a copy, while training goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bootstrap.state.copies import COPY_COSTS, Copy, Expiry, Maker, Use, longest_s
from bootstrap.state.digest import StateBytes
from bootstrap.state.offers import ANSWER_S, MAKING
from protocols.asking import check_run
from protocols.errors import Malformed, RemoteRefused
from protocols.identity import PeerId
from protocols.messages import MAX_READERS, ChunkRequest, StateOffer, StateRequest
from protocols.tasks import Offload
from protocols.transport import Feed, Transport

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

Current = Callable[[int], "tuple[int, bytes, Sequence[torch.Tensor]]"]
Still = Callable[[], AbstractAsyncContextManager[None]]

# Without a read, then a copy is given up: a reader's link may be down for a while, or its machine
# starts again, after hours of a download with which it can go on then.
IDLE_S = 600.0
MAX_PINS = 2  # copies of the state: one for its readers, one for newcomers a round later
SPARE = 1.1  # of a copy's size is to be free before one is made
EVICT_S = 10.0  # the same where another round is wanted and there is no room


@dataclass
class _Pin:
    """A copy of the state of one round, kept while somebody reads it."""

    copy: Copy
    offer: StateOffer
    use: Use
    replaceable: float  # from when its only reader may have a newer one: copies cost time
    # who has not asked for another one since, the newest last
    readers: dict[PeerId, None] = field(default_factory=dict)

    def others(self, peer: PeerId) -> tuple[PeerId, ...]:
        """Who else reads it, or has read it, the newest first."""
        others = [reader for reader in reversed(self.readers) if reader != peer]
        return tuple(others[:MAX_READERS])


class StateServer:
    """Answers ``state`` calls and ``chunk`` pulls, for each of ``fragments`` fragments.

    ``current`` gives a fragment's round, the digest of its state, and its live vectors, base first.
    They are copied, and hashed on the way, while ``still()`` is held, which is to keep outer steps
    from being applied. Copying runs in ``offload``, and to its end even if the caller hangs up or
    was told to ask ``again``. A state nobody has asked for in time is ``gone`` once the next round
    is applied; ``busy`` means that all copies are in use, or that there is no memory for one more
    (``room`` tells how many bytes are free, None: not known). ``read_by`` is told of each peer that
    reads of a copy, with its fragment and round.
    """

    def __init__(
        self,
        transport: Transport,
        run: bytes,
        current: Current,
        *,
        still: Still,
        offload: Offload,
        room: Callable[[], int | None] = lambda: None,
        read_by: Callable[[PeerId, int, int], object] | None = None,
        fragments: int = 1,
        max_pins: int = MAX_PINS,
    ) -> None:
        self._run = run
        self._current = current
        self._still = still
        self._offload = offload
        self._room = room
        self._read_by = read_by
        self._fragments = fragments
        self._max_pins = fragments * max_pins
        self._pins: dict[tuple[int, int], _Pin] = {}  # by fragment and round
        self._pinning = asyncio.Lock()
        self._maker, self._expiry = Maker(), Expiry(IDLE_S, self._expire)
        transport.on_call("state", self._on_state)
        transport.on_pull("chunk", self._on_chunk)

    @property
    def readers(self) -> set[PeerId]:
        """Who reads copies of which some was read in the last :data:`EVICT_S` seconds."""
        now = asyncio.get_running_loop().time()
        used = (pin for pin in self._pins.values() if now - pin.use.at < EVICT_S)
        return {reader for pin in used for reader in pin.readers}

    @property
    def longest_s(self) -> float:
        """For how long a newcomer may take to read all of the state."""
        live = (self._current(fragment)[2] for fragment in range(self._fragments))
        return longest_s(sum(StateBytes(vectors).length for vectors in live))

    async def aclose(self) -> None:
        """Give all copies up, also one that is being made."""
        await self._maker.aclose()
        self._expiry.cancel()
        self._pins.clear()

    async def _on_state(self, peer: PeerId, body: bytes) -> bytes:
        request = StateRequest.decode(body)
        check_run(request.run, self._run)
        if request.kept:
            found = self._pins.get((request.fragment, request.round))
            if found is None:
                raise RemoteRefused("gone", f"no copy is kept of round {request.round}")
            pin = found
        else:
            pin = await self._made(peer, request)
        others = pin.others(peer)
        if not request.kept:  # who reads it shows by that alone that it is in use
            self._touch(request.fragment, pin, peer)
        return dataclasses.replace(pin.offer, readers=others).encode()

    async def _made(self, peer: PeerId, request: StateRequest) -> _Pin:
        """As :meth:`_pin`, for as long as a call may take."""
        if (pin := self._there(peer, request)[1]) is not None:
            return pin  # whatever is being copied for others
        try:
            async with asyncio.timeout(ANSWER_S), self._pinning:
                # another peer that asks for this round meanwhile finds it below
                await self._maker.wait()  # for a copy whose caller has hung up
                return await self._pin(peer, request)
        except TimeoutError:
            raise RemoteRefused(MAKING, "a copy of the state is being made") from None

    def _there(self, peer: PeerId, request: StateRequest) -> tuple[int, _Pin | None]:
        """The round that a peer may have, and the copy of it where there is one."""
        fragment, round_ = request.fragment, request.round
        if not 0 <= fragment < self._fragments:
            raise Malformed(f"there is no fragment {fragment}")
        here, digest, _ = self._current(fragment)
        old = self._pins.get((fragment, here))
        if (
            old is not None and old.copy.digest != digest
        ):  # of a fork's other side, which we have left
            del self._pins[fragment, here]
        wanted = max(round_, here) if request.or_newer else round_
        pin = self._pins.get((fragment, wanted))
        if pin is None:
            _check_round(here, round_, or_newer=request.or_newer)  # before it costs anybody a copy
        self._let_go(peer, (fragment, wanted))
        return wanted, pin

    async def _pin(self, peer: PeerId, request: StateRequest) -> _Pin:
        """What a peer may have: the round it asks for, or the newest one if that will do."""
        fragment, round_ = request.fragment, request.round
        wanted, pin = self._there(peer, request)
        if pin is not None:
            return pin
        try:
            self._make_room(fragment)
        except RemoteRefused:
            kept = [key for key in self._pins if key[0] == fragment and key[1] >= round_]
            if not (request.or_newer and kept):
                raise
            return self._pins[max(kept)]  # better than nothing: the rest is replayed
        log.info("a copy of the state of round %d for %s", wanted, peer)
        return await self._maker.make(
            lambda: self._copy(fragment, wanted, or_newer=request.or_newer)
        )

    async def _on_chunk(self, peer: PeerId, header: bytes) -> Feed:
        request = ChunkRequest.decode(header)
        check_run(request.run, self._run)
        pin = self._pins.get((request.fragment, request.round))
        if pin is None:
            raise RemoteRefused("gone", f"the state of round {request.round}")
        feed = pin.copy.feed(request.index, pin.use.note)
        self._touch(request.fragment, pin, peer)
        return feed

    async def _copy(self, fragment: int, round_: int, *, or_newer: bool) -> _Pin:
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with self._still():
            held, _, live = self._current(fragment)
            _check_round(held, round_, or_newer=or_newer)
            copy: Copy = await self._offload(lambda: Copy.taken(live))
        offer = StateOffer(held, copy.digest, copy.length, copy.chunk, copy.hashes)
        now = loop.time()
        pin = _Pin(copy, offer, Use(copy.length), now + COPY_COSTS * (now - began))
        self._expiry.start()  # also where nobody waits for it any more
        return self._pins.setdefault((fragment, held), pin)

    def _let_go(self, peer: PeerId, wanted: tuple[int, int]) -> None:
        """A peer wants this copy instead of the one of the same fragment that it had."""
        now = asyncio.get_running_loop().time()
        for key, pin in list(self._pins.items()):
            mine = key[0] == wanted[0] and key != wanted and peer in pin.readers
            if mine and now >= pin.replaceable:
                pin.readers.pop(peer)
                if not pin.readers:
                    del self._pins[key]

    def _make_room(self, fragment: int) -> None:
        """Give up copies that nobody reads, or that were read for long enough, until there is room
        for one more; raises ``busy``.
        """
        while why := self._no_room(fragment):
            if not self._pins:
                raise RemoteRefused("busy", why)
            until, key = min(
                (max(pin.replaceable, pin.use.until(EVICT_S)), key)
                for key, pin in self._pins.items()
            )
            if asyncio.get_running_loop().time() < until:
                raise RemoteRefused("busy", why)
            del self._pins[key]

    def _no_room(self, fragment: int) -> str:
        """Why no further copy can be made; empty: one can."""
        if len(self._pins) >= self._max_pins:
            return "all copies of the state are in use"
        size, room = StateBytes(self._current(fragment)[2]).length, self._room()
        if room is not None and room < SPARE * size:
            return f"no memory for a copy of the state: {size / 1e9:.1f} GB, {room / 1e9:.1f} free"
        return ""

    def _touch(self, fragment: int, pin: _Pin, reader: PeerId) -> None:
        pin.readers[reader] = None
        pin.use.note()
        if self._read_by is not None:
            self._read_by(reader, fragment, pin.offer.round)
        self._expiry.start()

    def _expire(self, by: float) -> float | None:
        self._pins = {key: pin for key, pin in self._pins.items() if pin.use.at > by}
        return min((pin.use.at for pin in self._pins.values()), default=None)


def _check_round(held: int, round_: int, *, or_newer: bool) -> None:
    if held < round_ or (held > round_ and not or_newer):
        raise RemoteRefused("gone", f"round {round_}; this peer stands at {held}")
