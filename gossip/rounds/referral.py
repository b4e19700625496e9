"""Being shown a certificate of the round under way: others have decided it already. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass

from gossip.place import Place
from gossip.plans.certificate import check_certificate
from gossip.plans.validity import Shape, check_outcome
from gossip.rounds.instructions import CatchUp, Instruction
from protocols.identity import PeerId
from protocols.messages import Certificate


@dataclass
class Referral:
    """Takes certificates of the round at ``place``, which ``roster`` decides."""

    place: Place
    shape: Shape
    roster: tuple[PeerId, ...]
    _at: float | None = None  # when one was last pointed out to us

    def shown(
        self, sender: PeerId, certificate: Certificate, now: float, patience: float
    ) -> list[Instruction]:
        """A peer shows one: verify it, then catch up with its voters.

        Raises RemoteProtocolError.
        """
        if self._at is not None and now < self._at + patience:
            return []  # one is enough, and verifying is not for free
        place = self.place
        check_certificate(certificate, run=place.run, previous=place.previous, roster=self.roster)
        check_outcome(certificate.outcome, place, self.shape, self.roster)
        self._at = now
        return [CatchUp((sender, *(vote.voter for vote in certificate.votes)))]
