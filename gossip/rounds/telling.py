"""Whom a member tells of plans and votes: everybody, or in a large roster a few. Sans-IO.

With up to :data:`~gossip.rounds.spreading.SMALL` members a plan goes from the leader to all, and a
vote from each to all: nothing is quicker, and it depends on nobody. With more that would be N²
votes, each a signature that all have to verify. There the first :data:`STANDBY` of the leading
order, and the leader if it is another, collect the votes. The first of these who is alive tells
everybody what they come to; plans and collected votes go over two hops
(:mod:`gossip.rounds.spreading`). If the leader dies before it has told, those who know are ahead of
the rest, which catches up with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from gossip.rounds.agreement import Agreement
from gossip.rounds.company import Company
from gossip.rounds.instructions import Broadcast, Instruction, Send
from gossip.rounds.spreading import SMALL
from protocols.identity import PeerId
from protocols.messages import Plan, Suspect, Vote, Votes

STANDBY = 2  # of the leading order, who are quick and collect votes in a large roster
UNHURRIED_S = 0.2  # how often the others look at what has come in


@dataclass
class Telling:
    """What one member of a round tells the others."""

    agreement: Agreement
    company: Company

    _told: frozenset[PeerId] = frozenset()  # who does not deliver, under this plan

    def __post_init__(self) -> None:
        self._first = self.agreement.order(self.agreement.roster)[:STANDBY]

    @property
    def large(self) -> bool:
        """Whether those in office are too many for everybody to tell everybody."""
        return len(self.agreement.office) > SMALL

    def unhurried_s(self) -> float:
        """How long I may let news pile up before I look at them.

        In a large roster looking costs time, and a member far from leading need not be quick.
        """
        leads = self.agreement.plan is None and self.agreement.me in self._first
        return UNHURRIED_S if self.large and not leads else 0.0

    def all(self, message: Plan | Votes) -> list[Instruction]:
        """Tell everybody in office."""
        others = tuple(peer for peer in self.agreement.office if peer != self.agreement.me)
        return [Broadcast(others, message)] if others else []

    def replanned(self) -> None:
        """There is a new plan, whose leader may have heard no reports yet."""
        self._told = frozenset()

    def suspects(
        self, accused: Set[PeerId], leaders: Callable[[], Sequence[PeerId]]
    ) -> list[Instruction]:
        """Report all who do not deliver, if there are new ones, to the member that has to act.

        Not only the new ones: the next to lead has not heard of those before.
        """
        plan, me = self.agreement.plan, self.agreement.me
        if plan is None or accused <= self._told:
            return []
        to = next((peer for peer in leaders() if peer not in accused), me)
        if to == me:
            return []
        self._told = frozenset(accused)
        peers = tuple(sorted(accused))
        return [Send(to, Suspect(plan.fragment, plan.round, plan.epoch, plan.ballot, peers))]

    def vote(self, vote: Vote) -> list[Instruction]:
        """Bring my vote to those who count."""
        return [Send(peer, vote) for peer in self._collectors() if peer != self.agreement.me]

    def decided(self, now: float) -> list[Instruction]:
        """The round is decided here: send the votes to a large roster, if that is my task."""
        votes = self.agreement.collected()
        if votes is None or not self.large:
            return []
        alive = (peer for peer in self._collectors() if self.company.alive(peer, now))
        return self.all(votes) if next(alive, None) == self.agreement.me else []

    def awaited(self, head: bytes, voted_at: float, now: float, patience: float) -> bool:
        """Whether a peer at ``head`` stands where I will, once the votes for it are here."""
        return self.large and self.agreement.voted_for(head) and now < voted_at + patience

    def _collectors(self) -> Sequence[PeerId]:
        plan, office = self.agreement.plan, self.agreement.office
        if plan is None or not self.large:
            return office
        return list(dict.fromkeys([plan.leader, *self.agreement.order(office)[:STANDBY]]))
