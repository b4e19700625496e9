"""Going on with a download that was broken off when the node was killed, where that can be had.

It is tried at the beginning, once, or a few times where nobody answers, and only with the peers
whose copy the chunks came from (:mod:`bootstrap.state.partial`): nobody makes a copy for it. Who of
them keeps it, that the chain leads to it, and the download itself have each :data:`WITHIN_S`, the
download once more with each :data:`SHARE` of what is missing. So a peer that lies, or sends next to
nothing, holds nobody up for longer; where it fails, the newest state is downloaded as if nothing
had been there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from bootstrap.state import DownloadProgress
from gossip.catchup.claims import given_time
from gossip.catchup.lineage import Claim, prove
from gossip.plans.certificate import check_certificate, outcome_hash
from node.checkpoints.restoring import standing_after
from node.entry.targets import Target
from node.replicas.replica import ChainStanding
from protocols.asking import ask
from protocols.errors import ProtocolError, RemoteProtocolError, Stale, TransportError
from protocols.identity import PeerId
from protocols.messages import CertificateRequest, Certificates, StateOffer, StateRequest
from protocols.tasks import Offload
from protocols.transport import Transport

ANSWER_S = 5.0
# of 56 GB a link of 24 Mbit/s brings so much in that time; slower ones begin anew
SHARE, WITHIN_S = 1 / 64, 300.0


class Silent(TransportError):
    """What is asked for may still be had, of somebody who does not answer."""


class MovingDeadline:
    """Puts the end of a time limit off whenever enough of a download has come."""

    def __init__(self, limit: asyncio.Timeout, progress: DownloadProgress) -> None:
        """What is on disk is read without a limit, until ``progress`` tells how much that was."""
        self._limit, self._progress = limit, progress
        self._done = self._least = 0
        limit.reschedule(None)

    def __call__(self, done: int, total: int, sources: int) -> None:
        self._progress(done, total, sources)
        if not sources:
            self._least = max(1, ceil(SHARE * (total - done)))
        elif done < self._done + self._least:
            return
        self._done = done
        if not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + WITHIN_S)


@dataclass(frozen=True)
class Resuming:
    """The state ``known``, of which some is on disk, and its place in the chain."""

    transport: Transport
    run: bytes
    founders: tuple[PeerId, ...]
    fragment: int
    offload: Offload
    known: StateOffer

    async def keepers(self) -> tuple[PeerId, ...]:
        """Who of those that it came from keeps the copy; asked all at once.

        Raises Silent where nobody is known to, and one of them does not answer.
        """
        silent: TransportError | None = None
        request = StateRequest(self.run, self.known.round, self.fragment, kept=True)

        async def keeps(peer: PeerId) -> bool:
            nonlocal silent
            try:
                offer = await ask(
                    self.transport, peer, "state", request, StateOffer, timeout=ANSWER_S
                )
            except TransportError as error:
                silent = error
                return False
            except ProtocolError:
                return False
            return bool(offer.digest == self.known.digest)

        peers = self.known.readers
        answers = await asyncio.gather(*map(keeps, peers))
        found = tuple(peer for peer, yes in zip(peers, answers, strict=True) if yes)
        if not found and silent is not None:
            raise Silent(str(silent))
        return found

    async def standing(self, peers: Sequence[PeerId], said: Target | None) -> ChainStanding:
        """Where in the chain the state is, as the first of ``peers`` proves that can.

        The certificate of its round names its digest. Where there is none yet, those who stand
        there have to say it (``said``), as for all who arrive now. Raises Stale; Silent where one
        of them does not answer.
        """
        silent: TransportError | TimeoutError | None = None
        for peer in peers:
            try:
                async with given_time() as shown:
                    newest, lineage = await prove(
                        self.transport,
                        peer,
                        self.run,
                        self.founders,
                        Claim(self.known.round, None, 0),
                        self.offload,
                        fragment=self.fragment,
                        shown=shown,
                    )
                head = outcome_hash(newest.outcome)
                named = await self._named(peer, head, newest.outcome.next_roster)
                if not named and (said is None or said.head != head):
                    continue
            except (TransportError, TimeoutError) as error:
                silent = error
                continue
            except RemoteProtocolError:
                continue
            return standing_after(newest, lineage)
        if silent is not None:
            raise Silent(str(silent) or "no answer in time")
        raise Stale("nobody proves that the chain leads to what is here")

    async def _named(self, peer: PeerId, head: bytes, roster: tuple[PeerId, ...]) -> bool:
        """Whether a certificate names the state; False: there is none of its round yet.

        Raises RemoteProtocolError where it names another one, or TransportError.
        """
        request = CertificateRequest(self.run, self.fragment, self.known.round, 1)
        shown = await ask(
            self.transport, peer, "certificates", request, Certificates, timeout=ANSWER_S
        )
        if not shown.certificates:
            return False
        certificate = shown.certificates[0]
        outcome = certificate.outcome
        await self.offload(
            lambda: check_certificate(certificate, run=self.run, previous=head, roster=roster)
        )
        place = outcome.fragment, outcome.round, outcome.state
        if place != (self.fragment, self.known.round, self.known.digest):
            raise Stale("its certificate names another state")
        return True
