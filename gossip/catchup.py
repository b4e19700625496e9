"""Catching up: repeat the rounds this node missed from their certificates and parts.

Nothing is taken on trust: each certificate must continue our chain with a majority's votes, and
each part must match the digest they voted for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum

import torch

from gossip.agreement import PartKey, Place, key_of
from gossip.certificate import check_certificate
from gossip.exchange import Wiring, pull_part
from protocols.errors import Malformed, RemoteProtocolError, TransportError
from protocols.identity import PeerId
from protocols.messages import Certificate, CertificateRequest, Certificates, PartResult

CALL_TIMEOUT_S = 5.0
AT_ONCE = 8  # certificates asked for in one call

Held = Callable[[PartKey], tuple[PartResult, torch.Tensor] | None]
Advance = Callable[[Certificate, dict[tuple[int, int], torch.Tensor]], Awaitable[None]]


class Ending(Enum):
    """How catching up ended."""

    LEVEL = "nobody asked is ahead any more"
    GONE = "the rounds we miss are kept by nobody asked"
    FORKED = "the others build on another round than ours"
    DIVERGED = "most of those on our round have another state than ours"
    UNREACHABLE = "nobody asked answered"


async def catch_up(
    wiring: Wiring,
    sources: Sequence[PeerId],
    place: Callable[[], tuple[Place, tuple[PeerId, ...]]],
    held: Held,
    advance: Advance,
) -> Ending:
    """Replay rounds from ``sources`` until they have no more.

    ``place`` gives our place in the chain and the roster in office there; ``held`` parts that
    are here already; ``advance`` applies a verified round, after which ``place`` is one further.
    """
    ending = Ending.UNREACHABLE
    for source in sources:
        while True:
            here, roster = place()
            request = CertificateRequest(wiring.run, here.fragment, here.round, AT_ONCE)
            try:
                reply = await wiring.transport.call(
                    source,
                    "certificates",
                    request.encode(),
                    timeout=CALL_TIMEOUT_S,
                    max_reply=Certificates.MAX_BYTES,
                )
                found: Certificates = Certificates.decode(reply)
            except (TransportError, RemoteProtocolError):
                break
            if not found.certificates:
                ending = Ending.GONE
                break
            try:
                for certificate in found.certificates:
                    here, roster = place()
                    check_certificate(
                        certificate, run=wiring.run, previous=here.previous, roster=roster
                    )
                    parts = await _gather(wiring, certificate, source, held)
                    await advance(certificate, parts)
            except RemoteProtocolError:
                ending = Ending.FORKED
                break
            except TransportError:
                ending = Ending.GONE
                break
            if len(found.certificates) < AT_ONCE:
                return Ending.LEVEL
    return ending


async def _gather(
    wiring: Wiring, certificate: Certificate, source: PeerId, held: Held
) -> dict[tuple[int, int], torch.Tensor]:
    """All parts of a certified round; raises TransportError when one is not to be had."""
    voters = [signed.voter for signed in certificate.votes if signed.voter != source]
    parts: dict[tuple[int, int], torch.Tensor] = {}

    async def get(result: PartResult, turn: int) -> None:
        kept = held(key_of(result))
        if kept is not None and kept[0].digest == result.digest:
            parts[result.start, result.stop] = kept[1]
            return
        asked = [source, *voters]
        asked = [p for p in asked[turn:] + asked[:turn] if p != wiring.identity.peer_id]
        failure: TransportError | Malformed | None = None
        for peer in asked:
            try:
                parts[result.start, result.stop] = await pull_part(
                    wiring, peer, result, CALL_TIMEOUT_S
                )
                return
            except (TransportError, Malformed) as error:
                failure = error
        raise TransportError(f"nobody has part {result.start}-{result.stop}: {failure}")

    wanted = [result for result in certificate.outcome.parts if result.digest]
    try:
        async with asyncio.TaskGroup() as group:
            for index, result in enumerate(wanted):
                group.create_task(get(result, index % (len(voters) + 1)))
    except* TransportError as failures:
        raise TransportError(str(failures.exceptions[0])) from failures
    return parts
