"""Members that take rounds together, their driver played by the test, on a clock of its own."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from blake3 import blake3
from gossip_kit import announce_of
from round_parts import Parts

from gossip.chain.missed import Missed
from gossip.membership.members import Membership, Patience
from gossip.place import Place
from gossip.plans.certificate import check_certificate, genesis, outcome_hash
from gossip.plans.rules import Rules
from gossip.plans.validity import PartKey
from gossip.rounds import round as rounds
from gossip.rounds.earlier import Earlier
from gossip.rounds.gathering import Gathering
from gossip.rounds.instructions import Broadcast, CatchUp, Commit, FollowPlan, Send
from gossip.rounds.round import Round
from protocols.errors import RemoteProtocolError, RemoteRefused
from protocols.identity import Identity, PeerId
from protocols.messages import Announce, Certificate, PartResult, Prepare

RUN = b"r" * 32
SIZE = 256 * 1024
RULES = Rules(size=SIZE, codecs=("int4",), encoded_bytes=lambda codec, a, b: (b - a) * 17 // 32)


@dataclass
class Peer:
    """A member: its chain, its current round, and the parts it holds."""

    identity: Identity
    membership: Membership
    chain: list[Certificate] = field(default_factory=list)
    placed: tuple[Certificate | None, Place] | None = None  # after the newest of these
    round: Round | None = None
    alive: bool = True
    frozen: bool = False
    incarnation: int = 1
    sequence: int = 0
    status: str = "active"
    role: str = "island"
    slower: float = 1.0  # times as long to be ready
    absent: Missed = field(default_factory=Missed)
    ready: bool = False
    abstain_until: float = 0.0
    forgotten: int = -1  # in rounds up to this one it may have voted before a restart
    slices: dict[PartKey, set[PeerId]] = field(default_factory=dict)
    merged: set[PartKey] = field(default_factory=set)
    held: dict[tuple[int, PartKey], PartResult] = field(default_factory=dict)
    backlog: list[Callable[[], None]] = field(default_factory=list)
    frozen_at: float = 0.0
    gathering: Gathering = field(default_factory=Gathering)


class World:
    """Peers, a clock and a network that misbehaves as told."""

    def __init__(
        self,
        count: int,
        seed: int,
        *,
        think: tuple[float, float] = (0.3, 1.0),
        rules: Rules = RULES,
        servers: int = 0,
        outside: int = 0,
    ) -> None:
        """The first ``servers`` of the members do not train; ``outside`` of them come later."""
        self.rules = rules
        self.random = random.Random(seed)
        self.now = 0.0
        self.think = think
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.counter = itertools.count()
        self.cut: set[frozenset[PeerId]] = set()
        self.parts = Parts(self)
        self.commits: dict[int, dict[bytes, set[PeerId]]] = {}
        self.commit_times: list[float] = []
        identities = [Identity.from_seed(bytes([i + 1]) * 32) for i in range(count)]
        self.first_roster = tuple(sorted(i.peer_id for i in identities[: count - outside]))
        self.peers = {i.peer_id: Peer(i, Membership(i.peer_id, Patience())) for i in identities}
        for number, peer in enumerate(self.peers.values()):
            peer.role = "server" if number < servers else "island"
            peer.status = "active" if number < count - outside else "joining"
            self.open(peer)
            self.heartbeat(peer, peer.incarnation)

    # --- clock and network

    def after(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + delay, next(self.counter), action))

    def run(self, until: float) -> None:
        while self.queue and self.queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self.queue)
            action()
        self.now = until

    def deliver(self, source: Peer, to: PeerId, action: Callable[[Peer], None]) -> None:
        target = self.peers[to]
        if not source.alive:
            return
        incarnation = target.incarnation
        sender = source.identity.peer_id

        def arrive() -> None:
            if frozenset((sender, to)) in self.cut:
                return
            if not target.alive or target.incarnation != incarnation:
                if source.alive:
                    source.membership.on_unreachable(to, self.now)
                return
            if target.frozen:
                target.backlog.append(lambda: action(target))
                return
            action(target)

        self.after(self.random.uniform(0.002, 0.08), arrive)

    def reaches(self, peer: Peer, other: Peer) -> bool:
        cut = frozenset((peer.identity.peer_id, other.identity.peer_id)) in self.cut
        return other.alive and not other.frozen and not cut

    def reachable(self, peer: Peer) -> list[Peer]:
        return [other for other in self.peers.values() if self.reaches(peer, other)]

    # --- faults

    def kill(self, peer: Peer) -> None:
        peer.alive = False
        peer.backlog.clear()

    def restart(self, peer: Peer) -> None:
        peer.alive, peer.frozen = True, False
        peer.incarnation += 1
        peer.status, peer.ready = "joining", False
        peer.membership = Membership(peer.identity.peer_id, Patience())
        peer.held = {k: v for k, v in peer.held.items() if k[0] < len(peer.chain)}
        peer.slices, peer.merged = {}, set()
        peer.abstain_until = self.now + 10.0
        peer.forgotten = max(len(other.chain) for other in self.peers.values())
        self.open(peer)
        self.heartbeat(peer, peer.incarnation)

    def freeze(self, peer: Peer) -> None:
        peer.frozen, peer.frozen_at = True, self.now

    def thaw(self, peer: Peer) -> None:
        if not peer.frozen:
            return
        peer.frozen = False
        peer.membership.forgive(self.now - peer.frozen_at, self.now)
        backlog, peer.backlog = peer.backlog, []
        for action in backlog:
            action()

    # --- a member's life

    def place(self, peer: Peer) -> Place:
        last = peer.chain[-1] if peer.chain else None
        if peer.placed is None or peer.placed[0] is not last:  # it is asked for all the time
            peer.placed = (last, self._after(last))
        return peer.placed[1]

    def _after(self, last: Certificate | None) -> Place:
        if last is None:
            return Place(RUN, 0, 0, genesis(RUN), b"s" * 32, 0)
        head = outcome_hash(last.outcome)
        state = blake3(b"state" + head).digest()
        return Place(RUN, 0, last.outcome.round + 1, head, state, last.outcome.work)

    def announce(self, peer: Peer) -> Announce:
        return announce_of(
            peer.identity.peer_id,
            self.place(peer),
            role=peer.role,
            status=peer.status,
            incarnation=peer.incarnation,
            ready=peer.ready,
            eta=0.2,
            epoch=0 if peer.round is None else peer.round.agreement.promised[0],
        )

    def open(self, peer: Peer) -> None:
        place = self.place(peer)
        roster = peer.chain[-1].outcome.next_roster if peer.chain else self.first_roster
        peer.ready = False
        peer.slices, peer.merged = {}, set()
        peer.round = Round(
            peer.identity,
            place,
            roster,
            peer.membership,
            self.rules,
            self.now,
            Earlier(
                1.0,
                missed=peer.absent.rounds(place.round),
                unreliable=peer.absent.unreliable(place.round),
            ),
            lambda: self.announce(peer),
            peer.abstain_until,
            place.round <= peer.forgotten,
            gathering=peer.gathering,
        )
        current = peer.round

        def get_ready() -> None:
            drawn = current.company.training(self.now)
            if peer.identity.peer_id not in drawn and peer.alive and peer.round is current:
                self.after(1.0, get_ready)  # who goes may bring it in
            elif peer.alive and peer.round is current and not peer.frozen:
                peer.ready = True
                self.tell(peer)
                self.do(peer, current.tick(self.now))

        self.after(peer.slower * self.random.uniform(*self.think), get_ready)
        self.tick(peer, current)

    def tick(self, peer: Peer, current: Round) -> None:
        if not peer.alive or peer.round is not current or current.finished:
            return
        if not peer.frozen:
            self.do(peer, current.tick(self.now))
        self.after(
            max(0.01, current.wake_at(self.now) - self.now), lambda: self.tick(peer, current)
        )

    def heartbeat(self, peer: Peer, incarnation: int) -> None:
        if not peer.alive or peer.incarnation != incarnation:
            return
        if not peer.frozen:
            self.tell(peer)
        self.after(1.0, lambda: self.heartbeat(peer, incarnation))

    def tell(self, peer: Peer) -> None:
        announce = self.announce(peer)
        peer.sequence += 1
        sequence = peer.sequence
        for other in self.peers:
            if other != peer.identity.peer_id:
                self.deliver(peer, other, lambda t: self.hear(t, announce, sequence))

    def hear(self, peer: Peer, announce: Announce, sequence: int) -> None:
        peer.membership.on_announce(announce, b"", sequence, self.now)
        if announce.round > len(peer.chain):
            self.catch_up(peer, (announce.peer,))
        elif peer.round is not None:
            peer.round.on_news(announce)
            self.do(peer, peer.round.tick(self.now))

    def catch_up(self, peer: Peer, sources: tuple[PeerId, ...]) -> None:
        for source in sources:
            other = self.peers[source]
            if self.reaches(peer, other) and len(other.chain) > len(peer.chain):
                certificate = other.chain[len(peer.chain)]
                place = self.place(peer)
                roster = peer.chain[-1].outcome.next_roster if peer.chain else self.first_roster
                check_certificate(certificate, run=RUN, previous=place.previous, roster=roster)
                self.commit(peer, certificate)
                return

    def commit(self, peer: Peer, certificate: Certificate) -> None:
        number = certificate.outcome.round
        assert number == len(peer.chain)
        head = outcome_hash(certificate.outcome)
        self.commits.setdefault(number, {}).setdefault(head, set()).add(peer.identity.peer_id)
        peer.chain.append(certificate)
        peer.absent.note(certificate.outcome)
        self.commit_times.append(self.now)
        self.open(peer)
        if peer.identity.peer_id in certificate.outcome.next_roster and not peer.round.forgot:
            peer.status = "active"
        self.tell(peer)

    def do(self, peer: Peer, instructions: list[rounds.Instruction]) -> None:
        current = peer.round
        assert current is not None
        for instruction in instructions:
            match instruction:
                case Send(to, message):
                    self.deliver(peer, to, lambda t, m=message: self.control(peer, t, current, m))
                case Broadcast(peers, told):
                    for to in peers:
                        self.deliver(peer, to, lambda t, m=told: self.control(peer, t, current, m))
                case FollowPlan(plan):
                    self.parts.work(peer, current, plan)
                case Commit(certificate):
                    self.commit(peer, certificate)
                case CatchUp(peers):
                    self.after(0.05, lambda p=peers: self.catch_up(peer, p))

    def control(self, source: Peer, target: Peer, asked: Round, message: object) -> None:
        sender = source.identity.peer_id
        target.membership.on_contact(sender, self.now)
        current = target.round
        assert current is not None
        if getattr(message, "round", current.place.round) != current.place.round:
            return
        try:
            if isinstance(message, Prepare):
                answer = current.on_prepare(sender, message, self.now)
                self.deliver(target, sender, lambda t: self.reply(t, target, asked, answer))
            else:
                self.do(target, current.on_message(sender, message, self.now))  # type: ignore[arg-type]
        except (RemoteProtocolError, RemoteRefused):
            pass  # the driver counts these; here the sender just gets no answer

    def reply(self, peer: Peer, source: Peer, asked: Round, answer: object) -> None:
        if peer.round is asked:
            self.do(peer, asked.on_message(source.identity.peer_id, answer, self.now))  # type: ignore[arg-type]


def agree(world: World) -> None:
    """No round was decided twice differently."""
    for number, heads in world.commits.items():
        assert len(heads) == 1, f"round {number} was decided twice: {heads}"


def under_way(world: World) -> tuple[Peer, list[Peer]]:
    """Run until a round has a plan at all members, none of them done; its leader, the others."""
    peers = list(world.peers.values())

    def planned() -> bool:
        current = [peer.round for peer in peers]
        plans = {r.agreement.plan.leader for r in current if r and r.agreement.plan}
        return len(plans) == 1 and all(
            r is not None and not r.finished and r.agreement.plan is not None for r in current
        )

    while not planned():
        assert world.now < 20.0
        world.run(world.now + 0.01)
    leader = next(p for p in peers if p.round and p.round.agreement.plan.leader == p.round.me)  # type: ignore[union-attr]
    return leader, [peer for peer in peers if peer is not leader]
