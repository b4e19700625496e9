"""Watching over a draft until its leader makes the final plan of it. Sans-IO.

Nobody votes for a draft (:mod:`gossip.plans.weighing`), so one that never becomes a plan would hold
up a round for good. Its leader gathers the inner products of all parts; everybody watches the
clock.

An owner that says that slices have not come leaves their contributors out of the round. Each slice
that is missing is a failed transfer, and so the blame goes to the fewest members that explain all
of them (:mod:`gossip.rounds.blame`). If an owner is among these its part goes to another one, by a
new draft. So no more are left out than there are members who lie or do not deliver.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossip.plans.mix import Mix
from gossip.plans.weighing import Products
from gossip.rounds.agreement import Agreement
from gossip.rounds.blame import Failures
from gossip.rounds.company import Company
from protocols.identity import PeerId
from protocols.messages import Gram, Plan

DRAFT_PATIENCE = 4.0  # times a draft's patience and expected time: then its owners are overdue
LEADER_PATIENCE = 1.5  # times that: then its leader is overdue
ALL_DRAFTS = 2.0  # times a leader's first limit: then it is overdue, however often it drafts anew


@dataclass
class Drafting:
    """The draft that this member works by, if any, and the draft that it leads itself."""

    agreement: Agreement
    mix: Mix
    _products: Products | None = None  # of my own draft
    _due: float = 0.0  # when the draft's owners and leader should have done their part
    _until: dict[PeerId, float] = field(default_factory=dict)  # when a leader has drafted enough
    _absences: Failures = field(init=False)  # slices that were missing in drafts of mine

    def __post_init__(self) -> None:
        self._absences = Failures(self.agreement.me)

    def lead(self, plan: Plan) -> None:
        """I propose this plan."""
        self._products = Products(plan, self.agreement.place.run, self.mix) if plan.draft else None

    def adopted(self, plan: Plan, now: float) -> None:
        """This is the plan to work by from now on.

        A renewed draft gets as much time again as the round has lasted, but with a limit: else a
        leader that lets its drafts fail could hold a round up for many times longer with each.
        """
        due = DRAFT_PATIENCE * (plan.expected_s + plan.patience_s)
        self._due = now + due
        if plan.draft and plan.leader != self.agreement.me:
            due *= LEADER_PATIENCE
            until = self._until.setdefault(plan.leader, now + ALL_DRAFTS * due)
            self._due = min(now + due, until)

    def add(self, sender: PeerId, gram: Gram) -> Plan | None:
        """Take the inner products of an owner's part; returns the final plan once all are here.

        None also where I lead no draft, or somebody else leads by now. Raises RemoteProtocolError
        for products that are not possible.
        """
        plan = self.agreement.plan
        if self._products is None or plan is None or plan != self._products.draft:
            return None
        if self.agreement.promised > (plan.epoch, plan.ballot):
            return None
        return self._products.add(sender, gram)

    def at_fault(self, company: Company, now: float) -> set[PeerId]:
        """Owners to blame for slices missing from my draft, once all its products are here.

        That slices of members that are gone are missing needs no explanation. If half of all would
        be at fault, the cause is something else, and I go on with what has come.
        """
        if self._products is None:
            return set()
        for owner, contributor in self._products.absences():
            self._absences.note(owner, contributor, now)
        peers, gone = self.agreement.roster, company.gone
        silent = {peer for peer in peers if peer in gone or not company.alive(peer, now)}
        found = self._absences.explained(silent)
        tellers = {peer for peer, of in found.items() if any(by == peer for by, _ in of)}
        draft, me = self._products.draft, self.agreement.me
        if 2 * len(tellers) >= len(draft.roster):
            return set()
        return tellers.intersection(part.owner for part in draft.parts) - {me}

    def overdue(self, now: float) -> bool:
        """Whether the draft that I work by should have become a plan by now."""
        agreement = self.agreement
        plan = agreement.plan
        mine = plan is not None and agreement.promised == (plan.epoch, plan.ballot) and plan.draft
        return mine and now > self._due

    def silent(self, now: float) -> set[PeerId]:
        """Owners to blame for a draft of mine that is overdue."""
        if self._products is None or not self.overdue(now):
            return set()
        return self._products.silent() - {self.agreement.me}
