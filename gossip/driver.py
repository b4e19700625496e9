"""A member of the swarm: the thin asyncio driver around rounds, exchanges and membership.

It carries out what :class:`gossip.round.Round` instructs, feeds it what arrives, and moves from
round to round. What a round means for parameters is the :class:`Replica`'s business.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from gossip.bodies import Wiring
from gossip.catchup import Ending
from gossip.exchange import Exchange
from gossip.following import Following
from gossip.ledger import Ledger, stored
from gossip.lineage import Lineage, prove
from gossip.membership import Membership
from gossip.planning import Rules
from gossip.presence import Presence
from gossip.round import CatchUp, Commit, Instruction, Round, Send, Work
from gossip.service import Service
from gossip.validity import PartKey, Place, key_of
from protocols.errors import (
    RemoteProtocolError,
    RemoteRefused,
    TransferStalled,
    TransportError,
    Unreachable,
    Why,
)
from protocols.identity import PeerId
from protocols.messages import (
    Announce,
    Certificate,
    Gram,
    PartResult,
    Plan,
    Prepare,
    Promise,
    Suspect,
    Vote,
)
from protocols.wire import decode_any

ADVANCE_WAIT_S = 5.0  # a message for the next round may arrive while this one is applied
JUMP_S = 1.0  # the loop stood still for so long: this process was stopped
AMNESIA_S = 5.0  # a restarted member listens for so long how far the swarm is
TRIES = 3  # of a control message
TICK_S = 0.005


class Replica(Protocol):
    """The outer state at this node."""

    @property
    def place(self) -> Place: ...

    @property
    def roster(self) -> tuple[PeerId, ...]: ...

    def delta(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        """This island's pseudo-gradient (:class:`gossip.slicing.Source`)."""
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
    ledger_directory: Path | None = None  # for parts of rounds that have no room in memory
    known_lineage: InitVar[Lineage | None] = None  # of a state that was fetched or restored
    new_identity: bool = False  # made just now: nobody can have promised anything under it
    round: Round = field(init=False)
    exchange: Exchange = field(init=False)
    ledger: Ledger = field(init=False)
    lineage: Lineage = field(init=False)
    following: Following = field(init=False)
    round_s: float = 0.0  # usual seconds from commit to commit
    planned_at: float = 0.0  # when the round under way got its first plan
    held_at: float = 0.0  # when its newest merged part was here
    _kick: asyncio.Event = field(default_factory=asyncio.Event)
    _moved: asyncio.Condition = field(default_factory=asyncio.Condition)
    _advancing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _last_commit: float | None = None
    _started: float = field(init=False)
    _abstain_until: float = field(init=False)
    _forgotten: int = -1  # in rounds up to this one we may have voted before a restart

    def __post_init__(self, known_lineage: Lineage | None) -> None:
        self.ledger = Ledger(self.keep_rounds, self.rules.size, self.ledger_directory)
        self.lineage = known_lineage or Lineage(self.wiring.run, self.replica.roster)
        self._started = self.now()
        forgetful = self.status.status == "joining" and not self.new_identity
        self._abstain_until = self._started + AMNESIA_S if forgetful else 0.0
        roster = self.replica.roster
        if self.replica.place.round > 0 and self.me in roster and len(roster) > 1:
            self._forgotten = self.replica.place.round
        self.following = Following(
            self.wiring,
            self.rules.shape,
            self.membership,
            lambda: (self.replica.place, self.replica.roster),
            self._settled,
            self._advancing.locked,
            self._held,
            lambda certificate, parts: self._advance(certificate, parts, None),
            self._prove,
            self.hooks.rejected,
            self.hooks.behind,
        )
        self.presence.place = self._announced_place
        self.presence.on_news = self._on_news
        self.presence.on_change = self._on_change
        self.presence.on_rejected = self.hooks.rejected
        self._open_round()
        Service(self)

    @property
    def me(self) -> PeerId:
        return self.wiring.identity.peer_id

    def now(self) -> float:
        return self.wiring.now()

    @property
    def codec(self) -> str | None:
        """The codec of the newest round, None if that is not known."""
        newest = self.ledger.newest()
        return newest.outcome.codec if newest is not None else None

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
        if changes.get("ready"):
            self.exchange.prepare(changes.get("norm", 0.0))
        self._kick.set()
        self.presence.tell()

    async def move(
        self,
        jump: Callable[[], Awaitable[None]],
        certificate: Certificate | None,
        lineage: Lineage,
    ) -> None:
        """Put the replica elsewhere in the chain (a state download), and start over there.

        ``jump`` does it, once nothing reads the replica any more. ``certificate`` is the newest
        one there and ``lineage`` leads to it, for those who ask on what we build.
        """
        async with self._advancing:
            before = self.round.place
            await self.exchange.stop()
            await jump()
            place = self.replica.place
            if (place.round, place.previous) == (before.round, before.previous):
                self._forgotten = max(self._forgotten, place.round)  # votes count, and are lost
            self.ledger.clear()
            self.lineage = lineage
            if certificate is not None:
                self.ledger.add(certificate, {})
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

    async def reach(self, round_: int, sender: PeerId) -> None:
        """Wait until this node has come to ``round_``. Raises RemoteRefused ``behind``."""
        if round_ > self.replica.place.round + 1 or not self._advancing.locked():
            self.following.begin((sender,))
        try:
            async with asyncio.timeout(ADVANCE_WAIT_S), self._moved:
                await self._moved.wait_for(lambda: self.replica.place.round >= round_)
        except TimeoutError:
            raise RemoteRefused("behind", f"still in round {self.replica.place.round}") from None

    # --- loops -----------------------------------------------------------------------------------

    async def _ticks(self) -> None:
        while True:
            now = self.now()
            self.carry_out(self.round, self.round.tick(now))
            wake = self.round.wake_at(now)
            self._kick.clear()
            try:
                async with asyncio.timeout(max(TICK_S, wake - now)):
                    await self._kick.wait()
                await asyncio.sleep(TICK_S)  # the rest of what comes at the same moment
            except TimeoutError:
                late = self.now() - wake
                if late > JUMP_S:
                    self.membership.forgive(late)
                    await asyncio.sleep(0.05)  # hear first what was said in the meantime

    # --- instructions ----------------------------------------------------------------------------

    def carry_out(self, of: Round, instructions: list[Instruction]) -> None:
        """Do what a round instructs."""
        for instruction in instructions:
            match instruction:
                case Send(to, message):
                    self.wiring.spawn(self._send(of, to, message))
                case Work(plan):
                    if of is self.round:
                        if self.exchange.plan is None:
                            self.planned_at = self.now()
                        self.exchange.work(plan)
                case Commit(certificate):
                    self.wiring.spawn(self._commit(of, certificate))
                case CatchUp(peers):
                    self.following.begin(peers)

    async def _send(
        self, of: Round, to: PeerId, message: Plan | Prepare | Vote | Suspect | Gram
    ) -> None:
        body = message.encode()
        patience = max(1.0, self.rules.patience_s)
        for left in reversed(range(TRIES)):
            try:
                reply = await self.wiring.transport.call(
                    to, "round", body, timeout=patience, max_reply=Certificate.MAX_BYTES
                )
            except TransferStalled:
                if of.finished:
                    return
                continue
            except Unreachable as error:
                if error.why is Why.RESET and left and not of.finished:
                    continue
                self.presence.unreachable(to)
                return
            except TransportError:
                return  # refused: it knows better, or cannot now
            self.presence.contact(to)
            if reply and of is self.round:
                try:
                    answer = decode_any(reply, Promise, Certificate)
                    self.carry_out(of, of.on_message(to, answer, self.now()))
                except RemoteProtocolError as error:
                    self.hooks.rejected(to, str(error))
            return

    async def _commit(self, of: Round, certificate: Certificate) -> None:
        parts = {key[:2]: data for key, (_, data) in self._certified(certificate).items()}
        await self._advance(certificate, parts, self.exchange if of is self.round else None)

    def _certified(
        self, certificate: Certificate
    ) -> dict[PartKey, tuple[PartResult, torch.Tensor]]:
        wanted = {key_of(result): result.digest for result in certificate.outcome.parts}
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
            self.ledger.add(certificate, parts)  # first: whoever hears that we moved on may ask
            await self.exchange.stop()
            await self.replica.apply(certificate, parts)
            self.lineage.add(certificate)
            now = self.now()
            if self._last_commit is not None:
                gap = now - self._last_commit
                self.round_s += (0.3 if self.round_s else 1.0) * (gap - self.round_s)
            self._last_commit = now
            self.presence.note(ready=False)
            self._open_round()
            in_office = self.me in self.replica.roster and not self.round.forgot
            if self.status.status == "joining" and in_office:
                self.presence.note(status="active")
            self.hooks.applied(certificate, exchange)
        await self._announce_move()
        await self._store_excess()

    async def _store_excess(self) -> None:
        """Move parts that have no room in memory to files."""
        directory = self.ledger_directory
        if directory is None:
            return
        for round_, parts in self.ledger.excess():
            store = partial(stored, parts, directory)
            try:
                self.ledger.replace(round_, parts, await self.wiring.offload(store))
            except OSError:  # no space: whoever missed the round downloads the state
                self.ledger.replace(round_, parts, None)

    async def _announce_move(self) -> None:
        self._kick.set()
        self.presence.tell()
        async with self._moved:
            self._moved.notify_all()

    async def _settled(self) -> None:
        async with self._advancing:
            return

    async def _prove(self, claim: Announce) -> None:
        """Have a peer prove the place it stands at. Raises RemoteProtocolError, TransportError."""
        await prove(
            self.wiring.transport,
            claim.peer,
            self.wiring.run,
            self.lineage.founders,
            (claim.round, claim.head, claim.work),
            self.wiring.offload,
        )

    def _announced_place(self) -> Place:
        """Our place; without its state, which would bring us into office, while we abstain."""
        place = self.replica.place
        if self.now() < self._abstain_until and self.me not in self.replica.roster:
            return replace(place, state=b"")
        return place

    def _listening(self) -> bool:
        """Whether this node has restarted just now, and does not know yet how far the swarm is."""
        return self._forgotten >= 0 and self.now() < self._started + AMNESIA_S

    def _open_round(self) -> None:
        place = self.replica.place
        if self._listening():
            self._forgotten = max(self._forgotten, place.round)
        forgot = place.round <= self._forgotten
        if forgot and self.status.status == "active":
            self.presence.note(status="joining")  # nobody shall wait for our vote
        self.round = Round(
            self.wiring.identity,
            place,
            self.replica.roster,
            self.membership,
            self.rules,
            self.now(),
            self.round_s,
            lambda: self.status,
            self._abstain_until,
            forgot,
            self.codec,
        )
        self.exchange = Exchange(self.wiring, place, self.rules.shape, self.replica, self)

    # --- what an exchange reports ----------------------------------------------------------------

    def held(self, result: PartResult) -> None:
        self.held_at = self.now()
        self.carry_out(self.round, self.round.on_held(result, self.now()))

    def fault(self, peer: PeerId, why: str) -> None:
        self.hooks.peer(peer, "fault", why)
        self.carry_out(self.round, self.round.on_fault(peer, self.now()))

    def lost(self, result: PartResult) -> None:
        self.carry_out(self.round, self.round.on_lost(result, self.now()))

    def refused(self, peer: PeerId, why: str) -> None:
        self.hooks.rejected(peer, why)

    def weighed(self, gram: Gram) -> None:
        self.carry_out(self.round, self.round.on_products(gram, self.now()))

    def _held(self, key: PartKey) -> tuple[PartResult, torch.Tensor] | None:
        return self.exchange.parts.get(key)

    # --- news of others --------------------------------------------------------------------------

    def _on_news(self, announce: Announce) -> None:
        self.hooks.learned(announce)
        if self._listening() and announce.peer in self.replica.roster:
            self._forgotten = max(self._forgotten, announce.round)
        self.following.compare(announce)
        self._kick.set()

    def _on_change(self, peer: PeerId, now: str, before: str) -> None:
        self.hooks.peer(peer, now, before)
        self._kick.set()
