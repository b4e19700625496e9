"""Leading a round: when a plan is due, who may lead, and what a leader proposes. Sans-IO.

Every member asks most of this, whether it leads or not: whether the first plan is due, or those who
are ready wait for others; in which order members stand for leader; for how long the waits of a plan
may be. Who has come to lead also gets its plan here, by what those who promised have shown. How
plans are built is :mod:`gossip.plans.planning`; when a member stands, and when it proposes, is
:mod:`gossip.rounds.round`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gossip.membership.rumours import PAUSE_S
from gossip.membership.trips import MOST_S
from gossip.place import Place
from gossip.plans.certificate import majority
from gossip.plans.estimating import bounded, links_of, prolonged
from gossip.plans.planning import (
    Crew,
    Remains,
    fresh_plan,
    owners_among,
    renewed_plan,
    repeated_plan,
    roll_call,
)
from gossip.plans.rules import PATIENCE_S, Rules
from gossip.plans.validity import PartKey, key_of
from gossip.rounds.agreement import NONE, Agreement
from gossip.rounds.company import Company
from gossip.rounds.earlier import Earlier
from gossip.rounds.gathering import Gathering
from gossip.rounds.holding import NO_MORE, Holding
from gossip.rounds.spreading import SMALL
from protocols.bounds import MAX_PEERS, NO_BOUND
from protocols.counts import runs_of
from protocols.identity import Identity, PeerId
from protocols.messages import Announce, Outcome, PartResult, Plan, Promise

NEWS_S = 4 * PAUSE_S  # within this time a rumour reaches nearly all of a large swarm
MOST_ROLLS = 256  # from this round on, restarted members cause no roll call before a merge
ROLL_CALL_S = 1.0  # a round is open for this long before a roll is called for newcomers alone


@dataclass
class Leadership:
    """What one member of a round knows of how it is led, and would propose as its leader."""

    identity: Identity
    rules: Rules
    company: Company
    opened: float
    earlier: Earlier
    holding: Holding = field(default_factory=Holding)
    gathering: Gathering = field(default_factory=Gathering)
    lost: set[PartKey] = field(default_factory=set)  # reported as merged, but nobody has the bytes
    quorum_since: float | None = None  # enough have been ready since
    _begun: float | None = None  # when the first plan was there
    _held_by: dict[PeerId, frozenset[PartKey]] = field(default_factory=dict)  # parts each has
    _made_up: set[PeerId] = field(default_factory=set)  # who reported votes for what is lost

    @property
    def agreement(self) -> Agreement:
        return self.company.agreement

    @property
    def place(self) -> Place:
        return self.agreement.place

    def due(self, now: float) -> bool:
        """Whether a leader ought to propose the first plan now."""
        ready, late = self.company.ready_and_late(now)
        if self._roll_is_due(now, ready):
            return True
        working = self.company.working(now)
        if not ready or len(ready) < self.rules.quorum * len(working):
            self.quorum_since = None
            return False
        bound = self.rules.staleness
        awaited = working - {announce.peer for announce in ready}
        if bound != NO_BOUND and any(self.earlier.missed.get(peer, 0) >= bound for peer in awaited):
            return False  # wait for it, even if it has not announced this round yet
        if self.quorum_since is None:
            self.quorum_since = now
        if self.waits_for_others(now):
            return False
        grace = self.rules.grace_s(self.earlier.round_s)
        if len(self.agreement.roster) > SMALL:
            grace += NEWS_S  # the news that a member is ready may still be spreading
        left = self.quorum_since + grace - now
        return left <= 0 or not (
            self.company.coming(now)
            or any(self.company.eta(late_one, now) <= left * 1.25 for late_one in late)
        )

    def wanted(self, now: float) -> bool:
        """Whether there is anything to decide: somebody's work, or who is in office."""
        ready, _ = self.company.ready_and_late(now)
        return bool(ready) or self._roll_is_due(now, ready)

    def waits_for_others(self, now: float) -> bool:
        """Whether the ready wait for members that cannot catch up, or be in time, alone."""
        asks, here = self.company.asking(self.holding.awaited, now)
        for peer, seconds in self._overlooked(now).items():
            if asks.get(peer, NO_MORE) == NO_MORE:
                asks[peer] = seconds
        return self.holding.holds(asks, here, len(self.agreement.roster), now)

    def _overlooked(self, now: float) -> dict[PeerId, float]:
        """Members whose work is in no round, since results reach them last: seconds each needs.

        Where a single ready member may begin a round, and links are slower than inner steps, the
        first to have a result would otherwise begin the next round each time.
        """
        working = self.company.working(now)
        if self.rules.staleness != NO_BOUND or self.rules.quorum * MAX_PEERS > 1:
            return {}
        ready, _ = self.company.ready_and_late(now)
        asks = {}
        for peer in working - {announce.peer for announce in ready}:
            announce = self.company.membership.announcement(peer)
            if announce is None or self.earlier.missed.get(peer, 0) < len(working):
                continue
            if self.company.behind(peer):
                waits = announce.ready
            else:  # it has the result now, and is getting ready again
                eta = self.company.eta(announce, now)
                waits = peer in self.holding.awaited and eta <= self.earlier.round_s
            if waits:
                asks[peer] = self.earlier.round_s
        return asks

    def note_held(self, peer: PeerId, promise: Promise) -> None:
        """Note which merged parts a member has, by its promise to a new leader."""
        self._held_by[peer] = frozenset(key_of(result) for result in promise.held)

    def disregards(self, teller: PeerId, voted: Outcome, now: float) -> bool:
        """Whether a new leader does without the promise of ``teller``, who reports this vote.

        The leader would have to propose the vote's outcome again. But nobody was found to have the
        bytes of one of its parts, or of another part that the same owner signed, though a voter
        must have them. So the vote is made up, maybe differently each time, or the voter's link is
        dead. Not counting a promise is safe, and is done only while the others are a majority.
        """
        owners, held = {key[2] for key in self.lost}, self.agreement.held
        for result in voted.parts:
            mine = held.get(key_of(result))
            here = mine is not None and mine.digest == result.digest
            if result.digest and result.owner in owners and not here:
                self._made_up.add(teller)
        if teller not in self._made_up or self.agreement.promised[0] > 0:
            return False
        others = set(self.company.able(now)) - self._made_up
        return len(others) >= majority(self.agreement.office)

    def begun(self, now: float) -> None:
        """There is a plan: stop waiting for anybody."""
        self.holding.over(now)
        if self._begun is None:
            self._begun = now

    def spent_s(self, now: float) -> float:
        """Seconds since the first plan of the round."""
        return 0.0 if self._begun is None else now - self._begun

    def _roll_is_due(self, now: float, ready: Sequence[Announce]) -> bool:
        """Whether a round that merges nothing is to bring newcomers into office.

        Where rounds are far apart they would wait long; where only servers are in office, no
        island could ever begin; and a run's creator may wait for them.
        """
        if now < self.opened + ROLL_CALL_S:
            return False
        if self.gathering.on(self.place):
            return self.gathering.complete(self.company, now)
        waiting = self.company.waiting(now)
        if ready:
            # Each newcomer causes one roll call, so merely claiming to wait holds nobody up. But a
            # member restarted in office abstains, and the run's only merge would lack its work.
            new = waiting - set(self.agreement.roster)
            return self.rules.calls and bool(new or (waiting and self.place.round < MOST_ROLLS))
        return bool(waiting) and (self.rules.calls or not self.company.training(now))

    def compose(self, remains: Remains, now: float, patience: float) -> Plan | None:
        """What to propose as leader, given what remains of earlier plans; None: nothing yet.

        ``patience`` is that of the plan before it.
        """
        if remains.voted is not None:
            known = self.agreement.plan
            repeated = repeated_plan(self.identity, self.place, remains, patience, known)
            return prolonged(repeated, self.spent_s(now))
        if (plan := self._composed(remains, now)) is None:
            return None
        return replace(plan, servers=self.company.servers(plan.contributors))

    def _composed(self, remains: Remains, now: float) -> Plan | None:
        """A plan of my own, of which nobody has voted for another."""
        self.company.settle(now)
        gone = {
            peer
            for peer in remains.roster
            if peer in self.company.gone or not self.company.alive(peer, now)
        }
        gone |= set(self.agreement.roster) - set(remains.roster)
        next_roster = self.company.next_roster(remains.roster, remains.ballot[0] > 0, now)
        if (plan := self.agreement.plan) is not None:
            shown = [keys for peer, keys in self._held_by.items() if peer not in gone]
            at_hand = frozenset[PartKey]().union(*shown) - self.lost
            held = usable(remains.held, plan, self.agreement.held, at_hand)
            here = self._owners(remains.roster, now)
            if (trial := self.company.trial) is not None:  # else one name after the other, in vain
                here = [one for one in here if not trial.is_untried(one.peer)] or here
            owners = {one.peer for one in owners_among(here, self.rules, self.earlier.unreliable)}
            live = [peer for peer in remains.roster if peer not in gone]
            live = [peer for peer in live if peer in owners] or live
            remains = replace(remains, held=held)
            merging = [announce for announce in here if announce.peer in live]
            links = links_of(merging, set(), self.rules.believed)
            renewed = renewed_plan(
                self.identity, self.place, plan, remains, gone, live, next_roster, links
            )
            return prolonged(renewed, self.spent_s(now))
        lead = remains.lead(self.identity, self.place)
        measured = self._trips_s(self.agreement.roster, PATIENCE_S)
        ready, _ = self.company.ready_and_late(now)
        ready = [announce for announce in ready if announce.peer in remains.roster]
        if self._roll_is_due(now, ready):
            return roll_call(lead, self.rules, next_roster=next_roster, patience_s=measured)
        if not ready:
            return None
        members = self._owners(remains.roster, now)
        trips = self.company.membership.trips(announce.peer for announce in members)
        return fresh_plan(
            lead,
            self.rules,
            Crew(members, self.earlier.unreliable, self.earlier.mute, trips),
            ready=ready,
            next_roster=next_roster,
            round_s=self.earlier.round_s,
            past=self.earlier.ladder,
            patience_s=measured,
        )

    def _owners(self, roster: Sequence[PeerId], now: float) -> list[Announce]:
        """Members that can merge parts: not those that abstain, since they follow no plan."""
        here = [one for one in self.company.members(now) if one.peer in roster]
        return [one for one in here if self.company.takes_part(one.peer)] or here

    def bounded(self, plan: Plan, now: float) -> Plan:
        """The plan, with its waits limited to what I find reasonable myself."""
        heard = map(self.company.membership.announcement, plan.roster)
        members = [self.company.myself(), *(announce for announce in heard if announce is not None)]
        least = self._trips_s(plan.roster, PATIENCE_S)
        most = self._trips_s(plan.roster, MOST_S)
        rules = self.rules.at(self.place.round)
        return bounded(plan, members, rules, (least, most), self.spent_s(now))

    def _trips_s(self, roster: Sequence[PeerId], unknown: float) -> float:
        """For how long a transfer may stand still, by the round trips measured here."""
        measured = self.company.membership.stillness_s(roster, unknown)
        return max(measured, self.rules.least_patience_s)

    def leaders(self, now: float, overdue: bool) -> list[PeerId]:
        """Who can lead, in the order in which they are to stand.

        Members left out of recent rounds come last: their plans would have to be repaired. Members
        still catching up cannot lead: when the first of the others is ready they may be a moment
        behind, but not for as long as the ready wait for the late. But the member that was promised
        the lead has its turn, at fault or not: two that find each other at fault would void each
        other's plans on their way. ``overdue``: the leader has not finished its draft in time.
        """
        come = now < self.opened + self.rules.grace_s(self.earlier.round_s)
        order = [
            peer
            for peer in self.agreement.order(self.agreement.office)
            if peer not in self.company.gone
            and self.company.alive(peer, now)
            and (come or not self.company.behind(peer))
        ]
        order.sort(key=self.earlier.unreliable.__contains__)  # their plans had to be repaired
        agreement = self.agreement
        if agreement.promised > NONE:  # the current or next leader is the first to repair
            first = agreement.proposer_of(agreement.promised, agreement.office)
            if first in order:
                order.remove(first)
                order.insert(0 if first == agreement.me or not overdue else len(order), first)
            elif agreement.awaits_plan and self.company.alive(first, now):
                order.insert(0, first)
        if self.company.aside and agreement.me in order:  # I may be at fault: the others go first
            order.remove(agreement.me)
            order.append(agreement.me)
        return order


def usable(
    held: Mapping[PartKey, PartResult],
    plan: Plan,
    mine: Container[PartKey],
    at_hand: Container[PartKey],
) -> dict[PartKey, PartResult]:
    """Which of the parts reported to a new leader as merged (``held``) its plan builds on.

    Those that it holds itself (``mine``), and those that the ``plan`` it knows asks for and that
    members who deliver have (``at_hand``): everybody would wait for a part that only a member with
    a dead link has. Otherwise one member could name, for every part, bytes that it alone knows or
    that nobody gets, and no plan of the round would ever be completed.
    """
    asked = {(part.start, part.stop, part.owner) for part in plan.parts}
    most = len(plan.contributors)
    return {
        key: result
        for key, result in held.items()
        if (key in mine or (key[:3] in asked and key in at_hand))
        and all(run.stop <= most for run in runs_of(result.counts))
    }
