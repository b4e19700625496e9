"""The rounds of one fragment at one member: the asyncio driver around rounds and exchanges.

It carries out what :class:`gossip.rounds.round.Round` instructs, feeds it what arrives, and moves
from round to round. What a round means for parameters is the :class:`~gossip.hooks.Replica`'s
business. Every fragment of a model has a chain of its own, with its own roster, certificates and
faults; what they share is the link, and who is there (:mod:`gossip.chain.swarm`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import torch

from gossip.catchup.approach import Approach
from gossip.catchup.claims import Shown
from gossip.catchup.following import Following, is_further
from gossip.catchup.lineage import Claim, Lineage, prove
from gossip.chain.attempts import Attempts
from gossip.chain.auditor import Auditor
from gossip.chain.forgetting import Forgetting
from gossip.chain.missed import Missed
from gossip.chain.own_status import OwnStatus
from gossip.chain.promises import PromiseRecord, Promises
from gossip.chain.reports import Reports
from gossip.chain.round_facts import RoundFacts
from gossip.chain.sending import ControlSender
from gossip.chain.timing import Timing
from gossip.exchange.exchange import Exchange
from gossip.exchange.ledger import Ledger
from gossip.hooks import Hooks, Replica
from gossip.membership.members import Membership
from gossip.membership.presence import Presence
from gossip.membership.standing import seen_from
from gossip.place import Place
from gossip.plans.rules import Rules
from gossip.rounds.agreement import NONE
from gossip.rounds.gathering import Gathering
from gossip.rounds.holding import Holding
from gossip.rounds.instructions import (
    Accuse,
    Broadcast,
    CatchUp,
    Commit,
    FollowPlan,
    Instruction,
    Send,
)
from gossip.rounds.round import Round
from gossip.rounds.spreading import legs, passed
from gossip.rounds.trial import Trial
from gossip.wiring import Wiring
from protocols.errors import RemoteRefused
from protocols.identity import PeerId
from protocols.messages import Announce, Certificate, PartResult, Passed, Plan, Promise

ADVANCE_WAIT_S = 5.0  # a message for the next round may arrive while this one is applied
TICK_S = 0.005


@dataclass
class Chain(Reports, Attempts, OwnStatus, RoundFacts):
    """This node's part in the rounds of one fragment. :meth:`run` runs until cancelled.

    Its bases have what it is told by the exchange of a round (:class:`Reports`), the plans it works
    by (:class:`Attempts`), what it announces of itself (:class:`OwnStatus`), and what others ask
    about its rounds (:class:`RoundFacts`).

    ``wiring.codec`` is the fragment's, and so is everything else but ``presence`` and ``hooks``.
    """

    wiring: Wiring
    replica: Replica
    rules: Rules
    presence: Presence
    hooks: Hooks
    keep_rounds: int = 5
    ledger_directory: Path | None = None  # for parts of rounds that have no room in memory
    known_lineage: InitVar[Lineage | None] = None  # of a state that was fetched or restored
    new_identity: bool = False  # made just now: nobody can have promised anything under it
    record: PromiseRecord | None = None  # of what was promised; None: nothing outlives the process
    gathering: Gathering = field(default_factory=Gathering)  # whom a run's creator waits for
    late_s: Callable[[], float] = lambda: 0.0  # for which the trainer should have taken a move in
    round: Round = field(init=False)
    exchange: Exchange = field(init=False)
    ledger: Ledger = field(init=False)
    lineage: Lineage = field(init=False)
    following: Following = field(init=False)
    sending: ControlSender = field(init=False)  # of control messages
    membership: Membership = field(init=False)  # who else is there, seen from this fragment
    timing: Timing = field(default_factory=Timing)
    signed_plan: Passed | None = None  # the newest that was adopted, as its leader signed it
    _kick: asyncio.Event = field(default_factory=asyncio.Event)
    _moved: asyncio.Condition = field(default_factory=asyncio.Condition)
    _advancing: asyncio.Lock = field(default_factory=asyncio.Lock)
    missed: Missed = field(default_factory=Missed)
    trial: Trial | None = field(init=False)
    _holding: Holding = field(default_factory=Holding)
    _forgetting: Forgetting = field(init=False)
    promises: Promises = field(init=False)
    auditor: Auditor = field(init=False)

    def __post_init__(self, known_lineage: Lineage | None) -> None:
        place, roster, size = self.replica.place, self.replica.roster, self.rules.size
        self.fragment = place.fragment
        self.membership = self.presence.membership.seen_from(self.fragment)
        self.ledger = Ledger(self.keep_rounds, size, self.ledger_directory)
        self.lineage = known_lineage or Lineage(self.wiring.run, roster, self.fragment)
        self._forgetting = Forgetting(
            self.now(),
            place.round,
            joining=self.status.status == "joining",
            new_identity=self.new_identity,
            among_others=self.me in roster and len(roster) > 1,
            promised=self.record.promised if self.record is not None else None,
        )
        self.trial = Trial() if self.rules.strangers else None
        self.promises = Promises(
            self.record,
            self.wiring,
            lambda error: self.hooks.rejected(self.me, error),
            lambda round_: round_ < self.replica.place.round,
        )
        self.following = Following(
            self.wiring,
            self.rules.shape,
            self.membership,
            place=lambda: (self.replica.place, self.replica.roster),
            settled=self._settled,
            busy=self._advancing.locked,
            held=self._bytes_of,
            advance=lambda certificate, parts: self._advance(certificate, parts, None),
            prove=self._prove,
            rejected=self.hooks.rejected,
            behind=lambda ending: self.hooks.behind(self.fragment, ending),
            approach=Approach(
                self.rules.encoded_bytes(self.rules.codecs[0], 0, size), self.rules.state_bytes
            ),
            link=lambda: self.presence.status.download,
        )
        self.sending = ControlSender(
            self.wiring, self.presence, self.membership, self._answered, self.hooks.rejected,
            Round.on_unpromised,
        )  # fmt: skip
        self.auditor = Auditor(self.wiring, self.rules.mix, self.ledger.part, self)
        self._open_round()

    # --- for whoever owns this -------------------------------------------------------------------

    def update(self, **changes: Any) -> None:
        """Change what this node says of itself, and say it at once."""
        self.note(**changes)
        if changes.get("ready"):
            self.exchange.prepare(changes.get("norm", 0.0))
        self._kick.set()
        self.presence.tell()

    def wait_for_all(self) -> None:
        """Begin no round before all who ask for it have caught up: this member will leave soon."""
        self._holding.spend_all()
        self.gathering.end()
        self._kick.set()

    def kick(self) -> None:
        """Something has changed: check what is due."""
        self._kick.set()

    async def move(
        self,
        jump: Callable[[], Awaitable[None]],
        to: Place,
        certificate: Certificate | None,
        lineage: Lineage,
        *,
        diverged: bool = False,
        forked: bool = False,
    ) -> None:
        """Put the replica elsewhere in the chain (a state download), and start over there.

        ``jump`` does it, once nothing reads the replica any more. ``certificate`` is the newest
        one there and ``lineage`` leads to it, for peers that ask what we build on.

        Nothing happens if this node has come as far by itself since the download began: if both
        sides of a fork moved, each would end on the other's chain. ``diverged``: the place is the
        same, and only the state is replaced, by the one that most have there. ``forked``: the chain
        there does not go through the round under way here.
        """
        async with self._advancing:
            before = self.round.place
            same = diverged and to.previous == before.previous
            if not same and not is_further(before, to.round, to.previous, to.work):
                return
            await self.exchange.stop()
            if same or forked:
                self._abandon()
            await jump()
            place = self.replica.place
            if (place.round, place.previous) == (before.round, before.previous):
                self._forgetting.heard(place.round)  # we may have voted in it, and forgot it
            self._forgetting.again(self.record.promised if self.record is not None else None)
            self.ledger.clear()
            self.lineage = lineage
            if certificate is not None:
                self.ledger.add(certificate, {})
            self.note(ready=False)  # the work that was ready belongs to another place
            if self.trial is not None and not same:
                self.trial = Trial()  # the rounds in between may have shown something of anybody
            if not same:
                self.timing.leapt()
            self._open_round()
            if not same:
                self._take_office()
        self.hooks.moved()
        await self._announce_move()

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """No round is applied while this is held: the replica can be read as a whole."""
        async with self._advancing:
            yield

    async def reach(self, round_: int, sender: PeerId) -> None:
        """Wait until this node has come to ``round_``. Raises RemoteRefused ``behind``."""
        if round_ > self.replica.place.round + 1 or not self._advancing.locked():
            self.following.begin((sender,))
        try:
            async with asyncio.timeout(ADVANCE_WAIT_S), self._moved:
                await self._moved.wait_for(lambda: self.replica.place.round >= round_)
        except TimeoutError:
            raise RemoteRefused("behind", f"still in round {self.replica.place.round}") from None

    async def run(self) -> None:
        """Do what is due when it is due, until cancelled."""
        if self.new_identity:
            await self.promises.begin()
        told: frozenset[PeerId] = frozenset()  # who was reported as waited for
        while True:
            now = self.now()
            self._ask_to_wait()
            self._say_stuck()
            self.carry_out(self.round, self.round.tick(now))
            self._say_epoch()
            awaited = frozenset(self._holding.awaited)
            for peer in awaited - told:
                self.hooks.peer(peer, "awaited", "it cannot catch up by itself")
            told = awaited
            wake = max(self.round.wake_at(now), now + TICK_S)
            self._kick.clear()
            try:
                async with asyncio.timeout(wake - now):
                    await self._kick.wait()
                # let whatever comes at the same moment come in first
                await asyncio.sleep(max(TICK_S, self.round.telling.unhurried_s()))
            except TimeoutError:
                pass
            if self.now() > wake and self.presence.woke_late(wake):
                await asyncio.sleep(0.05)  # first take in what was sent in the meantime

    # --- instructions ----------------------------------------------------------------------------

    def carry_out(self, of: Round, instructions: list[Instruction]) -> None:
        """Do what a round instructs, once it is on disk that this round has a promise of mine."""
        if instructions:
            bound = of.place.at if of.agreement.promised > NONE else None
            self.promises.once_on_disk(bound, lambda: self._carry_out(of, instructions))

    def _carry_out(self, of: Round, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(to, message):
                    self.sending.tell(of, (to,), message)
                case Broadcast(peers, message):
                    note = passed(self.wiring.identity, self.wiring.run, message)
                    if isinstance(message, Plan) and of is self.round:
                        self.signed_plan = note
                    for leg in legs(peers):
                        self.sending.tell(of, leg, note)
                case FollowPlan(plan) if of is self.round:
                    self._follow(plan)
                case Commit(certificate):
                    self.wiring.spawn(self._commit(of, certificate))
                case CatchUp(peers):
                    self.following.begin(peers, vouched=True)
                case Accuse(peer, error):
                    self.accuse(peer, error)

    def _answered(self, of: Round, peer: PeerId, answer: Promise | Certificate) -> None:
        if of is self.round:
            self.carry_out(of, of.on_message(peer, answer, self.now()))

    async def _commit(self, of: Round, certificate: Certificate) -> None:
        parts = self.exchange.certified(certificate)
        if parts is None:  # those who voted have them
            voters = tuple(vote.voter for vote in certificate.votes)
            self.following.begin(voters, vouched=True)
            return
        await self._advance(certificate, parts, self.exchange if of is self.round else None)

    async def _advance(
        self,
        certificate: Certificate,
        parts: dict[tuple[int, int], torch.Tensor],
        exchange: Exchange | None,
    ) -> None:
        async with self._advancing:
            if certificate.outcome.previous != self.replica.place.previous:
                return  # somebody was quicker
            self.ledger.add(certificate, parts)  # first: peers that hear we moved on may ask for it
            ended = self.exchange
            self.auditor.ending(certificate, ended)
            await ended.stop()
            self._stepping_since = self.now()
            await self.replica.apply(certificate, parts)
            self._stepping_since = None
            self.lineage.add(certificate)
            self.missed.note(certificate.outcome, self.round.company.owners)
            if self.trial is not None:
                self.trial.note(certificate)
            plan = exchange.plan if exchange is not None else None
            now = self.now()
            members = [self.status, *self.membership.members_alive(now)]
            self.timing.committed(now, certificate, plan, self.rules, members)
            self.note(ready=False)
            self._open_round()
            self._take_office()
            self.hooks.applied(certificate, exchange)
            self.auditor.ended(certificate, ended, replayed=exchange is None)
        await self._announce_move()
        await self.ledger.make_room(self.wiring.offload)

    async def _announce_move(self) -> None:
        self._kick.set()
        self.presence.tell()
        async with self._moved:
            self._moved.notify_all()

    async def _settled(self) -> None:
        async with self._advancing:
            return

    async def _prove(self, claim: Announce, shown: Shown) -> None:
        """Have a peer prove the place it stands at. Raises RemoteProtocolError, TransportError."""
        await prove(
            self.wiring.transport,
            claim.peer,
            self.wiring.run,
            self.lineage.founders,
            Claim(claim.round, claim.head, claim.work),
            self.wiring.offload,
            fragment=self.fragment,
            known=self.lineage,
            shown=shown,
        )

    def _open_round(self) -> None:
        place = self.replica.place
        self._holding.over(self.now())
        if self._forgetting.listening(self.now()):
            self._forgetting.heard(place.round)
        forgot = self._forgetting.forgot(*place.at)
        self._leave_office(forgot=forgot)
        self.timing.stand(self.codec)
        self.note(epoch=0)
        self.round = Round(
            self.wiring.identity,
            place,
            self.replica.roster,
            self.membership,
            self.rules,
            opened=self.now(),
            earlier=self.before(place.round),
            myself=lambda: self.status,
            abstain_until=self._forgetting.abstain_until,
            forgot=forgot,
            holding=self._holding,
            changes_sides=lambda: self.following.changes_sides,
            trial=self.trial,
            gathering=self.gathering,
        )
        # a plan may count on what this member had before it was started again
        self.exchange = Exchange(
            self.wiring, place, self.rules.shape, self.replica, self, withheld=True
        )
        self.signed_plan = None  # a plan of a fork's other side could have the same number

    async def _bytes_of(self, result: PartResult) -> torch.Tensor | None:
        return await self.exchange.merged.part(result)

    # --- news of others --------------------------------------------------------------------------

    def on_news(self, announce: Announce) -> None:
        """A peer has announced something new."""
        seen = seen_from(announce, self.fragment)
        roster = self.replica.roster
        if self._forgetting.listening(self.now()) and seen.peer in roster:
            self._forgetting.claimed(seen.peer, seen.round, len(roster))
        self._take_office_again(seen)
        self.round.on_news(seen)
        if not self.round.awaits(seen.head, self.now()):
            self.following.compare(seen)
        self._kick.set()
