"""Downloading the outer state of a round, from all who have it, and what is on disk of it already.

How chunks come from several sources at once is :mod:`bootstrap.state.download`. Here is how the
copies of a state are asked for, how others that download the same become sources as well, and how a
download goes on that was killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bootstrap.state.chunks import Came, DownloadProgress, Work
from bootstrap.state.digest import StateBytes
from bootstrap.state.download import (
    Download,
    FellowWords,
    Introduce,
    NoSourceError,
    Sources,
    Words,
    download,
)
from bootstrap.state.offers import is_making, offered
from bootstrap.state.partial import PartialState
from bootstrap.state.sharing import Sharing
from protocols.asking import ask
from protocols.errors import RemoteRefused
from protocols.identity import PeerId
from protocols.messages import ChunkRequest, InPlace, InPlaceRequest, StateOffer, StateRequest
from protocols.tasks import Offload
from protocols.transport import Transport

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class WantedState:
    """Which state is wanted: that of a round of one fragment, with this digest."""

    run: bytes
    round: int
    digest: bytes
    fragment: int = 0

    def chunk(self, index: int) -> bytes:
        """The header of a chunk's pull."""
        return ChunkRequest(self.run, self.round, index, self.fragment).encode()


@dataclass(frozen=True)
class Fellows:
    """How to share with others who download the same: ``introduce`` this node to one of them.

    ``mention(peer, by)`` is told that ``by``, which knows where ``peer`` is, has named it.
    """

    sharing: Sharing
    introduce: Introduce
    mention: Callable[[PeerId, PeerId], object] = lambda peer, by: None


async def download_state(
    transport: Transport,
    sources: Sources,
    wanted: WantedState,
    vectors: Sequence[torch.Tensor],
    *,
    progress: DownloadProgress | None = None,
    came: Came = lambda share: None,
    offload: Offload = asyncio.to_thread,
    fellows: Fellows | None = None,
    on_disk: PartialState | None = None,
) -> Download:
    """Fill ``vectors``, float32 each and base first, with the wanted state.

    On return every byte has been verified. Raises :class:`NoSourceError` when no source is left;
    the vectors may then be partly written. With ``fellows`` the chunks that are here already
    are shared with others that download the same. What is ``on_disk`` of it is not
    fetched again, and what comes is kept there. From copies that are kept already
    (:attr:`Sources.kept_only`) it is only gone on with what is there.
    """
    work = Work(StateBytes(vectors), wanted.digest, transport.peer_id, progress, came)
    asking = _Asking(transport, sources, wanted, work, fellows)
    async with AsyncExitStack() as stack:
        if on_disk is not None:
            stack.push_async_callback(on_disk.beside, on_disk.close)
            found = await _fill_from(on_disk, wanted, work)
            if sources.kept_only and not found:
                raise NoSourceError("nothing of the state is here any more")
            work.had(found)
        if fellows is not None:
            stack.enter_context(fellows.sharing.open(wanted.fragment, wanted.round, work))
        report = await download(
            transport,
            sources,
            asking.words,
            work,
            what=f"the state of round {wanted.round}",
            offload=offload,
            on_disk=on_disk,
        )
        if on_disk is not None:
            await on_disk.beside(on_disk.finish)
        return report


async def _fill_from(on_disk: PartialState, wanted: WantedState, work: Work) -> set[int]:
    """Read what is on disk of the state; returns the chunks that are there."""
    on_disk.round = wanted.round
    known: StateOffer | None = await on_disk.beside(on_disk.offer)
    if known is None or known.digest != wanted.digest:
        return set()
    work.accept(known)
    found: set[int] = await on_disk.beside(partial(on_disk.fill, work.state, known))
    return found


@dataclass(frozen=True)
class _Asking:
    """How a state is asked for, of its sources and of fellows."""

    transport: Transport
    sources: Sources
    wanted: WantedState
    work: Work
    fellows: Fellows | None

    @property
    def words(self) -> Words:
        fellows = None
        if self.fellows is not None:
            fellows = FellowWords(self.fellows.introduce, self._in_place)
        return Words(self._offer, "chunk", self.wanted.chunk, fellows)

    async def _offer(self, peer: PeerId, making: Callable[[], object], until: float) -> StateOffer:
        wanted, kept_only = self.wanted, self.sources.kept_only
        try:
            found = await offered(
                self.transport,
                peer,
                StateRequest(wanted.run, wanted.round, wanted.fragment, kept=kept_only),
                timeout=self.sources.offer_timeout,
                until=0.0 if kept_only else until,
                making=making,
            )
        except RemoteRefused as error:
            if kept_only and is_making(error):
                raise NoSourceError("it makes a copy, and keeps none") from error
            raise
        if self.fellows is not None:
            for reader in found.readers:
                self.fellows.mention(reader, peer)
                self.work.is_shared_by(reader)
        return found

    async def _in_place(self, peer: PeerId) -> bytes:
        wanted = self.wanted
        request = InPlaceRequest(wanted.run, wanted.round, wanted.digest, wanted.fragment)
        found = await ask(
            self.transport, peer, "fellow", request, InPlace, timeout=self.sources.stall_timeout
        )
        return found.chunks
