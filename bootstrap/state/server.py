"""Serving the outer state to newcomers, from a copy, while training goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bootstrap.state.digest import StateBytes, chunk_size, state_digest
from protocols.bodies import BufferFeed
from protocols.errors import Malformed, RemoteRefused, Stale
from protocols.identity import PeerId
from protocols.messages import ChunkRequest, StateOffer, StateRequest
from protocols.transport import Feed, Transport

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

Current = Callable[[int], "tuple[int, bytes, Sequence[torch.Tensor]]"]
Still = Callable[[], AbstractAsyncContextManager[None]]
Offload = Callable[[Callable[[], Any]], Awaitable[Any]]

MAX_PINS = 2  # copies of the state: one for those who are at it, one for who comes a round later
IDLE_S = 60.0  # a copy that nobody reads is given up
TIMER_SLACK_S = 0.01
COPY_COSTS = 10.0  # nobody can have more of the time spent on copies than one in so many
EVICT_S = 10.0  # where another round is wanted and there is no room, already after this


@dataclass
class _Pin:
    """A copy of the state of one round, kept while somebody reads it."""

    offer: bytes
    digest: bytes
    state: StateBytes
    chunk: int
    used: float  # when it was last asked for
    replaceable: float  # by a newer one for its only reader, from then on: copies are not for free
    readers: set[PeerId] = field(default_factory=set)  # who has not asked for another one since


class StateServer:
    """Answers ``state`` calls and ``chunk`` pulls, for each of so many ``fragments``.

    ``current`` gives a fragment's round, the digest of its state, and its live vectors, base first.
    They are copied while
    ``still()`` is held, which is to keep outer steps from being applied, and hashed after it was
    let go; both run in ``offload``. A state nobody has asked for in time is ``gone`` once the
    next round is applied; ``busy`` means that all copies are in use.
    """

    def __init__(
        self,
        transport: Transport,
        run: bytes,
        current: Current,
        *,
        still: Still,
        offload: Offload,
        fragments: int = 1,
        max_pins: int = MAX_PINS,
        idle_s: float = IDLE_S,
        evict_s: float = EVICT_S,
    ) -> None:
        self._run = run
        self._current = current
        self._still = still
        self._offload = offload
        self._fragments = fragments
        self._max_pins, self._idle_s, self._evict_s = fragments * max_pins, idle_s, evict_s
        self._pins: dict[tuple[int, int], _Pin] = {}  # by fragment and round
        self._pinning = asyncio.Lock()
        self._expiry: asyncio.TimerHandle | None = None
        transport.on_call("state", self._on_state)
        transport.on_pull("chunk", self._on_chunk)

    @property
    def pinned(self) -> list[int]:
        """Rounds of which a copy is held."""
        return sorted(round_ for _, round_ in self._pins)

    def close(self) -> None:
        """Give all copies up."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._pins.clear()

    async def _on_state(self, peer: PeerId, body: bytes) -> bytes:
        request = StateRequest.decode(body)
        self._check_run(request.run)
        async with self._pinning:  # who asks for the same round meanwhile finds it below
            pin = await self._pin(peer, request)
        self._touch(pin, peer)
        return pin.offer

    async def _pin(self, peer: PeerId, request: StateRequest) -> _Pin:
        """What a peer may have: the round it asks for, or the newest one if that will do."""
        fragment, round_ = request.fragment, request.round
        if not 0 <= fragment < self._fragments:
            raise Malformed(f"there is no fragment {fragment}")
        here, digest, _ = self._current(fragment)
        old = self._pins.get((fragment, here))
        if old is not None and old.digest != digest:  # of a fork's other side, which we have left
            del self._pins[fragment, here]
        wanted = max(round_, here) if request.or_newer else round_
        self._let_go(peer, (fragment, wanted))
        if (pin := self._pins.get((fragment, wanted))) is not None:
            return pin
        try:
            self._make_room()
        except RemoteRefused:
            kept = [key for key in self._pins if key[0] == fragment and key[1] >= round_]
            if not (request.or_newer and kept):
                raise
            return self._pins[max(kept)]  # better than nothing: the rest is replayed
        round_, pin = await self._copy(fragment, wanted, or_newer=request.or_newer)
        log.info("keeping the state of round %d for %s", round_, peer)
        return self._pins.setdefault((fragment, round_), pin)

    async def _on_chunk(self, peer: PeerId, header: bytes) -> Feed:
        request = ChunkRequest.decode(header)
        self._check_run(request.run)
        pin = self._pins.get((request.fragment, request.round))
        if pin is None:
            raise RemoteRefused("gone", f"the state of round {request.round}")
        start = request.index * pin.chunk
        if start >= pin.state.length:
            raise Malformed(f"there is no chunk {request.index}")
        self._touch(pin, peer)
        return BufferFeed(*pin.state.pieces(start, min(start + pin.chunk, pin.state.length)))

    def _check_run(self, run: bytes) -> None:
        if run != self._run:
            raise Stale("another run")

    async def _copy(self, fragment: int, round_: int, *, or_newer: bool) -> tuple[int, _Pin]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with self._still():
            held, _, live = self._current(fragment)
            if held < round_ or (held > round_ and not or_newer):
                raise RemoteRefused("gone", f"round {round_}; this peer stands at {held}")
            vectors = await self._offload(lambda: [vector.clone() for vector in live])

        def describe() -> _Pin:
            state = StateBytes(vectors)
            chunk = chunk_size(state.length)
            digest, hashes = state_digest(vectors, chunk)
            offer = StateOffer(held, digest, state.length, chunk, hashes).encode()
            now = loop.time()
            return _Pin(offer, digest, state, chunk, now, now + COPY_COSTS * (now - began))

        return held, await self._offload(describe)

    def _let_go(self, peer: PeerId, wanted: tuple[int, int]) -> None:
        """A peer wants this copy in the place of the fragment's that it had."""
        now = asyncio.get_running_loop().time()
        for key, pin in list(self._pins.items()):
            mine = key[0] == wanted[0] and key != wanted and peer in pin.readers
            if mine and now >= pin.replaceable:
                pin.readers.discard(peer)
                if not pin.readers:
                    del self._pins[key]

    def _make_room(self) -> None:
        if len(self._pins) < self._max_pins:
            return
        key, oldest = min(self._pins.items(), key=lambda item: item[1].used)
        if asyncio.get_running_loop().time() - oldest.used < self._evict_s:
            raise RemoteRefused("busy", "all copies of the state are in use")
        del self._pins[key]

    def _touch(self, pin: _Pin, reader: PeerId) -> None:
        loop = asyncio.get_running_loop()
        pin.readers.add(reader)
        pin.used = loop.time()
        if self._expiry is None:
            self._expiry = loop.call_later(self._idle_s, self._expire)

    def _expire(self) -> None:
        """Drop idle copies; look again when the next one may be idle."""
        loop = asyncio.get_running_loop()
        self._expiry = None
        # A timer may fire a clock's tick early; without slack it would be set again for now.
        due = loop.time() + TIMER_SLACK_S
        self._pins = {key: pin for key, pin in self._pins.items() if pin.used + self._idle_s > due}
        if self._pins:
            next_ = min(pin.used for pin in self._pins.values()) + self._idle_s
            self._expiry = loop.call_at(next_, self._expire)
