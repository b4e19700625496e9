"""Downloading the outer state of a round, from all who have it, and what is on disk of it already.

How chunks come from several sources at once is :mod:`bootstrap.state.download`. Here is how the
copies of a state are asked for, how others that download the same become sources as well, and how a
download goes on that was killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bootstrap.state.chunks import Came, DownloadProgress, Work
from bootstrap.state.digest import StateBytes
from bootstrap.state.download import (
    OFFER_TIMEOUT_S,
    STALL_S,
    Download,
    Introduce,
    NoSourceError,
    Words,
    download,
)
from bootstrap.state.offers import is_making, offered
from bootstrap.state.partial import PartialState
from bootstrap.state.sharing import Sharing
from bootstrap.state.widening import FIRST_SOURCES
from protocols.asking import ask
from protocols.errors import RemoteRefused
from protocols.identity import PeerId
from protocols.messages import ChunkRequest, InPlace, InPlaceRequest, StateOffer, StateRequest
from protocols.tasks import Offload
from protocols.transport import Transport

if TYPE_CHECKING:
    import torch


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
    peers: Sequence[PeerId],
    run: bytes,
    round_: int,
    expected_digest: bytes,
    vectors: Sequence[torch.Tensor],
    *,
    fragment: int = 0,
    progress: DownloadProgress | None = None,
    came: Came = lambda share: None,
    offload: Offload = asyncio.to_thread,
    offer_timeout: float = OFFER_TIMEOUT_S,
    stall_timeout: float = STALL_S,
    first_sources: int = FIRST_SOURCES,
    fellows: Fellows | None = None,
    on_disk: PartialState | None = None,
    in_office: Container[PeerId] = (),
    going_on: bool = False,
) -> Download:
    """Fill ``vectors``, float32 each and base first, with the state of that digest.

    Of ``peers`` the first are asked first; those ``in_office`` may take their time for a copy.

    On return every byte has been verified. Raises :class:`NoSourceError` when no source is left;
    the vectors may then be partly written. With ``fellows`` the chunks that are here already
    are shared with others that download the same. What is ``on_disk`` of it is not
    fetched again, and what comes is kept there. ``going_on``: only with what is there, and from
    copies that are kept already, so that nobody makes one for it.
    """
    request = StateRequest(run, round_, fragment, kept=going_on)
    work = Work(StateBytes(vectors), expected_digest, transport.peer_id, progress, came)

    async def offer(peer: PeerId, making: Callable[[], object], until: float) -> StateOffer:
        try:
            found = await offered(
                transport,
                peer,
                request,
                timeout=offer_timeout,
                until=0.0 if going_on else until,
                making=making,
            )
        except RemoteRefused as error:
            if going_on and is_making(error):
                raise NoSourceError("it makes a copy, and keeps none") from error
            raise
        if fellows is not None:
            for reader in found.readers:
                fellows.mention(reader, peer)
                work.is_shared_by(reader)
        return found

    def header(index: int) -> bytes:
        return ChunkRequest(run, round_, index, fragment).encode()

    async def in_place(peer: PeerId) -> bytes:
        asked = InPlaceRequest(run, round_, expected_digest, fragment)
        found = await ask(transport, peer, "fellow", asked, InPlace, timeout=stall_timeout)
        return found.chunks

    async with AsyncExitStack() as stack:
        if on_disk is not None:
            on_disk.round = round_
            stack.push_async_callback(on_disk.beside, on_disk.close)
            known: StateOffer | None = await on_disk.beside(on_disk.offer)
            found: set[int] = set()
            if known is not None and known.digest == expected_digest:
                work.accept(known)
                found = await on_disk.beside(partial(on_disk.fill, work.state, known))
            if going_on and not found:
                raise NoSourceError("nothing of the state is here any more")
            work.had(found)
        if fellows is not None:
            stack.enter_context(fellows.sharing.open(fragment, round_, work))
        report = await download(
            transport,
            peers,
            Words(offer, "chunk", header, in_place),
            work,
            what=f"the state of round {round_}",
            offload=offload,
            stall_timeout=stall_timeout,
            first_sources=first_sources,
            introduce=fellows.introduce if fellows else None,
            in_office=in_office,
            on_disk=on_disk,
        )
        if on_disk is not None:
            await on_disk.beside(on_disk.finish)
        return report
