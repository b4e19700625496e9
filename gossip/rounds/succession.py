"""Whether a member votes for what a plan says of the members. Sans-IO.

A leader names the next roster, and that decides the next round. A leader that names whom it likes
would have the run to itself after one round for which the others have voted. So a member does not
vote for a plan that puts out of office somebody who is there, brings in somebody of whom it has
never heard, or takes in more at once than it may where strangers do (:mod:`gossip.rounds.trial`).
It does the plan's work all the same, since members hear of things at different moments. If only a
few object, the others decide and the few catch up. If most do, no transfer has to stop: the next
leader takes over what is merged, and names others. It is the same with the number of servers in
office, by which a single island's work counts for more or for less (:mod:`diloco.asynchronous`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gossip.membership.members import MEMBERS, Liveness
from gossip.rounds.agreement import Agreement
from gossip.rounds.company import Company
from protocols.identity import PeerId
from protocols.messages import Outcome, Plan

OTHERWISE = 8  # one in this many members in office a leader may see otherwise than I do
YIELDS = 8.0  # patiences: a member that objects holds a round up for this long at most


@dataclass
class Succession:
    """What one member of a round makes of the rosters that are proposed for the next one."""

    agreement: Agreement
    company: Company
    _approved: tuple[tuple[PeerId, ...], int] = ((), 0)
    _objected_at: float | None = None  # first in this round
    _waits_since: float | None = None  # for the others' votes, with all parts held
    _refused_since: float | None = None  # too many newcomers, and no plan that I bear came since

    @property
    def withheld(self) -> bool:
        """Whether I do not vote for the plan there is."""
        plan = self.agreement.plan
        return plan is not None and _members(plan) != self._approved

    def approve(self, plan: Plan) -> None:
        """I vote for the members that this names: I have named them myself."""
        self._approved = _members(plan)

    def judge(self, now: float, patience: float) -> bool:
        """Look at the plan there is once more; whether I vote for it from now on."""
        plan = self.agreement.plan
        if plan is None or not self.withheld:
            return False
        if not self.bears(plan.epoch, plan, now, patience):
            return False
        self._approved, self._waits_since, self._refused_since = _members(plan), None, None
        return True

    def bears(self, epoch: int, said: Plan | Outcome, now: float, patience: float) -> bool:
        """Whether I vote for what this says of the members, in a plan of ``epoch``.

        Always after some time (``patience``, seconds): I may be the one who is wrong, and if
        somebody has voted for it already there may be no other way on. But too many newcomers I
        bear only where I lead and have to repeat a vote for them (:meth:`has_no_choice`).
        """
        voted = self.agreement.voted
        if voted is not None and _members(voted[1]) == _members(said):
            return True
        office = self.agreement.roster
        named = set(said.next_roster)
        trial, come = self.company.trial, named.difference(office)
        if trial is not None and come and len(come) > trial.room(named.intersection(office)):
            self._refused_since = now if self._refused_since is None else self._refused_since
            return False  # all who have seen the same certificates find so
        if self._objected_at is not None and now >= self._objected_at + YIELDS * patience:
            return True
        odd = sum(not self._heard_of(peer) for peer in come) + self._miscounted(said.servers, now)
        out = [peer for peer in office if peer not in named and not self._leaves(peer, now)]
        if trial is not None:
            out = [peer for peer in out if not trial.overdue(peer, self.agreement.place.round)]
        many = False
        if epoch == 0:  # in a later one the silent are not waited for
            odd += sum(self._is_there(peer, now) for peer in out)
            many = 2 * len(out) >= len(office)  # a majority is there, or there were no plan
        if odd <= len(office) // OTHERWISE and not many:
            return True
        if self._objected_at is None:
            self._objected_at = now
        return False

    def has_no_choice(self, now: float, patience: float) -> bool:
        """Whether I have refused what takes too many in for so long that I do with such promises.

        No plan that I bear has come meanwhile, so maybe none can: those who were started again
        take others for tried who are untried, and have voted for what the rest never votes for.
        """
        return self._refused_since is not None and now >= self._refused_since + YIELDS * patience

    def in_vain(self, now: float, patience: float) -> bool:
        """Whether the others have had their time to decide on a plan that I hold all of."""
        if self._waits_since is None:
            self._waits_since = now
        return now - self._waits_since > 2 * patience

    def replanned(self) -> None:
        """There is a new plan."""
        self._waits_since = None
        if not self.withheld:
            self._refused_since = None

    def _miscounted(self, servers: int, now: float) -> int:
        """By how many members this count of servers is off; the silent may be either."""
        office = self.agreement.roster
        roles = [self.company.role(peer) for peer in office if self.company.alive(peer, now)]
        most = len(office) - roles.count("island")
        return max(0, roles.count("server") - servers, servers - most)

    def _heard_of(self, peer: PeerId) -> bool:
        announce = self.company.membership.announcement(peer)
        return peer == self.agreement.me or (announce is not None and announce.role in MEMBERS)

    def _is_there(self, peer: PeerId, now: float) -> bool:
        """Whether a member of the office is alive and votes."""
        return self.company.active(peer) and self.company.alive(peer, now)

    def _leaves(self, peer: PeerId, now: float) -> bool:
        if peer == self.agreement.me:
            return self.company.myself().status == "leaving"
        return self.company.liveness(peer, now) is Liveness.LEFT


def _members(said: Plan | Outcome) -> tuple[tuple[PeerId, ...], int]:
    """What is judged: who is in office next, and how many do not train."""
    return said.next_roster, said.servers
