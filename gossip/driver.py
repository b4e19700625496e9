"""A member of the swarm: the thin asyncio driver around rounds, exchanges and membership.

It carries out what :class:`gossip.round.Round` instructs, feeds it what arrives, and moves from
round to round. What a round means for parameters is the :class:`Replica`'s business.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from gossip.agreement import PartKey, Place
from gossip.catchup import Ending, catch_up
from gossip.certificate import heavier
from gossip.exchange import Exchange, Wiring, outgoing
from gossip.ledger import Ledger
from gossip.membership import Liveness, Membership
from gossip.planning import Rules
from gossip.round import CatchUp, Commit, Instruction, Round, Send, Work
from protocols.envelope import Opened, open_envelope, seal
from protocols.errors import (
    Malformed,
    RemoteProtocolError,
    RemoteRefused,
    Stale,
    TransferStalled,
    TransportError,
    Unreachable,
)
from protocols.identity import PeerId
from protocols.messages import (
    Announce,
    Certificate,
    CertificateRequest,
    Certificates,
    Contribution,
    Known,
    PartRequest,
    PartResult,
    Plan,
    Prepare,
    Promise,
    Suspect,
    Vote,
)
from protocols.transport import Incoming, Outgoing
from protocols.wire import decode_any

ANNOUNCE_LIFETIME_S = 60.0
ADVANCE_WAIT_S = 5.0  # a message for the next round may arrive while this one is applied
JUMP_S = 1.0  # the loop stood still for so long: this process was stopped
AMNESIA_S = 10.0  # a restarted member keeps out of a round under way for so long at most


class Replica(Protocol):
    """The outer state at this node."""

    @property
    def place(self) -> Place: ...

    @property
    def roster(self) -> tuple[PeerId, ...]: ...

    def delta(self, start: int, stop: int) -> torch.Tensor:
        """This island's pseudo-gradient, fp32 [stop − start]."""
        ...

    async def apply(
        self, certificate: Certificate, parts: dict[tuple[int, int], torch.Tensor]
    ) -> None:
        """Take the outer step of a committed round; ``place`` and ``roster`` move on."""
        ...


def open_announce(envelope: bytes, run: bytes, now: float) -> Opened[Announce]:
    """A peer's own announcement. Raises RemoteProtocolError for one that does not hold."""
    opened = open_envelope(envelope, Announce, purpose="announce", run=run, now=now)
    if opened.message.peer != opened.signer:
        raise Malformed("an announcement of somebody else")
    return opened


@dataclass
class Hooks:
    """Whom the driver tells. All are called on the event loop and must not block."""

    applied: Callable[[Certificate, Exchange | None], None] = lambda certificate, exchange: None
    peer: Callable[[PeerId, str, str], None] = lambda peer, what, why: None  # joined, suspect, …
    rejected: Callable[[PeerId, str], None] = lambda peer, why: None
    behind: Callable[[Ending, tuple[PeerId, ...]], None] = lambda ending, peers: None
    learned: Callable[[Announce], None] = lambda announce: None  # news of a peer


