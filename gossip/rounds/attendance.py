"""Who is there in one round, as one member sees it: alive, able to vote, on the way.

The membership knows which nodes answer. A round needs more: that a node stands at the same place in
the chain, and that it is still the process that was there when the round began.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from gossip.membership.members import THERE, Liveness, Membership
from gossip.place import Place
from gossip.plans.certificate import majority
from gossip.plans.rules import Clients
from gossip.rounds.agreement import Agreement
from gossip.rounds.hearing import IN_VAIN, Hearing
from gossip.rounds.holding import NO_MORE
from gossip.rounds.trial import Trial
from protocols.identity import PeerId
from protocols.messages import Announce, Contributor


@dataclass
class Attendance:
    """The members of one round, by what they say of themselves and whether they answer."""

    agreement: Agreement
    membership: Membership
    myself: Callable[[], Announce]  # this node's own announcement as of now
    forgot: bool  # this node restarted: it may have voted in this round before
    clients: Clients | None = None  # None: all of them
    trial: Trial | None = field(default=None, kw_only=True)  # None: whoever comes is in office
    hearing: Hearing = field(default_factory=Hearing, kw_only=True)
    _incarnations: dict[PeerId, int] = field(default_factory=dict, kw_only=True)

    @property
    def me(self) -> PeerId:
        return self.agreement.me

    @property
    def place(self) -> Place:
        return self.agreement.place

    def announcement(self, peer: PeerId) -> Announce | None:
        """The newest announcement of a peer, or of this node itself."""
        return self.myself() if peer == self.me else self.membership.announcement(peer)

    def liveness(self, peer: PeerId, now: float) -> Liveness:
        """As the membership sees it, but a peer that restarted during this round is dead in it.

        A restarted process has forgotten what it promised, so it must not be counted on: unless it
        is active again, since it has on record that it promised nothing
        (:mod:`gossip.chain.promises`).
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

    def asks(self, peers: Iterable[PeerId], now: float) -> None:
        """I stand for leader, and ask these for their promise.

        Who abstains or is behind has a reason to be silent. Where no strangers come, somebody
        admitted that says nothing has a fault that its people mend. They are waited for as ever.
        """
        if self.trial is not None:
            others = [peer for peer in peers if peer != self.me and self.takes_part(peer)]
            here = (peer for peer in others if self._stands_here(peer) and self.alive(peer, now))
            self.hearing.ask(here, now)

    def listen(self, now: float, patience: float) -> None:
        """Find out who is mute: never those who go on elsewhere, as I may be the one cut off.

        Nor sooner than the silent are dead: who promises writes it down first, and disks stall.
        """
        long = max(IN_VAIN * patience, self.membership.patience.dead_floor_s)
        silent = self.hearing.silent(now - long)
        self.hearing.mute = {peer for peer in silent if self._stands_here(peer)}

    def _stands_here(self, peer: PeerId) -> bool:
        said, place = self.membership.announcement(peer), self.place
        return said is not None and (said.round, said.head) == (place.round, place.previous)

    def able(self, now: float) -> tuple[PeerId, ...]:
        """Those in office who are alive and vote, except the mute (:mod:`gossip.rounds.hearing`).

        A joining member abstains in epoch 0; whoever is in a later epoch's roster has promised.
        """
        return tuple(self._able(now))

    def _able(self, now: float) -> Iterator[PeerId]:
        for peer in self.agreement.office:
            if self._counts(peer, now) and self.takes_part(peer):
                yield peer

    def takes_part(self, peer: PeerId) -> bool:
        """Whether it votes and follows plans, by its own word: a restarted peer may not."""
        return self.agreement.promised[0] > 0 or peer == self.me or self.active(peer)

    def here(self, now: float) -> tuple[PeerId, ...]:
        """Those in office who are alive, whether they abstain or not."""
        return tuple(peer for peer in self.agreement.office if self._counts(peer, now))

    def _counts(self, peer: PeerId, now: float) -> bool:
        return peer not in self.hearing.mute and self.alive(peer, now)

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
        """Members of the newest roster known to have formed that have said farewell."""
        return [p for p in self.agreement.formed if self.liveness(p, now) is Liveness.LEFT]

    def training(self, now: float) -> set[PeerId]:
        """Live islands in office that train in this round (``clients``): it is to have their work.

        Not members that abstain: they follow no plan, and would be waited for in vain.
        """
        islands = [peer for peer in self._able(now) if self.role(peer) == "island"]
        return set(islands if self.clients is None else self.clients(self.place, islands))

    def coming(self, now: float) -> set[PeerId]:
        """Live islands that the last round brings into office, and that have yet to say so.

        They stood one place before this one when they were last heard. Until they are heard here,
        nobody knows that they vote (:meth:`training`). Where only some train, those are drawn from
        who is here.
        """
        if self.clients is not None:
            return set()
        return {peer for peer in self.agreement.office if self._is_coming(peer, now)}

    def _is_coming(self, peer: PeerId, now: float) -> bool:
        said = self.membership.announcement(peer)
        if said is None or (said.role, said.status) != ("island", "joining"):
            return False
        return said.round == self.place.round - 1 and self.alive(peer, now)

    def servers(self, contributors: Sequence[Contributor]) -> int:
        """How many of those in office do not train, by their last word or by what they brought."""
        brought = {contributor.peer for contributor in contributors if contributor.tokens}
        others = (peer for peer in self.agreement.roster if peer not in brought)
        return sum(self.role(peer) == "server" for peer in others)

    def waiting(self, now: float) -> set[PeerId]:
        """Islands that wait for the next round to take part: new ones, or ones that came back."""
        here = (self.place.previous, self.place.state)
        return {
            announce.peer
            for announce in self.membership.members_alive(now)
            if announce.status == "joining" and (announce.head, announce.state) == here
        }

    def asking(
        self, awaited: Container[PeerId], now: float
    ) -> tuple[dict[PeerId, float], set[PeerId]]:
        """Peers that cannot catch up alone, with the seconds each needs; and who is here by now.

        If a majority is alive, a member that trains is waited for until its work is ready; without
        a majority only until it is here, for its vote.
        """
        asks: dict[PeerId, float] = {}
        here: set[PeerId] = set()
        concerned = [
            announce
            for announce in self.membership.members_alive(now)
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
                asks[peer] = eta + self.membership.remaining_s(peer, announce.behind_s, now)
            elif peer in awaited and announce.round < self.place.round:
                asks[peer] = NO_MORE  # it has come to where it knew the others to be
        return asks, here

    def behind(self, peer: PeerId) -> bool:
        """Whether a peer has yet to come to this round, as far as it has said."""
        announce = self.membership.announcement(peer)
        return announce is not None and announce.round < self.place.round

    def eta(self, announce: Announce, now: float) -> float:
        """Seconds until this member is ready."""
        mine = announce.peer == self.me
        return announce.eta if mine else self.membership.eta(announce.peer, now)

    def next_roster(self, roster: tuple[PeerId, ...], reformed: bool, now: float) -> set[PeerId]:
        """Who decides the next round: the old members except the dead, and those who joined.

        Among strangers only a few of these (:mod:`gossip.rounds.trial`), those known longest first.
        Where the roster was ``reformed``, silent members do not stay in it either, and the mute do
        not come back into it.
        """
        staying = (Liveness.ALIVE,) if reformed else THERE
        mute = self.hearing.mute if reformed else set[PeerId]()
        stay = {peer for peer in roster if self.liveness(peer, now) in staying} - mute
        newcomers = [
            announce.peer
            for announce in self.membership.members_alive(now)
            if announce.peer not in stay | mute
            and announce.head == self.place.previous
            and announce.state == self.place.state
        ]
        if self.myself().status == "leaving":
            stay.discard(self.me)
        if self.trial is not None:
            stay |= set(newcomers).intersection(self.agreement.roster)  # come back
            come = [peer for peer in newcomers if peer not in stay]
            return self.trial.seated(stay, come, self.place.round) or {self.me}
        return stay.union(newcomers) or {self.me}

    def active(self, peer: PeerId) -> bool:
        """Whether a peer takes part in deciding, by its own word."""
        announce = self.announcement(peer)
        return announce is not None and announce.status == "active"

    def role(self, peer: PeerId) -> str:
        """What a peer is, by its own word; an island unless it has said otherwise."""
        announce = self.announcement(peer)
        return "island" if announce is None else announce.role
