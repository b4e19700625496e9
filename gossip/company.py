"""Who counts in one round, as one member sees it: alive, able to vote, ready, late.

The membership knows who answers; a round wants more: the same place in the chain, the process
that was there when the round began, and nobody who was found not to deliver.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from gossip.agreement import Agreement
from gossip.certificate import majority
from gossip.membership import Liveness, Membership
from gossip.validity import Place
from protocols.identity import PeerId
from protocols.messages import Announce, Plan

Clients = Callable[[Place, Sequence[PeerId]], Collection[PeerId]]
"""Which of the live islands in office train in the round at a place; the others rest."""

BELIEVED = 1 / 4  # of the plan's patience, after which whom I doubt is to blame
PASSED_OVER = 4.0  # times it, and the expected time: so long the others have to go on without me


@dataclass
class Company:
    """The members of one round."""

    agreement: Agreement
    membership: Membership
    myself: Callable[[], Announce]  # this node's own announcement as of now
    forgot: bool  # this node restarted: it may have voted in this round before
    clients: Clients | None = None  # None: all of them
    gone: set[PeerId] = field(default_factory=set)  # found not to deliver in this round
    doubts: dict[PeerId, float] = field(default_factory=dict)  # not to me, since when
    unwelcome: bool = False  # others refuse what I send: I am cut off for a reason
    stuck: bool = False  # nobody is to blame, and the plan is of no use all the same
    _incarnations: dict[PeerId, int] = field(default_factory=dict)

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
        reformed = self.agreement.promised[0] > 0
        for peer in self.agreement.office:
            if (reformed or peer == self.me or self._active(peer)) and self.alive(peer, now):
                yield peer

    def here(self, now: float) -> tuple[PeerId, ...]:
        """Those in office who are alive, whether they abstain or not."""
        return tuple(peer for peer in self.agreement.office if self.alive(peer, now))

    def majority_alive(self, now: float) -> bool:
        """Whether those in office can decide without a new epoch."""
        mute = self.forgot and self.agreement.promised[0] == 0
        needed = majority(self.agreement.office)
        voting = (peer for peer in self._able(now) if not (mute and peer == self.me))
        return sum(1 for _ in islice(voting, needed)) == needed

    def intact(self, now: float) -> bool:
        """Whether those in office can go on, so that a new epoch would be out of place.

        Standing for leader needs a majority in epoch 0, and everybody in a later one.
        """
        if self.agreement.promised[0] == 0:
            return self.majority_alive(now)
        return len(self.here(now)) == len(self.agreement.office)

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
        """Live members in office whose work this round is to have: no servers, and none at rest."""
        islands = [peer for peer in self.here(now) if self._role(peer) == "island"]
        return set(islands if self.clients is None else self.clients(self.place, islands))

    def waiting(self, now: float) -> set[PeerId]:
        """Who waits for a next round to take part: come anew, or come back."""
        here = (self.place.previous, self.place.state)
        return {
            announce.peer
            for announce in self.membership.islands_alive(now)
            if announce.status == "joining" and (announce.head, announce.state) == here
        }

    def doubt(self, peer: PeerId, now: float) -> None:
        """A peer did not deliver what the plan asked of it, to me."""
        self.doubts.setdefault(peer, now)

    def judge(self, now: float, patience: float) -> None:
        """Blame those who did not deliver to me, unless it is my own link that does not carry.

        Whoever finds most of the others at fault is at fault itself, and leaves it to them to go
        on. For that to show, doubts wait for each other a little. But all may find so at once
        (everybody's link was dark for a moment, a machine that runs them all was busy), and then
        nobody goes on. So where nobody has, though most of the others have been heard of since,
        it was nobody's fault: the plan has failed, and it is for anybody to stand. Who is silent
        still is to blame.
        """
        if not self.doubts:
            return
        if not self.isolated:
            if now >= min(self.doubts.values()) + BELIEVED * patience:
                self._blame(set(self.doubts))
            return
        if self.unwelcome:
            return
        plan, since = self.agreement.plan, self._isolated_since()
        expected = 0.0 if plan is None else plan.expected_s
        silent = {peer for peer, doubted in self.doubts.items() if not self._heard(peer, doubted)}
        if now >= since + PASSED_OVER * patience + expected and not self._most(silent):
            self.stuck = True
            self._blame(silent)

    def adopted(self, plan: Plan) -> None:
        """This is the plan by now: whoever it counts on is not found at fault yet."""
        self.gone -= {c.peer for c in plan.contributors if c.active}
        self.gone -= {p.owner for p in plan.parts if p.result is None}
        self.doubts.clear()
        self.stuck = False

    @property
    def isolated(self) -> bool:
        """Whether most of the others do not deliver to me."""
        return self._most(self.doubts)

    def _most(self, peers: Collection[PeerId]) -> bool:
        return 2 * len(peers) > len(self.agreement.office) - 1

    def _isolated_since(self) -> float:
        return sorted(self.doubts.values())[(len(self.agreement.office) - 1) // 2]

    def _heard(self, peer: PeerId, since: float) -> bool:
        island = self.membership.islands.get(peer)
        return island is not None and island.heard > since

    def _blame(self, peers: set[PeerId]) -> None:
        self.gone |= peers
        self.doubts.clear()

    def behind(self, peer: PeerId) -> bool:
        """Whether a peer has yet to come to this round, as far as it has said."""
        announce = self.membership.announcement(peer)
        return announce is not None and announce.round < self.place.round

    def working(self, now: float) -> int:
        """How many of those in office are alive and active, wherever in the chain they stand.

        Whoever hears late of the others must not take itself for all there is.
        """
        training = self.training(now)
        return sum(peer in training and peer not in self.gone for peer in self._able(now))

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

    def _active(self, peer: PeerId) -> bool:
        announce = self.membership.announcement(peer)
        return announce is not None and announce.status == "active"
