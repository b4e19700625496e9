"""Who still has what a download needs that was broken off (:mod:`bootstrap.state.partial`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bootstrap.state.offers import MAKING
from protocols.asking import ask
from protocols.errors import ProtocolError, RemoteRefused, TransportError
from protocols.identity import PeerId
from protocols.messages import (
    CertificateRequest,
    Certificates,
    StateOffer,
    StateRequest,
)
from protocols.transport import Transport

ANSWER_S = 5.0
MAX_ASKED = 16  # peers


async def keepers(
    transport: Transport,
    peers: Sequence[PeerId],
    run: bytes,
    fragment: int,
    known: StateOffer,
    whole: bool,
) -> tuple[PeerId, ...]:
    """Who of ``peers`` keeps the copy that is ``known`` here in part; asked all at once.

    Where the ``whole`` of it is here: who keeps the rounds from there on.
    """

    async def keeps(peer: PeerId) -> bool:
        try:
            if whole:
                before = CertificateRequest(run, fragment, max(0, known.round - 1), 1)
                shown = await ask(
                    transport, peer, "certificates", before, Certificates, timeout=ANSWER_S
                )
                return bool(shown.certificates)
            request = StateRequest(run, known.round, fragment)
            offer = await ask(transport, peer, "state", request, StateOffer, timeout=ANSWER_S)
        except RemoteRefused as error:
            return error.code == MAKING  # a copy for somebody else, and it may have this one too
        except (TransportError, ProtocolError):
            return False
        return bool(offer.digest == known.digest)

    answers = await asyncio.gather(*map(keeps, peers))
    return tuple(peer for peer, yes in zip(peers, answers, strict=True) if yes)
