"""Whether a round's plan can still be completed, or somebody has to make a new one. Sans-IO.

Each member judges it by what it holds, and by who seems to be at fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossip.plans.validity import PartKey, key_of
from gossip.rounds.agreement import Agreement
from gossip.rounds.company import Company
from gossip.rounds.drafting import Drafting
from gossip.rounds.succession import Succession
from protocols.messages import Plan


@dataclass
class Prospects:
    """How one member sees the plan that it works by."""

    agreement: Agreement
    company: Company
    drafting: Drafting
    succession: Succession
    lost: set[PartKey] = field(default_factory=set)  # merged parts of it that nobody has

    def failed(self, plan: Plan, voted_at: float, patience: float, now: float) -> bool:
        """Whether a leader ought to do something about the plan; ``voted_at``: when I have voted,
        if I have."""
        if self.agreement.awaits_plan:
            return True
        if not self.agreement.missing():  # all is held and voted for: votes may have been lost
            return self._is_undecided(plan, voted_at, patience, now)
        if self.company.stuck or self._cannot_complete(plan, now):
            return True
        return plan.draft and self._stands_still(plan, now)

    def _is_undecided(self, plan: Plan, voted_at: float, patience: float, now: float) -> bool:
        """Whether the votes for a plan that I hold all of should have come by now.

        If I withhold mine, the leader is at fault: the next roster it named finds no majority.
        """
        if not self.succession.withheld:
            return now - voted_at > 2 * patience
        if not self.succession.in_vain(now, patience):
            return False
        self.company.faulty.add(plan.leader)
        return True

    def doubt_candidate(self, now: float) -> None:
        """Doubt a candidate that had my promise to repair a plan, and has not done so."""
        plan, (epoch, number) = self.agreement.plan, self.agreement.promised
        if plan is not None and (epoch, number) > (plan.epoch, plan.ballot):
            candidate = self.agreement.proposer_of((epoch, number), self.agreement.office)
            if candidate != self.agreement.me:
                self.company.doubt(candidate, now)

    def _stands_still(self, draft: Plan, now: float) -> bool:
        """Whether nobody will make a plan of a draft: its leader is gone, or it takes too long.

        The leader finds a draft overdue before the others do, and knows whom to blame. If it does
        not act, it is at fault itself: it could hold the round up with its next draft as well.
        """
        if draft.leader in self.company.gone or not self.company.alive(draft.leader, now):
            return True
        self.company.faulty |= self.drafting.silent(now)
        if not self.drafting.overdue(now):
            return False
        if draft.leader != self.agreement.me:
            self.company.faulty.add(draft.leader)
        return True

    def _cannot_complete(self, plan: Plan, now: float) -> bool:
        """Whether an open part of the plan waits for somebody, or something, that is gone.

        Or the plan counts on a member that blames others without cause, and has to be told.
        """
        unfounded = self.company.unfounded
        if unfounded and any(c.active and c.peer in unfounded for c in plan.contributors):
            return True
        for _, _, owner, fixed in self.agreement.missing():
            if fixed is not None:
                if key_of(fixed) in self.lost:
                    return True
            elif owner in self.company.gone or not self.company.alive(owner, now):
                return True
        return False