@dataclass
class Swarm:
    """This node's membership in the rounds of one run.

    ``status`` is this node's own announcement; whoever knows better replaces its fields
    (:meth:`update`). :meth:`run` runs until cancelled.
    """

    wiring: Wiring
    replica: Replica
    rules: Rules
    membership: Membership
    status: Announce
    hooks: Hooks
    wall: Callable[[], float]
    keep_rounds: int = 5
    round: Round = field(init=False)
    exchange: Exchange = field(init=False)
    ledger: Ledger = field(init=False)
    round_s: float = 0.0  # usual seconds from commit to commit
    planned_at: float = 0.0  # when the round under way got its first plan
    _sequence: int = 0
    _kick: asyncio.Event = field(default_factory=asyncio.Event)
    _moved: asyncio.Condition = field(default_factory=asyncio.Condition)
    _advancing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _catching_up: bool = False
    _last_commit: float | None = None
    _seen: dict[PeerId, Liveness] = field(default_factory=dict)
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.keep_rounds)
        self._started = self.now()
        self._open_round()
        transport = self.wiring.transport
        transport.on_call("announce", self._on_announce)
        transport.on_call("known", self._on_known)
        transport.on_call("round", self._on_round, max_body=Plan.MAX_BYTES)
        transport.on_call("certificates", self._on_certificates)
        largest = self.wiring.codec.encoded_size(0, self.rules.size)
        transport.on_push("slice", self._on_slice, max_length=largest)
        transport.on_push("merged", self._on_merged, max_length=largest)
        transport.on_pull("part", self._on_part)

    @property
    def me(self) -> PeerId:
        return self.wiring.identity.peer_id

    def now(self) -> float:
        return self.wiring.now()

    # --- for whoever owns this ------------------------------------------------------------------

    def note(self, **changes: Any) -> None:
        """Change what this node says of itself; it is said with the next heartbeat."""
        self.status = replace(self.status, **changes)

    def update(self, **changes: Any) -> None:
        """Change what this node says of itself, and say it at once."""
        self.note(**changes)
        self._kick.set()
        self.tell()

    def tell(self) -> None:
        """Announce to everybody who may be there."""
        envelope = self.envelope()
        now = self.now()
        for peer in self.membership.islands:
            if self.membership.liveness(peer, now) in (Liveness.ALIVE, Liveness.SUSPECT):
                self._spawn(self._tell(peer, envelope))

    def envelope(self) -> bytes:
        """This node's announcement, signed."""
        place = self.replica.place
        self.status = replace(
            self.status, round=place.round, head=place.previous, state=place.state, work=place.work
        )
        self._sequence += 1
        return seal(
            self.wiring.identity,
            self.status,
            purpose="announce",
            run=self.wiring.run,
            expires=self.wall() + ANNOUNCE_LIFETIME_S,
            sequence=self._sequence,
        )

    def learn(self, envelope: bytes, sender: PeerId | None = None) -> Announce:
        """Take a signed announcement. Raises RemoteProtocolError for one that does not hold."""
        opened = open_announce(envelope, self.wiring.run, self.wall())
        announce = opened.message
        if announce.peer == self.me:
            return announce
        news = self.membership.on_announce(announce, envelope, opened.sequence, self.now())
        if sender == announce.peer:
            self.membership.on_contact(sender, self.now())
        if news:
            self.hooks.learned(announce)
            self._notice(announce.peer)
            self._compare(announce)
            self._kick.set()
        return announce

    async def move(self) -> None:
        """The replica was put elsewhere in the chain (a state download): start over there."""
        async with self._advancing:
            self.ledger.clear()
            self.exchange.stop()
            self._open_round()
        await self._announce_move()

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """No round is applied while this is held: the replica can be read as a whole."""
        async with self._advancing:
            yield

    async def leave(self) -> None:
        """Say farewell to everybody, bounded in time."""
        self.status = replace(self.status, status="leaving", ready=False)
        envelope = self.envelope()
        async with asyncio.TaskGroup() as group:
            for peer in self.membership.alive(self.now()):
                group.create_task(self._tell(peer, envelope))

    async def run(self) -> None:
        """Announce, tick, and keep the membership in order until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._heartbeats())
            group.create_task(self._ticks())

    # --- loops -----------------------------------------------------------------------------------

    async def _heartbeats(self) -> None:
        period = self.membership.patience.heartbeat_s
        turn = 0
        while True:
            self.tell()
            now = self.now()
            for peer in list(self.membership.islands):
                self._notice(peer)
            self.membership.forget_old(now)
            if turn % 5 == 0:
                alive = sorted(self.membership.alive(now))
                if alive:
                    self._spawn(self.ask_known(alive[turn // 5 % len(alive)]))
            turn += 1
            await asyncio.sleep(period)

    async def _ticks(self) -> None:
        while True:
            now = self.now()
            self._do(self.round, self.round.tick(now))
            wake = self.round.wake_at(now)
            self._kick.clear()
            try:
                async with asyncio.timeout(max(0.005, wake - now)):
                    await self._kick.wait()
            except TimeoutError:
                late = self.now() - wake
                if late > JUMP_S:
                    self.membership.forgive(late)
                    await asyncio.sleep(0.05)  # hear first what was said in the meantime

    # --- instructions ----------------------------------------------------------------------------

    def _do(self, of: Round, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(to, message):
                    self._spawn(self._send(of, to, message))
                case Work(plan):
                    if of is self.round:
                        if self.exchange.plan is None:
                            self.planned_at = self.now()
                        self.exchange.work(plan)
                case Commit(certificate):
                    self._spawn(self._commit(of, certificate))
                case CatchUp(peers):
                    self._begin_catching_up(peers)

    async def _send(self, of: Round, to: PeerId, message: Plan | Prepare | Vote | Suspect) -> None:
        body = message.encode()
        patience = max(1.0, self.rules.patience_s)
        for _ in range(3):
            try:
                reply = await self.wiring.transport.call(
                    to, "round", body, timeout=patience, max_reply=Certificate.MAX_BYTES
                )
            except TransferStalled:
                if of.finished:
                    return
                continue
            except Unreachable:
                self._unreachable(to)
                return
            except TransportError:
                return  # refused: it knows better, or cannot now
            self.membership.on_contact(to, self.now())
            if reply and of is self.round:
                try:
                    answer = decode_any(reply, Promise, Certificate)
                    self._do(of, of.on_message(to, answer, self.now()))
                except RemoteProtocolError as error:
                    self.hooks.rejected(to, str(error))
            return

    async def _commit(self, of: Round, certificate: Certificate) -> None:
        parts = {key[:2]: data for key, (_, data) in self._certified(certificate).items()}
        await self._advance(certificate, parts, self.exchange if of is self.round else None)

    def _certified(
        self, certificate: Certificate
    ) -> dict[PartKey, tuple[PartResult, torch.Tensor]]:
        wanted = {(r.start, r.stop, r.owner): r.digest for r in certificate.outcome.parts}
        return {
            key: held
            for key, held in self.exchange.parts.items()
            if wanted.get(key) == held[0].digest
        }

    async def _advance(
        self,
        certificate: Certificate,
        parts: dict[tuple[int, int], torch.Tensor],
        exchange: Exchange | None,
    ) -> None:
        async with self._advancing:
            if certificate.outcome.previous != self.replica.place.previous:
                return  # somebody was quicker
            await self.replica.apply(certificate, parts)
            self.ledger.add(certificate, parts)
            self.exchange.stop()
            now = self.now()
            if self._last_commit is not None:
                gap = now - self._last_commit
                self.round_s += (0.3 if self.round_s else 1.0) * (gap - self.round_s)
            self._last_commit = now
            if self.status.status == "joining" and self.me in self.replica.roster:
                self.status = replace(self.status, status="active")
            self.status = replace(self.status, ready=False)
            self._open_round()
            self.hooks.applied(certificate, exchange)
        await self._announce_move()

    async def _announce_move(self) -> None:
        self._kick.set()
        self.tell()
        async with self._moved:
            self._moved.notify_all()

    def _open_round(self) -> None:
        place = self.replica.place
        joining = self.status.status == "joining"
        self.round = Round(
            self.wiring.identity,
            place,
            self.replica.roster,
            self.membership,
            self.rules,
            self.now(),
            self.round_s,
            lambda: self.status,
            self._started + AMNESIA_S if joining else 0.0,
        )
        self.exchange = Exchange(self.wiring, place.fragment, place.round, self.replica, self)
        self.status = replace(
            self.status, round=place.round, head=place.previous, state=place.state, work=place.work
        )

    # --- what an exchange reports ------------------------------------------------------------------

    def held(self, result: PartResult) -> None:
        if result.round == self.round.place.round:
            self._do(self.round, self.round.on_held(result, self.now()))

    def fault(self, peer: PeerId, why: str) -> None:
        self.hooks.peer(peer, "fault", why)
        self._do(self.round, self.round.on_fault(peer, self.now()))

    def lost(self, result: PartResult) -> None:
        self._do(self.round, self.round.on_lost(result, self.now()))

    def refused(self, peer: PeerId, why: str) -> None:
        self.hooks.rejected(peer, why)

    # --- falling behind ------------------------------------------------------------------------------

    def _compare(self, announce: Announce) -> None:
        """Notice that somebody is ahead, or on a heavier chain."""
        if announce.role != "island" or announce.status == "joining":
            return
        here = self.replica.place
        ahead = announce.round > here.round
        forked = announce.round == here.round and announce.head != here.previous
        if ahead or (
            forked and heavier((here.work, here.previous), (announce.work, announce.head))
        ):
            self._begin_catching_up((announce.peer,))
        elif not ahead and announce.head == here.previous and announce.state != here.state:
            self._vote_on_state()

    def _vote_on_state(self) -> None:
        """Report it when most of those who stand where we stand have another state than ours."""
        here = self.replica.place
        states = [
            announce.state
            for announce in self.membership.islands_alive(self.now())
            if announce.head == here.previous and announce.status == "active"
        ]
        others = [state for state in states if state != here.state]
        most = max(map(others.count, others), default=0)
        if not self._advancing.locked() and most > len(states) - len(others) + 1:
            self.hooks.behind(Ending.DIVERGED, ())

    def _begin_catching_up(self, peers: tuple[PeerId, ...]) -> None:
        if not self._catching_up:
            self._catching_up = True
            ahead = tuple(
                announce.peer
                for announce in self.membership.islands_alive(self.now())
                if announce.round > self.replica.place.round and announce.peer not in peers
            )
            self._spawn(self._catch_up(peers + ahead))

    async def _catch_up(self, peers: tuple[PeerId, ...]) -> None:
        try:
            async with self._advancing:
                pass  # what is being applied right now may be all we miss
            ending = await catch_up(
                self.wiring,
                [peer for peer in peers if peer != self.me],
                lambda: (self.replica.place, self.replica.roster),
                self.exchange_part,
                lambda certificate, parts: self._advance(certificate, parts, None),
            )
        finally:
            self._catching_up = False
        if ending is Ending.GONE or ending is Ending.FORKED:
            self.hooks.behind(ending, peers)

    def exchange_part(self, key: PartKey) -> tuple[PartResult, torch.Tensor] | None:
        """A part of the round under way that is held here."""
        return self.exchange.parts.get(key)

    # --- handlers --------------------------------------------------------------------------------------

    async def _on_announce(self, sender: PeerId, body: bytes) -> bytes:
        self.learn(body, sender)
        return b""

    async def _on_known(self, sender: PeerId, body: bytes) -> bytes:
        del sender, body
        return self.known().encode()

    def known(self) -> Known:
        """The announcements held here, this node's own first, bounded in number and size."""
        room, found = Known.MAX_BYTES - 4096, [self.envelope()]
        for island in self.membership.islands.values():
            room -= len(island.envelope) + 8
            fresh = self.now() - island.heard < ANNOUNCE_LIFETIME_S / 2
            if island.envelope and fresh and room > 0 and len(found) < 256:
                found.append(island.envelope)
        return Known(tuple(found))

    async def ask_known(self, peer: PeerId) -> None:
        """Hear from a peer whom it knows, itself included."""
        try:
            reply = await self.wiring.transport.call(
                peer, "known", b"", timeout=5.0, max_reply=Known.MAX_BYTES
            )
            for envelope in Known.decode(reply).announces:
                try:
                    self.learn(envelope)
                except Stale:
                    continue  # it travelled too long
        except RemoteProtocolError as error:
            self.hooks.rejected(peer, str(error))
        except TransportError:
            return  # the heartbeat will find out what is wrong

    async def _on_round(self, sender: PeerId, body: bytes) -> bytes:
        message = decode_any(body, Plan, Prepare, Vote, Suspect)
        self.membership.on_contact(sender, self.now())
        if message.round > self.replica.place.round:
            await self._reach(message.round, sender)
        if message.round < self.replica.place.round:
            kept = self.ledger.certificate(message.round)
            return kept.encode() if kept and isinstance(message, Prepare | Plan) else b""
        of = self.round
        if isinstance(message, Prepare):
            return of.on_prepare(sender, message, self.now()).encode()
        self._do(of, of.on_message(sender, message, self.now()))
        return b""

    async def _reach(self, round_: int, sender: PeerId) -> None:
        """Wait until this node has come to ``round_``. Raises RemoteRefused ``behind``."""
        if round_ > self.replica.place.round + 1 or not self._advancing.locked():
            self._begin_catching_up((sender,))
        try:
            async with asyncio.timeout(ADVANCE_WAIT_S), self._moved:
                await self._moved.wait_for(lambda: self.replica.place.round >= round_)
        except TimeoutError:
            raise RemoteRefused("behind", f"still in round {self.replica.place.round}") from None

    async def _on_certificates(self, sender: PeerId, body: bytes) -> bytes:
        del sender
        request = CertificateRequest.decode(body)
        self._check_run(request.run)
        found = self.ledger.since(request.round, min(request.count, 32))
        return Certificates(found).encode()

    async def _on_slice(self, sender: PeerId, header: bytes, incoming: Incoming) -> bytes:
        contribution = Contribution.decode(header)
        self._check_run(contribution.run)
        return await (await self._exchange_of(contribution.round, sender)).on_slice(
            sender, contribution, incoming
        )

    async def _on_merged(self, sender: PeerId, header: bytes, incoming: Incoming) -> bytes:
        result = PartResult.decode(header)
        return await (await self._exchange_of(result.round, sender)).on_merged(
            sender, result, incoming
        )

    async def _exchange_of(self, round_: int, sender: PeerId) -> Exchange:
        self.membership.on_contact(sender, self.now())
        if round_ > self.replica.place.round:
            await self._reach(round_, sender)
        if round_ != self.exchange.round:
            raise RemoteRefused("late", f"round {round_} is over here")
        return self.exchange

    async def _on_part(self, sender: PeerId, header: bytes) -> Outgoing:
        del sender
        request = PartRequest.decode(header)
        self._check_run(request.run)
        data = self.ledger.part(request.round, request.start, request.stop, request.digest)
        if data is None and request.round == self.exchange.round:
            for result, held in self.exchange.parts.values():
                if (result.start, result.stop, result.digest) == (
                    request.start,
                    request.stop,
                    request.digest,
                ):
                    data = held
        if data is None:
            raise RemoteRefused("gone", "this part is not kept here")
        return outgoing(data)

    # --- small things ------------------------------------------------------------------------------------

    async def _tell(self, peer: PeerId, envelope: bytes) -> None:
        try:
            await self.wiring.transport.call(peer, "announce", envelope, timeout=5.0)
        except Unreachable:
            self._unreachable(peer)
        except TransportError:
            return  # silence is noticed by itself
        else:
            self.membership.on_contact(peer, self.now())

    def _unreachable(self, peer: PeerId) -> None:
        self.membership.on_unreachable(peer, self.now())
        self._notice(peer)
        self._kick.set()

    def _notice(self, peer: PeerId) -> None:
        """Tell the hooks when the liveness of a peer has changed."""
        now = self.membership.liveness(peer, self.now())
        if (before := self._seen.get(peer)) is not now:
            self._seen[peer] = now
            self.hooks.peer(peer, now.value, before.value if before else "")

    def _check_run(self, run: bytes) -> None:
        if run != self.wiring.run:
            raise Stale("another run")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.wiring.spawn(coroutine)
