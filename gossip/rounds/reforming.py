"""When, and with whom, a round goes on without a majority of its roster. Sans-IO.

If a majority is gone for good, no plan can succeed. The survivors then open a new epoch, in which
they are the roster.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossip.plans.rules import Rules
from gossip.rounds.company import Company
from gossip.rounds.election_timer import ElectionTimer
from gossip.rounds.leadership import Leadership
from protocols.identity import PeerId

ALONE_AFTER_S = 30.0  # below quorum for this long: go on with whoever is there


@dataclass
class Reforming:
    """The way of one member into a new epoch: all who are left promise it, and are its roster."""

    company: Company
    leadership: Leadership
    rules: Rules
    election: ElectionTimer

    def awaits_votes(self, now: float) -> bool:
        """Whether those who are missing for a majority are on their way here, and waited for."""
        if self.company.agreement.plan is not None or not self.company.ready_and_late(now)[0]:
            return False
        return self.leadership.waits_for_others(now)

    def survivors(self, now: float, patience: float) -> tuple[PeerId, ...] | None:
        """With whom to go on, once it is certain enough that the rest is gone, in my turn."""
        lost_for, agreement = self.election.lost_for(now), self.company.agreement
        # of the roster that formed, not of one only asked for, which shrinks with each lost member
        staying = len(agreement.formed) - len(self.company.left(now))
        alive = self.company.able(now)
        enough = len(alive) >= self.rules.quorum * staying
        if not enough and len(self.company.here(now)) >= self.rules.quorum * staying:
            alive, enough = self.company.here(now), True  # most have restarted: all together
        if lost_for < (patience if enough else ALONE_AFTER_S):
            return None
        if agreement.plan is None and not self.leadership.wanted(now):
            return None  # nobody has anything to contribute yet
        # those who abstain have their turn as well: two must not go on alone at once
        order = agreement.order(agreement.office)
        turn = [peer for peer in order if self.company.alive(peer, now)].index(agreement.me)
        return alive if self.election.my_turn_to_reform(turn, now, patience) else None
