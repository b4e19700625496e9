"""A member of the swarm: the thin asyncio driver around rounds, exchanges and membership.

It carries out what :class:`gossip.round.Round` instructs, feeds it what arrives, and moves from
round to round. What a round means for parameters is the :class:`Replica`'s business.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from gossip.agreement import PartKey, Place
from gossip.catchup import Ending, catch_up
from gossip.certificate import heavier
from gossip.exchange import Exchange, Wiring, outgoing
from gossip.ledger import Ledger
from gossip.membership import Membership
from gossip.planning import Rules
from gossip.presence import Presence
from gossip.round import CatchUp, Commit, Instruction, Round, Send, Work
from protocols.errors import (
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
    """This node's part in the rounds of one run. :meth:`run` runs until cancelled."""

    wiring: Wiring
    replica: Replica
    rules: Rules
    presence: Presence
    hooks: Hooks
    keep_rounds: int = 5
    round: Round = field(init=False)
    exchange: Exchange = field(init=False)
    ledger: Ledger = field(init=False)
    round_s: float = 0.0  # usual seconds from commit to commit
    planned_at: float = 0.0  # when the round under way got its first plan
    _kick: asyncio.Event = field(default_factory=asyncio.Event)
    _moved: asyncio.Condition = field(default_factory=asyncio.Condition)
    _advancing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _catching_up: bool = False
    _last_commit: float | None = None
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.keep_rounds)
        self._started = self.now()
        self.presence.on_news = self._on_news
        self.presence.on_change = self._on_change
        self.presence.on_rejected = self.hooks.rejected
        self._open_round()
        transport = self.wiring.transport
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

    # --- for whoever owns this -------------------------------------------------------------------

    @property
    def status(self) -> Announce:
        """What this node says of itself."""
        return self.presence.status

    @property
    def membership(self) -> Membership:
        """Who else is there."""
        return self.presence.membership

    def update(self, **changes: Any) -> None:
        """Change what this node says of itself, and say it at once."""
        self.presence.note(**changes)
        self._kick.set()
        self.presence.tell()

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

    async def run(self) -> None:
        """Announce, tick, and keep the membership in order until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.presence.heartbeats())
            group.create_task(self._ticks())

    # --- loops -----------------------------------------------------------------------------------

    async def _ticks(self) -> None:
        while True:
            now = self.now()
            self._take_office_again(now)
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

    def _take_office_again(self, now: float) -> None:
        """A member that came back votes again once whatever it forgot is long settled.

        Usually the next commit has let it in by then; after a restart of the whole swarm there
        is nobody else to commit.
        """
        if (
            self.status.status == "joining"
            and self.me in self.replica.roster
            and now >= self._started + AMNESIA_S
            and not self._ahead()
        ):
            self.presence.note(status="active")

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
                self.presence.unreachable(to)
                return
            except TransportError:
                return  # refused: it knows better, or cannot now
            self.presence.contact(to)
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
                self.presence.note(status="active")
            self.presence.note(ready=False)
            self._open_round()
            self.hooks.applied(certificate, exchange)
        await self._announce_move()

    async def _announce_move(self) -> None:
        self._kick.set()
        self.presence.tell()
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

    # --- what an exchange reports ----------------------------------------------------------------

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

    # --- news of others --------------------------------------------------------------------------

    def _on_news(self, announce: Announce) -> None:
        self.hooks.learned(announce)
        self._compare(announce)
        self._kick.set()

    def _on_change(self, peer: PeerId, now: str, before: str) -> None:
        self.hooks.peer(peer, now, before)
        self._kick.set()

    def _compare(self, announce: Announce) -> None:
        """Notice that somebody is ahead, on a heavier chain, or has another state."""
        here = self.replica.place
        if self._is_ahead(announce):
            self._begin_catching_up((announce.peer,))
        elif announce.head == here.previous and announce.state != here.state:
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
            self._spawn(self._catch_up(peers))

    async def _catch_up(self, peers: tuple[PeerId, ...]) -> None:
        """Replay what ``peers`` and all who are ahead have; report it where that is not enough."""
        asked: set[PeerId] = set()
        ending = Ending.LEVEL
        try:
            async with self._advancing:
                pass  # what is being applied right now may be all we miss
            while sources := [peer for peer in (*peers, *self._ahead()) if peer not in asked]:
                asked.update(sources)
                ending = await catch_up(
                    self.wiring,
                    [peer for peer in sources if peer != self.me],
                    lambda: (self.replica.place, self.replica.roster),
                    self.exchange_part,
                    lambda certificate, parts: self._advance(certificate, parts, None),
                )
                if ending is Ending.LEVEL:
                    break
        finally:
            self._catching_up = False
        if ending in (Ending.GONE, Ending.FORKED) and (ahead := self._ahead()):
            forked = any(  # heavier, and yet not further: their chain is another one
                announce.round <= self.replica.place.round
                for peer in ahead
                if (announce := self.membership.announcement(peer)) is not None
            )
            self.hooks.behind(Ending.FORKED if forked else ending, tuple(ahead))

    def _ahead(self) -> list[PeerId]:
        """Live islands that are further than we are, or on a heavier chain."""
        return [
            announce.peer
            for announce in self.membership.islands_alive(self.now())
            if self._is_ahead(announce)
        ]

    def _is_ahead(self, announce: Announce) -> bool:
        here = self.replica.place
        newcomer = announce.status == "joining" and announce.peer not in self.replica.roster
        if announce.role != "island" or newcomer:
            return False
        if announce.work != here.work:  # work only grows along a chain
            return announce.work > here.work
        if announce.round != here.round:  # rounds to which nobody contributed
            return announce.round > here.round
        return announce.head != here.previous and heavier(
            (here.work, here.previous), (announce.work, announce.head)
        )

    def exchange_part(self, key: PartKey) -> tuple[PartResult, torch.Tensor] | None:
        """A part of the round under way that is held here."""
        return self.exchange.parts.get(key)

    # --- handlers --------------------------------------------------------------------------------

    async def _on_round(self, sender: PeerId, body: bytes) -> bytes:
        message = decode_any(body, Plan, Prepare, Vote, Suspect)
        self.presence.contact(sender)
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
        self.presence.contact(sender)
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

    # --- small things ----------------------------------------------------------------------------

    def _check_run(self, run: bytes) -> None:
        if run != self.wiring.run:
            raise Stale("another run")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.wiring.spawn(coroutine)
