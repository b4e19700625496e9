"""Whether a member of a round accepts another one as its leader. Sans-IO.

A new ballot ends the work under the last one, so a member that comes up with one after the other
would end every round. This is checked when a candidate asks for a promise, and also when a plan
just arrives: nobody has to be asked before somebody plans (a majority of the others may have
promised, and the question got lost).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossip.plans.planning import Ballot
from gossip.rounds.agreement import Agreement
from gossip.rounds.company import Company
from protocols.errors import RemoteRefused
from protocols.identity import PeerId

AT_ONCE = 3  # ballots of one member in a round: others may die, one after the other, as it leads
SPACING = 4.0  # times: the wait for each further ballot over the wait for the one before


@dataclass
class Candidacies:
    """The ballots of one round that one member has followed others into."""

    agreement: Agreement
    company: Company
    _followed: dict[PeerId, list[float]] = field(default_factory=dict)  # when

    def check(self, peer: PeerId, ballot: Ballot, now: float, patience: float) -> None:
        """Whether a peer may lead under a ballot, as far as I see. Raises RemoteRefused.

        The fourth ballot of one member in a round comes a ``patience`` (seconds) after its first at
        the earliest, the next after four patiences, and so on. Renewed plans have twice the time
        of those before them, so honest repairs are slower; a quicker leader is at fault.
        """
        reached = self.agreement.promised
        if ballot[0] > reached[0] and self.company.intact(now):
            raise RemoteRefused("majority-alive", "no reason to reform the roster")
        if ballot[0] == 0 and self.company.replaceable(peer, now):
            # else it would void every plan that others make without it, as soon as it is there
            raise RemoteRefused("doubted", "it does not deliver in this round")
        followed = self._followed.get(peer, [])
        more = len(followed) - AT_ONCE
        if ballot > reached and more >= 0 and now < followed[0] + patience * SPACING**more:
            self.company.faulty.add(peer)
            raise RemoteRefused("doubted", "it voids one plan after the other")

    def followed(self, peer: PeerId, before: Ballot, now: float) -> None:
        """Count it if I follow a peer from ``before`` into a ballot of its own."""
        if self.agreement.promised > before:
            self._followed.setdefault(peer, []).append(now)
