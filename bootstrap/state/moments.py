"""An island's inner optimizer's moments for a newcomer: served from one copy, fetched in chunks.

Unlike the outer state they are one island's own. No certificate names them: the link proves whose
they are, the digest that they came as offered, but nothing proves that they are good. So what
arrives must be checked (:func:`node.trainer.moments.faults`). Not for runs with strangers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bootstrap.state.chunks import DownloadProgress, Work, check_offer
from bootstrap.state.copies import COPY_COSTS, Copy, Expiry, Maker, Use
from bootstrap.state.digest import StateBytes
from bootstrap.state.download import OFFER_TIMEOUT_S, Sources, Words, download
from protocols.asking import ask, check_run
from protocols.errors import Malformed, RemoteRefused
from protocols.identity import PeerId
from protocols.messages import MomentsChunk, MomentsOffer, MomentsRequest
from protocols.tasks import Offload
from protocols.transport import Feed, Transport

if TYPE_CHECKING:
    import torch

MOMENTS_IDLE_S = 60.0  # a copy that nobody reads is given up
MAX_AGE_S = 600.0  # an older copy is only for those that read it already
MAX_STEPS = 2**53  # inner steps that moments may claim: a float64 counts exactly up to there


@dataclass(frozen=True)
class Moments:
    """A copy of moments: fp32 [n] on the CPU, and the inner steps that they have seen."""

    steps: int
    vector: torch.Tensor


@dataclass
class _Kept:
    """The copy."""

    copy: Copy
    offer: bytes
    made: float
    use: Use


class MomentsServer:
    """Answers ``moments`` calls and ``moment`` pulls from one copy, which ``copy`` makes.

    ``copy`` raises :class:`RemoteRefused` where there are none. A copy is given up when nobody has
    read it for :data:`MOMENTS_IDLE_S`. At most one part in ``COPY_COSTS`` of the time goes into
    copies, whoever asks, and whether or not they succeed: until the next one is due the answer is
    ``busy``. If a caller hangs up, the copy that is being made is for the next one.
    """

    def __init__(
        self,
        transport: Transport,
        run: bytes,
        copy: Callable[[], Awaitable[Moments]],
        *,
        offload: Offload,
    ) -> None:
        self._run, self._copy, self._offload = run, copy, offload
        self._kept: _Kept | None = None
        self._maker, self._expiry = Maker(), Expiry(MOMENTS_IDLE_S, self._expire)
        self._next = 0.0  # when the next copy may be made
        transport.on_call("moments", self._on_moments)
        transport.on_pull("moment", self._on_chunk)

    async def aclose(self) -> None:
        """Give the copy up, also one that is being made."""
        await self._maker.aclose()
        self._expiry.cancel()
        self._kept = None

    async def _on_moments(self, peer: PeerId, body: bytes) -> bytes:
        del peer
        check_run(MomentsRequest.decode(body).run, self._run)
        now = asyncio.get_running_loop().time()
        kept = self._kept
        if kept is not None and now >= kept.use.most + MAX_AGE_S:
            kept = self._kept = None  # whoever still reads it is too slow
        if kept is None:
            if now < self._next and not self._maker.busy:
                raise RemoteRefused("busy", "a copy of the moments was made a moment ago")
            kept = await self._maker.make(self._make)
        elif now - kept.made > MAX_AGE_S:
            raise RemoteRefused("busy", "an old copy of the moments is still being read")
        self._touch(kept)
        return kept.offer

    async def _make(self) -> _Kept:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            moments = await self._copy()
            copy: Copy = await self._offload(lambda: Copy.of([moments.vector]))
        finally:
            self._next = clock() + COPY_COSTS * (clock() - began)
        offer = MomentsOffer(moments.steps, copy.digest, copy.length, copy.chunk, copy.hashes)
        self._kept = kept = _Kept(copy, offer.encode(), began, Use(copy.length))
        self._touch(kept)  # also where nobody waits for it any more: it is given up in time
        return kept

    async def _on_chunk(self, peer: PeerId, header: bytes) -> Feed:
        del peer
        request = MomentsChunk.decode(header)
        check_run(request.run, self._run)
        kept = self._kept
        if kept is None or kept.copy.digest != request.digest:
            raise RemoteRefused("gone", "that copy of the moments")
        feed = kept.copy.feed(request.index, kept.use.note)
        self._touch(kept)
        return feed

    def _touch(self, kept: _Kept) -> None:
        kept.use.note()
        self._expiry.start()

    def _expire(self, by: float) -> float | None:
        if self._kept is not None and self._kept.use.at <= by:
            self._kept = None
        return self._kept.use.at if self._kept is not None else None


async def offered_moments(
    transport: Transport, peer: PeerId, run: bytes, length: int, *, timeout: float = OFFER_TIMEOUT_S
) -> MomentsOffer:
    """An island's offer of its moments, which must be ``length`` bytes.

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
    progress: DownloadProgress | None = None,
) -> None:
    """Fill ``vectors`` (fp32) with what was offered; chunks are asked for again as a state's are.

    ``progress`` is told of the bytes that are here, of those in all, and of the sources.

    Raises :class:`~bootstrap.state.download.NoSourceError`.
    """

    async def known(peer: PeerId, making: object, until: float) -> MomentsOffer:
        return offer

    def header(index: int) -> bytes:
        return MomentsChunk(run, offer.digest, index).encode()

    await download(
        transport,
        Sources([peer]),
        Words(known, "moment", header),
        Work(StateBytes(vectors), offer.digest, transport.peer_id, progress),
        what="the moments",
        offload=offload,
    )
