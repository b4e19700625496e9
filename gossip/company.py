"""Who counts in one round, as one member sees it: alive, able to vote, ready, late.

The membership knows who answers; a round wants more: the same place in the chain, the process
that was there when the round began, and nobody who was found not to deliver.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from gossip.agreed import Ballot
from gossip.agreement import Agreement
from gossip.blame import Failure, Failures
from gossip.certificate import majority
from gossip.holding import NO_MORE
from gossip.membership import Liveness, Membership
from gossip.validity import Place
from protocols.identity import PeerId
from protocols.messages import Announce, Plan

Clients = Callable[[Place, Sequence[PeerId]], Collection[PeerId]]
"""Which of the live islands in office train in the round at a place; the others rest."""

BELIEVED = 1 / 4  # of the plan's patience, after which whom I doubt is to blame
ALONE = 1.0  # likewise, if I lead and nobody else has said so: it may be me, as others see it
QUIET = 1.25  # heartbeats: who has been silent for so long is hardly well, whoever else says so
PASSED_OVER = 4.0  # times it, and the expected time: so long the others have to go on without me


@dataclass
class Company:
    """The members of one round.

    Who does not deliver in it is ``gone``: by what was seen of it (``known``) or because it
    explains who failed whom (``blamed``). Both are forgotten when a new plan counts on it.
    """

    agreement: Agreement
    membership: Membership
    myself: Callable[[], Announce]  # this node's own announcement as of now
    forgot: bool  # this node restarted: it may have voted in this round before
    clients: Clients | None = None  # None: all of them
    known: set[PeerId] = field(default_factory=set)  # to be at fault, by what they did
    blamed: set[PeerId] = field(default_factory=set)  # by who failed whom
    unfounded: set[PeerId] = field(default_factory=set)  # of these, for naming others without cause
    declining: set[PeerId] = field(default_factory=set)  # do not want what I send
    owners: set[PeerId] = field(default_factory=set)  # of parts, by one plan or another
    stuck: bool = False  # nobody is to blame, and the plan is of no use all the same
    failures: Failures = field(init=False)
    _isolated_since: float | None = None
    _asking: bool = False  # I lead, and doubt somebody whom nobody else does
    _incarnations: dict[PeerId, int] = field(default_factory=dict)
    _led: dict[PeerId, Ballot] = field(default_factory=dict)  # by whose plans I went: the first

    def __post_init__(self) -> None:
        self.failures = Failures(self.me)

    @property
    def me(self) -> PeerId:
        return self.agreement.me

    @property
    def place(self) -> Place:
        return self.agreement.place

    def liveness(self, peer: PeerId, now: float) -> Liveness:
        """As the membership sees it; who restarted during this round is out of it for good.

        A restarted process has forgotten what it promised, so it must not be counted on: unless it
        is active again, since it has on record that it promised nothing (:mod:`gossip.promises`).
        """
        island = self.membership.islands.get(peer)
        if island is None:
            return self.membership.liveness(peer, now)
        incarnation = island.announce.incarnation
        if island.announce.status == "active":
            self._incarnations[peer] = incarnation
        elif island.announce.status != "leaving":
            known = self._incarnations.setdefault(peer, incarnation)
            if incarnation != known:
                return Liveness.DEAD
        return island.liveness(now, self.membership.patience)

    def alive(self, peer: PeerId, now: float) -> bool:
        """Whether a peer answers, and has done so since the round began."""
        return self.liveness(peer, now) is Liveness.ALIVE

    def able(self, now: float) -> tuple[PeerId, ...]:
        """Those in office who are alive and vote.

        A joining member abstains in epoch 0; whoever is in a later epoch's roster has promised.
        """
        return tuple(self._able(now))

    def _able(self, now: float) -> Iterator[PeerId]:
        for peer in self.agreement.office:
            if self._takes_part(peer) and self.alive(peer, now):
                yield peer

    def _takes_part(self, peer: PeerId) -> bool:
        return self.agreement.promised[0] > 0 or peer == self.me or self.active(peer)

    def here(self, now: float) -> tuple[PeerId, ...]:
        """Those in office who are alive, whether they abstain or not."""
        return tuple(peer for peer in self.agreement.office if self.alive(peer, now))

    def majority_alive(self, now: float) -> bool:
        """Whether those in office can decide without a new epoch."""
        mute = self.forgot and self.agreement.promised[0] == 0
        needed, out = majority(self.agreement.office), self.agreement.beyond
        if mute:
            out.add(self.me)
        voting = (peer for peer in self._able(now) if peer not in out)
        return sum(1 for _ in islice(voting, needed)) == needed

    def intact(self, now: float) -> bool:
        """Whether those in office can go on, so that a new epoch would be out of place.

        Standing for leader needs a majority in epoch 0, and everybody in a later one.
        """
        if self.agreement.promised[0] == 0:
            return self.majority_alive(now)
        return len(self.here(now)) == len(self.agreement.office) and not self.agreement.beyond

    def left(self, now: float) -> list[PeerId]:
        """Those of the roster that has come about who have said farewell."""
        return [p for p in self.agreement.formed if self.liveness(p, now) is Liveness.LEFT]

    def members(self, now: float) -> list[Announce]:
        """Announcements of the live members who stand at this place of the chain, mine included."""
        here = (self.place.round, self.place.previous)
        found = []
        for peer in self.agreement.office:
            announce = self.myself() if peer == self.me else self.membership.announcement(peer)
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

    def training(self, now: float) -> set[PeerId]:
        """Live members in office whose work this round is to have: no servers, and none at rest.

        Nor who abstains: it goes by no plan, and would be waited for.
        """
        islands = [peer for peer in self._able(now) if self._role(peer) == "island"]
        return set(islands if self.clients is None else self.clients(self.place, islands))

    def waiting(self, now: float) -> set[PeerId]:
        """Who waits for a next round to take part: come anew, or come back."""
        here = (self.place.previous, self.place.state)
        return {
            announce.peer
            for announce in self.membership.islands_alive(now)
            if announce.status == "joining" and (announce.head, announce.state) == here
        }

    def asking(
        self, awaited: Container[PeerId], now: float
    ) -> tuple[dict[PeerId, float], set[PeerId]]:
        """Who cannot catch up by itself: how many seconds each needs, and who is here by now.

        Where a majority is there, who is in office is waited for until it is ready, and not before
        it trains; where there is none, for its vote.
        """
        asks: dict[PeerId, float] = {}
        here: set[PeerId] = set()
        concerned = [
            announce
            for announce in self.membership.islands_alive(now)
            if announce.behind_s > 0 or announce.peer in awaited
        ]
        if not concerned:
            return asks, here
        working = self.training(now) if self.majority_alive(now) else set[PeerId]()
        place = (self.place.previous, self.place.state)
        for announce in concerned:
            peer = announce.peer
            eta = self.eta(announce, now) if peer in working and not announce.ready else 0.0
            if (announce.head, announce.state) == place:
                here.add(peer)
                if peer in awaited and eta:
                    asks[peer] = eta
            elif announce.behind_s > 0 and announce.round <= self.place.round:
                asks[peer] = eta + self.membership.left(peer, announce.behind_s, now)
            elif peer in awaited and announce.round < self.place.round:
                asks[peer] = NO_MORE  # it stands where it knew the others to be
        return asks, here

    def doubt(self, peer: PeerId, now: float) -> None:
        """A peer did not deliver what the plan asked of it, to me."""
        self.failures.note(self.me, peer, now)

    def declined(self, peer: PeerId, now: float) -> None:
        """A peer does not want what I have sent: one of us is at fault, and not the link."""
        self.declining.add(peer)
        self.doubt(peer, now)

    def refused(self, peer: PeerId) -> None:
        """What a peer brings me is late, or of no use: one of us may be at fault."""
        if peer != self.me:
            self.failures.hint(peer)

    def replaceable(self, peer: PeerId, now: float) -> bool:
        """Whether a peer is at fault, for me or by the plan, and the others are enough."""
        out = self.gone | self._left_out()
        if peer not in out or self.agreement.promised[0] > 0:
            return False
        return sum(p not in out for p in self._able(now)) >= majority(self.agreement.office)

    def told(self, teller: PeerId, peers: Collection[PeerId], now: float) -> None:
        """Another member says who did not deliver to it in this round."""
        for peer in peers:
            if peer in self.agreement.roster and peer not in (teller, self.me):
                self.failures.note(teller, peer, now)

    def judge(self, now: float, patience: float) -> None:
        """Blame the fewest that explain who failed whom (:mod:`gossip.blame`).

        That a dead one fails somebody says all, unless most of the others seem dead. If I am to
        blame, or too many are, I am not the one to say: I blame nobody, and leave it to the others
        to go on. But all may find so at once (everybody's link was dark for a moment, a machine
        that runs them all was busy), and then nobody goes on. So where nobody has, though most of
        the others have been heard of since, it was nobody's fault: the plan has
        failed, and it is for anybody to stand. Who is silent still is to blame.

        A leader is no judge in its own cause: whom it alone doubts it tells the others of, who may
        know better (they have given up on what it sends itself), and acts if they do not.
        """
        if not self.failures:
            self._asking = False
            return
        found = self._found(now)
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
            return  # cut off for a reason
        plan, doubts = self.agreement.plan, self.failures.fresh()
        expected = 0.0 if plan is None else plan.expected_s
        silent = {peer for peer, doubted in doubts.items() if not self._heard(peer, doubted)}
        over = self._isolated_since + PASSED_OVER * patience + expected
        if now >= over and not self._most(silent):
            self.stuck, self.blamed, self._isolated_since = True, silent, None
            self.failures.clear()

    def settle(self, now: float) -> None:
        """I am to plan anew: whom I doubt is to blame at once, though others may yet say more."""
        found = self._found(now)
        if self._mine_to_say(found):
            certain = self.failures.certain_at
            self.blamed |= {peer for peer, of in found.items() if certain(peer, of, 0) is not None}

    def _found(self, now: float) -> dict[PeerId, list[Failure]]:
        dead = {peer for peer in self.failures.mine() if not self.alive(peer, now)}
        return self.failures.explained(frozenset() if self._most(dead) else dead)

    def _mine_to_say(self, found: Mapping[PeerId, Sequence[Failure]]) -> bool:
        """Whether I am the one to say that it is these."""
        return self.me not in found and not self._too_many(found) and not self._passed_over()

    def _leads_alone(self, failures: Sequence[Failure], now: float) -> bool:
        """Whether I lead and nobody else names whom I name and hear, though there are others."""
        plan = self.agreement.plan
        if plan is None or plan.leader != self.me or len(self.agreement.office) < 3:
            return False
        audible = now - QUIET * self.membership.patience.heartbeat_s
        return all(by == self.me and self._heard(peer, audible) for by, peer in failures)

    def accused(self, now: float, patience: float) -> set[PeerId]:
        """Who is to be reported: all who failed me in this round, once that has settled."""
        fresh = self.failures.fresh()
        if not fresh or now < min(fresh.values()) + BELIEVED * patience:
            return set(self.known)
        return self.known | self.failures.mine().keys()

    def adopted(self, plan: Plan) -> None:
        """This is the plan by now: whoever it counts on is not found at fault yet.

        But nobody clears itself by planning once more.
        """
        counted = {c.peer for c in plan.contributors if c.active}
        owners = {p.owner for p in plan.parts if p.result is None}
        counted |= owners
        self.owners |= owners
        ballot = (plan.epoch, plan.ballot)
        if self._led.setdefault(plan.leader, ballot) != ballot:
            counted.discard(plan.leader)
        self.known -= counted
        self.blamed -= counted
        self.unfounded.clear()
        self.failures.replanned()
        self.stuck, self._isolated_since, self._asking = False, None, False

    @property
    def gone(self) -> set[PeerId]:
        """Who is found not to deliver in this round, or is in a later epoch of it."""
        return self.known | self.blamed | self.agreement.beyond

    @property
    def isolated(self) -> bool:
        """Whether it is me, or everybody, who does not deliver, as far as I can tell."""
        return self._isolated_since is not None

    @property
    def aside(self) -> bool:
        """Whether others are to say first who does not deliver: I tell them, and do not stand."""
        return self.isolated or self._asking

    def _passed_over(self) -> bool:
        """Whether others have found already that it is me."""
        return self.me in self._left_out()

    def _left_out(self) -> set[PeerId]:
        """Who was found at fault by whoever has made the plan."""
        plan = self.agreement.plan
        return set() if plan is None else {c.peer for c in plan.contributors if not c.active}

    def _most(self, peers: Collection[PeerId]) -> bool:
        return 2 * len(peers) > len(self.agreement.office) - 1

    def _too_many(self, found: Mapping[PeerId, Sequence[Failure]]) -> bool:
        """Whether so many are at fault that something else is.

        Half of all is not too many, where each of them has failed more than one.
        """
        if 2 * len(found) != len(self.agreement.office):
            return 2 * len(found) > len(self.agreement.office)
        return any(len({t for t, named in of if named == p}) < 2 for p, of in found.items())

    def _heard(self, peer: PeerId, since: float) -> bool:
        island = self.membership.islands.get(peer)
        return island is not None and island.heard > since

    def behind(self, peer: PeerId) -> bool:
        """Whether a peer has yet to come to this round, as far as it has said."""
        announce = self.membership.announcement(peer)
        return announce is not None and announce.round < self.place.round

    def working(self, now: float) -> set[PeerId]:
        """Those in office who are alive and active, wherever in the chain they stand.

        Whoever hears late of the others must not take itself for all there is.
        """
        return self.training(now) - self.gone

    def eta(self, announce: Announce, now: float) -> float:
        """Seconds until this member is ready."""
        mine = announce.peer == self.me
        return announce.eta if mine else self.membership.eta(announce.peer, now)

    def next_roster(self, roster: tuple[PeerId, ...], reformed: bool, now: float) -> set[PeerId]:
        """Who decides the next round: the old ones but for the dead, and those who joined.

        Where the roster was ``reformed``, the silent are not waited for either.
        """
        staying = (Liveness.ALIVE,) if reformed else (Liveness.ALIVE, Liveness.SUSPECT)
        stay = {peer for peer in roster if self.liveness(peer, now) in staying}
        newcomers = {
            announce.peer
            for announce in self.membership.islands_alive(now)
            if announce.peer not in stay
            and announce.head == self.place.previous
            and announce.state == self.place.state
        }
        if self.myself().status == "leaving":
            stay.discard(self.me)
        return (stay | newcomers) or {self.me}

    def _role(self, peer: PeerId) -> str:
        announce = self.myself() if peer == self.me else self.membership.announcement(peer)
        return "island" if announce is None else announce.role

    def active(self, peer: PeerId) -> bool:
        """Whether a peer takes part in deciding, by its own word."""
        announce = self.myself() if peer == self.me else self.membership.announcement(peer)
        return announce is not None and announce.status == "active"
