"""Catching up: a node replays the rounds that it missed from their certificates and parts.

Nothing is taken on trust: each certificate must continue this node's chain with a majority's votes,
and each part must match the digest that they voted for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

import torch

from gossip.exchange.gathering import Gathering, Held, NotKeptError, Paces
from gossip.place import Place
from gossip.plans.certificate import check_certificate
from gossip.plans.validity import Shape, check_outcome
from gossip.wiring import Wiring
from protocols.asking import ask
from protocols.errors import Malformed, RemoteProtocolError, TransportError
from protocols.identity import PeerId
from protocols.messages import (
    Certificate,
    CertificateRequest,
    Certificates,
    Outcome,
    PartResult,
)

CALL_TIMEOUT_S = 5.0
AT_ONCE = 8  # certificates asked for in one call
PROMPT_S = 1.0  # for an answer

Advance = Callable[[Certificate, dict[tuple[int, int], torch.Tensor]], Awaitable[None]]


class Ending(Enum):
    """How catching up ended."""

    LEVEL = "nobody asked is ahead any more"
    UNREACHABLE = "nobody asked answered"
    FAR = "a download brings us nearer than replaying the rounds that we miss"
    GONE = "the rounds we miss are kept by nobody asked"
    DIVERGED = "most of those on our round have another state than ours"
    FORKED = "the others build on another round than ours"


@dataclass
class Replay:
    """Replays rounds that others have committed.

    ``place`` gives our place in the chain and the roster in office there; ``held`` parts that
    are here already, or on their way; ``advance`` applies a verified round, after which ``place``
    is one further.
    """

    wiring: Wiring
    shape: Shape
    place: Callable[[], tuple[Place, tuple[PeerId, ...]]]
    held: Held
    advance: Advance
    rejected: Callable[[PeerId, RemoteProtocolError], None]
    silent: Callable[[PeerId], None]  # told who does not answer
    helped: Callable[[PeerId], None]  # told whose certificate led further
    far: Callable[[PeerId], bool]  # whether a download gets us nearer to where a peer stands
    replays: Callable[[float | None], None]  # told since when a round is replayed, None: none is
    replayed: Callable[[float], None]  # told how long a round took
    announced: Callable[[PeerId], float]  # what a peer's uplink carries, bytes a second; 0: unknown
    link: Callable[[], float]  # what our downlink does
    decided: Outcome | None = None  # of the last round of which a certificate was shown
    _gathering: Gathering = field(init=False)

    def __post_init__(self) -> None:
        paces = Paces(self.announced, self.link)
        self._gathering = Gathering(self.wiring, paces, self.held, self.rejected)

    async def follow(self, sources: Sequence[PeerId], first: int) -> Ending | None:
        """Replay rounds from ``sources`` until one of them has no more.

        A source that gives few rounds at a time, or is slow, is asked again after the others, as
        rounds may be made faster than it shows them. None if no others are left to ask: more peers
        may be ahead by now. If none helps, the gravest of their endings. ``first`` is the round at
        which catching up began: a source with nothing from it on does not keep what is missed.
        """
        endings = [Ending.UNREACHABLE]
        left = deque(sources)
        while left:
            source = left.popleft()
            try:
                ending = await self._follow(source, first)
            except RemoteProtocolError as error:
                self.rejected(source, error)
            except TransportError:
                self.silent(source)
            else:
                if ending is Ending.LEVEL:
                    return ending
                if ending is not None:
                    endings.append(ending)
                elif left:
                    left.append(source)
                else:
                    return None
        return max(endings, key=list(Ending).index)

    async def certificates(
        self, source: PeerId, round_: int, count: int
    ) -> tuple[Certificate, ...]:
        """Ask for certificates. Raises TransportError or RemoteProtocolError."""
        here, _ = self.place()
        request = CertificateRequest(self.wiring.run, here.fragment, round_, count)
        transport = self.wiring.transport
        found = await ask(
            transport, source, "certificates", request, Certificates, timeout=CALL_TIMEOUT_S
        )
        return found.certificates

    async def _follow(self, source: PeerId, first: int) -> Ending | None:
        """None where the others are to be asked first."""
        while True:
            if self.far(source):
                return await self._look(source)
            asked, asked_at = self.place()[0].round, self.wiring.now()
            found = await self.certificates(source, asked, AT_ONCE)
            if not found:
                return Ending.GONE if asked == first else Ending.LEVEL
            prompt = len(found) == AT_ONCE and self.wiring.now() < asked_at + PROMPT_S
            for certificate in found:
                here, roster = self.place()
                if certificate.outcome.round < here.round:
                    continue  # committed here in the meantime
                ending = self._judge(certificate, here, roster)
                if ending is not None:
                    return ending
                self.decided = certificate.outcome
                if self.far(source):
                    return Ending.FAR
                began = self.wiring.now()
                self.replays(began)
                try:
                    parts = await self._gather(certificate, source)
                    await self.advance(certificate, parts)
                except NotKeptError:  # all have started again since, from what they had saved
                    return Ending.GONE
                finally:
                    self.replays(None)
                self.replayed(self.wiring.now() - began)
                self.helped(source)
            if self.place()[0].round == asked:
                raise Malformed("certificates that lead nowhere")
            if not prompt:
                return None

    async def _look(self, source: PeerId) -> Ending:
        """It is too far to be replayed: what has become of the round that this node stands at?"""
        here, roster = self.place()
        with suppress(TransportError):
            for certificate in await self.certificates(source, here.round, 1):
                if certificate.outcome.round != here.round:
                    raise Malformed("a certificate that was not asked for")
                ending = self._judge(certificate, here, roster)
                if ending is not None:
                    return ending
                self.decided = certificate.outcome
        return Ending.FAR

    def _judge(
        self, certificate: Certificate, here: Place, roster: tuple[PeerId, ...]
    ) -> Ending | None:
        """None if the certificate is our next one. Raises RemoteProtocolError if it is invalid."""
        outcome = certificate.outcome
        if outcome.fragment != here.fragment:
            raise Malformed("a certificate of another fragment")
        forked = outcome.round == here.round and outcome.previous != here.previous
        check_certificate(
            certificate,
            run=self.wiring.run,
            previous=outcome.previous if forked else here.previous,
            roster=None if forked else roster,
        )
        if forked:
            return Ending.FORKED
        if outcome.round == here.round and outcome.state != here.state:
            return Ending.DIVERGED
        check_outcome(outcome, here, self.shape, roster)
        return None

    async def _gather(
        self, certificate: Certificate, source: PeerId
    ) -> dict[tuple[int, int], torch.Tensor]:
        """All parts of a certified round; raises as :meth:`Gathering.gather` does."""
        me, outcome = self.wiring.identity.peer_id, certificate.outcome
        donors = [source, *(s.voter for s in certificate.votes if s.voter != source)]
        wanted: dict[PartResult, list[PeerId]] = {}
        for index, result in enumerate(result for result in outcome.parts if result.digest):
            turn = index % len(donors)  # so that all are asked at once
            wanted[result] = [p for p in donors[turn:] + donors[:turn] if p != me]
        return await self._gathering.gather(wanted, outcome.parts[-1].stop)
