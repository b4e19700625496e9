"""Whom one member counts on in a round: who is there, and delivers what the plan asks.

Who is there is :mod:`gossip.rounds.attendance`; here is who was found not to deliver.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gossip.plans.certificate import majority
from gossip.plans.planning import Ballot
from gossip.rounds.attendance import Attendance
from gossip.rounds.blame import Failure, Failures
from protocols.identity import PeerId
from protocols.messages import Announce, Plan, Suspect

BELIEVED = 1 / 4  # of the plan's patience: after that a peer that I doubt is to blame
ALONE = 1.0  # likewise, if I lead and nobody else blames it: the others may find that I am
QUIET = 1.25  # heartbeats: a peer silent for longer is hardly well, even if only I say so
PASSED_OVER = 4.0  # patiences, and the expected time, that the others have to go on without me


@dataclass
class Company(Attendance):
    """The members of one round that are there and deliver.

    A member that does not deliver is ``gone``: by what it was seen to do (``faulty``), or because
    that explains who failed whom (``blamed``). Both are forgotten when a new plan counts on it.
    """

    faulty: set[PeerId] = field(default_factory=set)  # by what they did
    blamed: set[PeerId] = field(default_factory=set)  # to explain who failed whom
    unfounded: set[PeerId] = field(default_factory=set)  # of these, for naming others without cause
    declining: set[PeerId] = field(default_factory=set)  # do not want what I send
    owners: set[PeerId] = field(default_factory=set)  # of parts, by one plan or another
    stuck: bool = False  # nobody is to blame, and the plan is of no use all the same
    failures: Failures = field(init=False)
    _isolated_since: float | None = None
    _asking: bool = False  # I lead, and doubt somebody whom nobody else does
    _led: dict[PeerId, Ballot] = field(default_factory=dict)  # first ballot of each leader

    def __post_init__(self) -> None:
        self.failures = Failures(self.me)

    @property
    def gone(self) -> set[PeerId]:
        """Members found not to deliver in this round, or already in a later epoch of it."""
        return self.faulty | self.blamed | self.agreement.beyond

    def members(self, now: float) -> list[Announce]:
        """Announcements of the live members who stand at this place of the chain, mine included."""
        here = (self.place.round, self.place.previous)
        found = []
        for peer in self.agreement.office:
            announce = self.announcement(peer)
            if (
                announce is not None
                and (announce.round, announce.head) == here
                and peer not in self.gone
                and self.alive(peer, now)
            ):
                found.append(announce)
        return found

    def ready_and_late(self, now: float) -> tuple[list[Announce], list[Announce]]:
        """Live members of the roster at this place of the chain, ready and not ready."""
        ready, late = [], []
        training = self.training(now)
        for announce in self.members(now):
            if announce.peer not in training:
                continue
            if announce.ready and announce.state == self.place.state:
                ready.append(announce)
            elif announce.status == "active":
                late.append(announce)
        return ready, late

    def working(self, now: float) -> set[PeerId]:
        """Those in office who are alive and active, wherever in the chain they stand.

        A member that hears late of the others at its place must not think that it is alone.
        """
        return self.training(now) - self.gone

    def doubt(self, peer: PeerId, now: float) -> None:
        """A peer did not deliver what the plan asked of it, to me."""
        self.failures.note(self.me, peer, now)

    def declined(self, peer: PeerId, now: float) -> None:
        """A peer refuses what I have sent: one of us is at fault, and not the link."""
        self.declining.add(peer)
        self.doubt(peer, now)

    def refused(self, peer: PeerId) -> None:
        """What a peer sent me came late or is useless: one of us may be at fault."""
        if peer != self.me:
            self.failures.hint(peer)

    def reported(self, teller: PeerId, suspect: Suspect, now: float) -> None:
        """A member tells me, as its leader or the next in the order, who does not deliver to it."""
        plan = self.agreement.plan
        if plan is None or teller not in plan.roster:
            return
        if (suspect.epoch, suspect.ballot) != (plan.epoch, plan.ballot):
            return
        for peer in suspect.peers:
            if peer in self.agreement.roster and peer not in (teller, self.me):
                self.failures.note(teller, peer, now)

    def adopted(self, plan: Plan) -> None:
        """This is the plan from now on: those it counts on are not at fault until they fail again.

        But a leader does not clear itself by making another plan.
        """
        counted = {c.peer for c in plan.contributors if c.active}
        owners = {p.owner for p in plan.parts if p.result is None}
        counted |= owners
        self.owners |= owners
        ballot = (plan.epoch, plan.ballot)
        if self._led.setdefault(plan.leader, ballot) != ballot:
            counted.discard(plan.leader)
        self.faulty -= counted
        self.blamed -= counted
        self.unfounded.clear()
        self.failures.replanned()
        self.hearing.over()
        self.stuck, self._isolated_since, self._asking = False, None, False

    def accused(self, now: float, patience: float) -> set[PeerId]:
        """Who is to be reported: all who failed me in this round, once that has settled."""
        fresh = self.failures.fresh()
        if not fresh or now < min(fresh.values()) + BELIEVED * patience:
            return set(self.faulty)
        return self.faulty | self.failures.mine().keys()

    def judge(self, now: float, patience: float) -> None:
        """Blame the fewest that explain who failed whom (:mod:`gossip.rounds.blame`).

        That a dead peer fails others needs no other explanation, unless most seem dead. If I am to
        blame, or too many are, I am not the one to say: I blame nobody, and leave it to the others
        to go on. But all may find that at once (every link was dark for a moment, or one busy
        machine runs them all), and then nobody goes on. So if nobody has, though most of the others
        have been heard of since, it was nobody's fault: the plan has failed, and anybody may stand
        for leader. Peers that are still silent are to blame.

        A leader is no judge in its own cause: peers that it alone doubts it reports to the others,
        who may know better (they gave up on what it sends itself), and acts if they do not.
        """
        if not self.failures:
            return
        found = self._culprits(now)
        if self._mine_to_say(found):
            self._isolated_since = None
            believed, self.unfounded = self.blamed & found.keys(), set()
            asking = set()
            for peer, failures in found.items():
                alone = self._leads_alone(failures, now)
                wait = (ALONE if alone else BELIEVED) * patience
                at = self.failures.certain_at(peer, failures, wait)
                if at is not None and now >= at:
                    believed.add(peer)
                elif alone:
                    asking.add(peer)
                if peer in believed and all(teller == peer for teller, _ in failures):
                    self.unfounded.add(peer)
            self.blamed, self._asking = believed, bool(asking - believed)
            return
        self._asking = False
        self.blamed, self.unfounded = set(), set()
        if self._isolated_since is None:
            self._isolated_since = now
        if self._most(self.declining):
            return  # most refuse what I send: I am cut off for a reason
        plan, doubts = self.agreement.plan, self.failures.fresh()
        expected = 0.0 if plan is None else plan.expected_s
        silent = {peer for peer, doubted in doubts.items() if not self._heard(peer, doubted)}
        over = self._isolated_since + PASSED_OVER * patience + expected
        if now >= over and not self._most(silent):
            self.stuck, self.blamed, self._isolated_since = True, silent, None
            self.failures.clear()

    def settle(self, now: float) -> None:
        """I am to make a new plan: blame those I doubt at once, though others may yet say more."""
        found = self._culprits(now)
        if self._mine_to_say(found):
            certain = self.failures.certain_at
            self.blamed |= {peer for peer, of in found.items() if certain(peer, of, 0) is not None}

    def replaceable(self, peer: PeerId, now: float) -> bool:
        """Whether a peer is at fault, for me or by the plan, and a majority is left without it."""
        out = self.gone | self._left_out()
        if peer not in out or self.agreement.promised[0] > 0:
            return False
        return sum(p not in out for p in self._able(now)) >= majority(self.agreement.office)

    @property
    def isolated(self) -> bool:
        """Whether it is me, or everybody, who does not deliver, as far as I can tell."""
        return self._isolated_since is not None

    @property
    def aside(self) -> bool:
        """Whether I leave it to others to say who does not deliver: I report, and do not stand."""
        return self.isolated or self._asking

    def _culprits(self, now: float) -> dict[PeerId, list[Failure]]:
        dead = {peer for peer in self.failures.mine() if not self.alive(peer, now)}
        return self.failures.explained(frozenset() if self._most(dead) else dead)

    def _mine_to_say(self, found: Mapping[PeerId, Sequence[Failure]]) -> bool:
        """Whether I may say that these are to blame."""
        return self.me not in found and not self._too_many(found) and not self._passed_over()

    def _leads_alone(self, failures: Sequence[Failure], now: float) -> bool:
        """Whether I lead, and nobody else names those I name, whom I hear."""
        plan = self.agreement.plan
        if plan is None or plan.leader != self.me:
            return False
        audible = now - QUIET * self.membership.patience.heartbeat_s
        return all(by == self.me and self._heard(peer, audible) for by, peer in failures)

    def _passed_over(self) -> bool:
        """Whether the plan already counts me as at fault."""
        return self.me in self._left_out()

    def _left_out(self) -> set[PeerId]:
        """Contributors that the maker of the plan found at fault."""
        plan = self.agreement.plan
        return set() if plan is None else {c.peer for c in plan.contributors if not c.active}

    def _most(self, peers: Collection[PeerId]) -> bool:
        return 2 * len(peers) > len(self.agreement.office) - 1

    def _too_many(self, found: Mapping[PeerId, Sequence[Failure]]) -> bool:
        """Whether too many seem at fault, so that the cause must be something else.

        Half of all is not too many, if each of them has failed more than one.
        """
        if 2 * len(found) != len(self.agreement.office):
            return 2 * len(found) > len(self.agreement.office)
        return any(len({t for t, named in of if named == p}) < 2 for p, of in found.items())

    def _heard(self, peer: PeerId, since: float) -> bool:
        island = self.membership.islands.get(peer)
        return island is not None and island.heard > since
