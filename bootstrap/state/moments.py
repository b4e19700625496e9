"""An island's inner optimizer's moments for a newcomer: served from one copy, fetched in chunks.

Unlike the outer state they are one island's own. No certificate names them: the link says whose
they are, the digest that they came as they were offered, and nothing that they are good. So what
arrives is to be checked (:func:`node.trainer.moments.faults`), and is not for runs with strangers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bootstrap.state.digest import StateBytes, chunk_size, state_digest
from bootstrap.state.download import OFFER_TIMEOUT_S, Progress, Words, check_offer, download
from bootstrap.state.server import COPY_COSTS, IDLE_S, TIMER_SLACK_S, Offload
from protocols.asking import ask
from protocols.bodies import BufferFeed
from protocols.errors import Malformed, RemoteRefused, Stale
from protocols.identity import PeerId
from protocols.messages import MomentsChunk, MomentsOffer, MomentsRequest
from protocols.tasks import Background
from protocols.transport import Feed, Transport

if TYPE_CHECKING:
    import torch

MAX_AGE_S = 600.0  # an older copy is for those who are at it alone
MAX_STEPS = 2**53  # inner steps that moments may claim to have seen: a float64 counts so far


@dataclass(frozen=True)
class Moments:
    """A copy of moments: fp32 [n] on the CPU, and the inner steps that they have seen."""

    steps: int
    vector: torch.Tensor


@dataclass
class _Kept:
    """The copy, as bytes."""

    offer: MomentsOffer
    state: StateBytes
    made: float
    used: float  # when it was last asked for


class MomentsServer:
    """Answers ``moments`` calls and ``moment`` pulls from one copy, which ``copy`` makes.

    It raises :class:`RemoteRefused` where there are none. The copy is given up when nobody has read
    it for ``idle_s``. The time spent on copies is one part in ``COPY_COSTS`` at most, whoever asks,
    and whether or not they succeed: meanwhile the answer is ``busy``. Who hangs up leaves the copy
    that is being made to the next who asks.
    """

    def __init__(
        self,
        transport: Transport,
        run: bytes,
        copy: Callable[[], Awaitable[Moments]],
        *,
        offload: Offload,
        idle_s: float = IDLE_S,
    ) -> None:
        self._run, self._copy, self._offload, self._idle_s = run, copy, offload, idle_s
        self._kept: _Kept | None = None
        self._background = Background()
        self._making: asyncio.Task[_Kept] | None = None
        self._next = 0.0  # when the next copy may be made
        self._expiry: asyncio.TimerHandle | None = None
        transport.on_call("moments", self._on_moments)
        transport.on_pull("moment", self._on_chunk)

    @property
    def keeps(self) -> bool:
        """Whether a copy is held."""
        return self._kept is not None

    async def aclose(self) -> None:
        """Give the copy up, also one that is being made."""
        await self._background.aclose()
        if self._expiry is not None:
            self._expiry.cancel()
        self._kept = None

    async def _on_moments(self, peer: PeerId, body: bytes) -> bytes:
        del peer
        self._check_run(MomentsRequest.decode(body).run)
        now = asyncio.get_running_loop().time()
        kept = self._kept
        if kept is None:
            if self._making is None:
                if now < self._next:
                    raise RemoteRefused("busy", "a copy of the moments was made a moment ago")
                self._making = self._background.spawn(self._make())
                self._making.add_done_callback(self._on_made)
            making = self._making
            await asyncio.wait([making])
            kept = making.result()
        elif now - kept.made > MAX_AGE_S:
            raise RemoteRefused("busy", "an old copy of the moments is still being read")
        self._touch(kept)
        return kept.offer.encode()

    def _on_made(self, making: asyncio.Task[_Kept]) -> None:
        self._making = None
        if not making.cancelled():
            making.exception()  # nobody may be waiting any more: that is no error of its own

    async def _make(self) -> _Kept:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            moments = await self._copy()

            def describe() -> tuple[MomentsOffer, StateBytes]:
                state = StateBytes([moments.vector])
                chunk = chunk_size(state.length)
                digest, hashes = state_digest([moments.vector], chunk)
                return MomentsOffer(moments.steps, digest, state.length, chunk, hashes), state

            offer, state = await self._offload(describe)
        finally:
            self._next = clock() + COPY_COSTS * (clock() - began)
        self._kept = kept = _Kept(offer, state, began, clock())
        self._touch(kept)  # also where nobody waits for it any more: it is given up in time
        return kept

    async def _on_chunk(self, peer: PeerId, header: bytes) -> Feed:
        del peer
        request = MomentsChunk.decode(header)
        self._check_run(request.run)
        kept = self._kept
        if kept is None or kept.offer.digest != request.digest:
            raise RemoteRefused("gone", "that copy of the moments")
        start = request.index * kept.offer.chunk
        if not 0 <= start < kept.state.length:
            raise Malformed(f"there is no chunk {request.index}")
        self._touch(kept)
        end = min(start + kept.offer.chunk, kept.state.length)
        return BufferFeed(*kept.state.pieces(start, end))

    def _check_run(self, run: bytes) -> None:
        if run != self._run:
            raise Stale("another run")

    def _touch(self, kept: _Kept) -> None:
        loop = asyncio.get_running_loop()
        kept.used = loop.time()
        if self._expiry is None:
            self._expiry = loop.call_later(self._idle_s, self._expire)

    def _expire(self) -> None:
        """Drop a copy that is idle; look again when it may be."""
        loop = asyncio.get_running_loop()
        self._expiry = None
        if self._kept is None:
            return
        due = self._kept.used + self._idle_s
        if due <= loop.time() + TIMER_SLACK_S:
            self._kept = None
        else:
            self._expiry = loop.call_at(due, self._expire)


async def offered_moments(
    transport: Transport, peer: PeerId, run: bytes, length: int, *, timeout: float = OFFER_TIMEOUT_S
) -> MomentsOffer:
    """What an island offers, which is to be ``length`` bytes.

    Raises :class:`TransportError` (``RemoteRefused`` where it has none), or
    :class:`RemoteProtocolError` for an offer that is not well-formed or of another size.
    """
    offer = await ask(
        transport, peer, "moments", MomentsRequest(run), MomentsOffer, timeout=timeout
    )
    check_offer(offer, length)
    if not 0 < offer.steps <= MAX_STEPS:
        raise Malformed(f"moments of {offer.steps} steps")
    return offer


async def download_moments(
    transport: Transport,
    peer: PeerId,
    run: bytes,
    offer: MomentsOffer,
    vectors: Sequence[torch.Tensor],
    *,
    offload: Offload,
    progress: Progress | None = None,
) -> None:
    """Fill ``vectors`` (fp32) with what was offered; chunks are asked for again as a state's are.

    Raises :class:`~bootstrap.state.download.NoSourceError`.
    """

    async def known(peer: PeerId) -> MomentsOffer:
        return offer

    def header(index: int) -> bytes:
        return MomentsChunk(run, offer.digest, index).encode()

    await download(
        transport,
        [peer],
        Words(known, "moment", header),
        offer.digest,
        vectors,
        what="the moments",
        progress=progress,
        offload=offload,
    )
