"""Keeping up with the others: noticing who is ahead or on a heavier chain, and what to do about it.

The answer is to replay the missed rounds (:mod:`gossip.catchup.replay`) or to say that the state
has to be downloaded. Announcements are claims, and have to be proven first
(:mod:`gossip.catchup.claims`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gossip.catchup.approach import Approach
from gossip.catchup.claims import Claims, LeftAlone, Prove
from gossip.catchup.replay import Advance, Ending, Replay
from gossip.exchange.gathering import Held
from gossip.membership.members import MEMBERS, Membership
from gossip.place import Place
from gossip.plans.certificate import heavier
from gossip.plans.validity import Shape
from gossip.wiring import Wiring
from protocols.errors import RemoteProtocolError
from protocols.identity import PeerId
from protocols.messages import Announce, Outcome

MOST_ASKED = 8  # peers at a time
BETWEEN_S = 10.0  # from a download in vain to the next one: two calls that time out


def is_further(here: Place, round_: int, head: bytes, work: int) -> bool:
    """Whether that is further along the chain of ``here``, or on one that outweighs it."""
    if head == here.previous:
        return False
    if work == here.work and round_ != here.round:
        return round_ > here.round  # rounds to which nobody contributed
    return heavier((here.work, here.previous), (work, head))


@dataclass
class Following:
    """Compares announcements with our own place; replays what we missed, or says that we cannot.

    ``behind`` is called when only a download of the state can help. A peer that claims to be on a
    heavier chain than ours must show a certificate for it.
    """

    wiring: Wiring
    shape: Shape
    membership: Membership
    place: Callable[[], tuple[Place, tuple[PeerId, ...]]]
    settled: Callable[[], Awaitable[None]]  # waits while a round is being applied
    busy: Callable[[], bool]  # whether a round is being applied
    held: Held
    advance: Advance
    prove: Prove
    rejected: Callable[[PeerId, RemoteProtocolError], None]
    behind: Callable[[Ending], None]
    approach: Approach
    link: Callable[[], float]  # what our downlink carries, bytes a second; 0: unknown
    under_way: bool = False
    _leaves_for: tuple[int, bytes, int] | None = None  # proven place of a fork
    _left_at: float = 0.0  # when something was last done about it
    _in_vain: bool = False  # whether nobody delivered the state of that place
    _replay: Replay = field(init=False)
    _news: bool = False  # somebody got ahead while it was under way
    _named: dict[PeerId, None] = field(default_factory=dict)  # peers to ask next
    _left: LeftAlone = field(default_factory=LeftAlone)
    _claims: Claims = field(init=False)

    def __post_init__(self) -> None:
        self.approach.link = self.link
        self._replay = Replay(
            self.wiring, self.shape, self.place, self.held, self.advance, self.rejected,
            self._silent, self._left.forgive, self._is_far, self.approach.replays,
            self.approach.replayed, self._upload, self.link,
        )  # fmt: skip
        self._claims = Claims(self.prove, self._unproven, self.wiring.now, self._in_office)

    def compare(self, announce: Announce) -> None:
        """Notice that somebody is ahead, on a heavier chain, or at our place with another state."""
        here, roster = self.place()
        if announce.role in MEMBERS and announce.status == "active":
            self.approach.heard(announce.peer, announce.round, self.wiring.now())
        if self.is_ahead(announce):
            self._news = True
            if not self._is_left(announce.peer) and not self._catching_up:
                self.begin((announce.peer,))
        elif announce.head == here.previous and announce.state != here.state:
            self._vote_on_state(here, roster)

    def begin(self, peers: tuple[PeerId, ...], *, vouched: bool = False) -> None:
        """Catch up with ``peers`` and whoever else is ahead, after any catching up under way.

        ``vouched``: a certificate shows that they have what is missed. Otherwise peers that are not
        in office may be left alone for now.
        """
        _, roster = self.place()
        if self._catching_up:
            self._news = True
            named = [peer for peer in peers if vouched or peer in roster]
            self._named |= dict.fromkeys(named[:MOST_ASKED])
            while len(self._named) > MOST_ASKED:
                del self._named[next(iter(self._named))]
            return
        if not vouched:
            peers = tuple(peer for peer in peers if peer in roster or not self._is_left(peer))
        if peers:
            self.under_way, self._news, self._named = True, False, {}
            self.wiring.spawn(self._catch_up(peers, vouched=vouched))

    @property
    def _catching_up(self) -> bool:
        return self.under_way or self.approach.downloading

    @contextmanager
    def downloading(self) -> Iterator[Approach]:
        """While this is held the state is downloaded, and nothing replayed; then what is left is.

        What it yields is to be told how much has come.
        """
        self.approach.begins(self.missing(), self.wiring.now())
        try:
            yield self.approach
        except BaseException:  # also cancellation: it has ended all the same
            self._in_vain = self.changes_sides or self._in_vain
            self.approach.ends(self.wiring.now(), arrived=False)
            raise
        finally:
            self._left_at = self.wiring.now()
        self.approach.ends(self.wiring.now(), arrived=True)
        self._in_vain = False
        self._news = True
        self._go_on()

    @property
    def changes_sides(self) -> bool:
        """Whether this node goes over to the other side of a fork: it decides nothing on its own.

        Else a round that is decided meanwhile makes this side the heavier one, the others turn
        round, and so on without end. At most one of two sides is left like this: each judges by a
        place that the other has reached.
        """
        if self._leaves_for is None or self._in_vain:
            return False
        tries = self.approach.downloading or self.wiring.now() < self._left_at + BETWEEN_S
        return tries and is_further(self.place()[0], *self._leaves_for)

    @property
    def decided(self) -> Outcome | None:
        """What was decided in the round where this node stands, where somebody has shown it."""
        found, (here, _) = self._replay.decided, self.place()
        there = found is not None and (found.round, found.previous) == (here.round, here.previous)
        return found if there else None

    def missing(self) -> int:
        """Rounds from here to the furthest of those who are ahead."""
        ahead = map(self.membership.announcement, self._ahead())
        return max((a.round for a in ahead if a), default=0) - self.place()[0].round

    def asks(self) -> float:
        """Seconds for which the others would have to wait; 0: they need not."""
        here, roster = self.place()
        self.approach.stands(here.round, in_office=self.wiring.identity.peer_id in roster)
        trying = self.under_way or self.approach.downloading
        if not (trying or self.approach.asking):
            return 0.0
        return self.approach.asks(self.missing(), self.wiring.now())

    def _upload(self, peer: PeerId) -> float:
        claim = self.membership.announcement(peer)
        return claim.upload if claim is not None else 0.0

    def _is_far(self, source: PeerId) -> bool:
        claim = self.membership.announcement(source)
        missing = claim.round - self.place()[0].round if claim is not None else 0
        return self.approach.is_far(missing)

    def _go_on(self) -> None:
        """Catch up once more, if peers have got ahead meanwhile."""
        if self._news and not self._catching_up and (peers := (*self._named, *self._ahead())):
            self.begin(tuple(dict.fromkeys(peers))[:MOST_ASKED], vouched=True)

    async def _catch_up(self, peers: tuple[PeerId, ...], *, vouched: bool) -> None:
        """Replay what ``peers`` and all who are ahead have; report it where that is not enough."""
        try:
            await self._replay_from(peers, vouched=vouched)
        finally:
            self.under_way = False
        self._go_on()

    async def _replay_from(self, peers: tuple[PeerId, ...], *, vouched: bool) -> None:
        asked = {self.wiring.identity.peer_id}
        endings = {Ending.LEVEL}
        await self.settled()  # what is being applied right now may be all we miss
        first = self.place()[0].round
        while sources := self._sources(peers, asked, vouched=vouched):
            asked.update(sources)
            ending = await self._replay.follow(sources, first)
            if ending is Ending.LEVEL:
                self.approach.arrived()
                return
            if ending is None:
                asked = {self.wiring.identity.peer_id}
            else:
                endings.add(ending)
        if Ending.DIVERGED in endings:
            self.behind(Ending.DIVERGED)
        elif endings & {Ending.FAR, Ending.GONE, Ending.FORKED}:
            await self._judge(endings)

    def _sources(
        self, peers: Iterable[PeerId], but: Container[PeerId], *, vouched: bool
    ) -> list[PeerId]:
        """These, and whoever else is ahead by now; first those that are vouched or in office."""
        _, roster = self.place()
        found = [one for one in dict.fromkeys((*peers, *self._ahead())) if one not in but]
        if not vouched:
            found.sort(key=lambda peer: peer not in roster)
        return found[:MOST_ASKED]

    async def _judge(self, endings: set[Ending]) -> None:
        """Replaying leads nowhere: report it if somebody really is on a heavier chain."""
        judged: set[PeerId] = set()

        def claims(office: bool) -> Announce | None:
            # once a peer is known to have what is missed, ask it rather than judge more claims
            left = () if judged and self._named else self._ahead()
            peer = next((one for one in left if one not in judged), None)
            if peer is None or (office and not self._in_office(peer)):
                return None
            judged.add(peer)
            return self.membership.announcement(peer) or claims(office)

        if (claim := await self._claims.first_proven(claims, self.is_ahead)) is not None:
            self._left.forgive(claim.peer)
            self._report(claim, endings)

    def _report(self, claim: Announce, endings: set[Ending]) -> None:
        """Say that the state of a proven place is needed, and why."""
        if claim.round <= self.place()[0].round:
            endings.add(Ending.FORKED)
        found = [e for e in (Ending.FORKED, Ending.GONE, Ending.FAR) if e in endings]
        if found[0] is Ending.FORKED:
            self._leaves_for = (claim.round, claim.head, claim.work)
            self._left_at = self.wiring.now()
        self.behind(found[0])

    def _unproven(self, peer: PeerId, error: RemoteProtocolError | None) -> None:
        if error is None:
            self._silent(peer)
        else:
            self.rejected(peer, error)
            self._leave(peer)

    def _silent(self, peer: PeerId) -> None:
        """A peer did not answer: leave it alone unless it is in office, as it may be made up."""
        if not self._in_office(peer):
            self._leave(peer)

    def _leave(self, peer: PeerId) -> None:
        self._left.leave(peer, self.wiring.now())

    def _in_office(self, peer: PeerId) -> bool:
        return peer in self.place()[1]

    def _is_left(self, peer: PeerId) -> bool:
        return self._left.has(peer, self.wiring.now())

    def _ahead(self) -> list[PeerId]:
        """Live islands that are further than we are, or on a heavier chain: first those in office.

        Without those that could not show it a short while ago.
        """
        _, roster = self.place()
        found = [
            announce.peer
            for announce in self.membership.members_alive(self.wiring.now())
            if self.is_ahead(announce) and not self._is_left(announce.peer)
        ]
        return sorted(found, key=lambda peer: peer not in roster)

    def is_ahead(self, announce: Announce) -> bool:
        """Whether an island is further along our chain, or on a chain that outweighs ours."""
        here, roster = self.place()
        newcomer = announce.status == "joining" and announce.peer not in roster
        if announce.role not in MEMBERS or newcomer:
            return False
        return is_further(here, announce.round, announce.head, announce.work)

    def _vote_on_state(self, here: Place, roster: tuple[PeerId, ...]) -> None:
        """Report it when most members in office at our place have another state than ours.

        Identities cost nothing, so what peers out of office say of a state does not count.
        """
        states = [
            announce.state
            for announce in self.membership.members_alive(self.wiring.now())
            if announce.head == here.previous and announce.status == "active"
            if announce.peer in roster
        ]
        others = [state for state in states if state != here.state]
        most = max(map(others.count, others), default=0)
        if not self.busy() and most > len(states) - len(others) + 1:
            self.behind(Ending.DIVERGED)
