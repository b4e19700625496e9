"""Turns what an exchange finds out about its transfers into events of the round it belongs to."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from gossip.chain.auditor import AuditListener
from gossip.chain.missed import Missed
from gossip.chain.timing import Timing
from gossip.common import Wired
from gossip.exchange.listener import ExchangeListener
from gossip.exchange.retaining import needed
from gossip.hooks import Hooks
from gossip.plans.validity import PartKey, key_of
from gossip.rounds.instructions import Instruction
from gossip.rounds.round import Round
from protocols.errors import Contradiction, Late, RemoteProtocolError
from protocols.identity import PeerId
from protocols.messages import Gram, PartResult


class CarriesOut(Protocol):
    """Who does what a round instructs."""

    def carry_out(self, of: Round, instructions: list[Instruction]) -> None: ...


class Reports(Wired, CarriesOut, ExchangeListener, AuditListener):
    """Told by the exchange and the auditor, in front of the round under way."""

    hooks: Hooks
    round: Round
    timing: Timing
    missed: Missed

    def held(self, result: PartResult) -> None:
        self.timing.held_at = self.now()
        self.carry_out(self.round, self.round.on_held(result, self.now()))

    def fault(self, peer: PeerId, why: str) -> None:
        self.hooks.peer(peer, "fault", why)
        self.carry_out(self.round, self.round.on_fault(peer, self.now()))

    def declined(self, peer: PeerId, why: str) -> None:
        self.hooks.peer(peer, "fault", why)
        self.carry_out(self.round, self.round.on_declined(peer, self.now()))

    def lost(self, result: PartResult) -> None:
        self.carry_out(self.round, self.round.on_lost(result, self.now()))

    def refused(self, peer: PeerId, error: RemoteProtocolError) -> None:
        self.hooks.rejected(peer, error)
        self.round.on_refused(peer)

    def unpassed(self, relay: PeerId) -> None:
        self.refused(relay, Late("does not pass on a merged part"))
        self.missed.note_mute(relay, self.round.place.round)

    def unserved(self, relay: PeerId) -> None:
        self.missed.note_idle(relay, self.round.place.round)

    def weighed(self, gram: Gram) -> None:
        self.carry_out(self.round, self.round.on_products(gram, self.now()))

    def caught(self, peer: PeerId, why: str) -> None:
        self.round.membership.expel(peer)
        self.accuse(peer, Contradiction(f"it merged a part with {why}: expelled"))

    def accuse(self, peer: PeerId, error: Contradiction) -> None:
        """Tell the operator of a member that lies, and is expelled."""
        self.hooks.rejected(peer, error)
        self.hooks.peer(peer, "expelled", str(error))

    def unproven(self, peer: PeerId, error: Exception) -> None:
        self.hooks.peer(peer, "fault", f"it does not show what it has merged: {error}")

    def needed(self) -> set[PartKey]:
        """The parts that have to stay: what I have voted for, and what I may vote for."""
        agreement = self.round.agreement
        return needed(agreement.plan, agreement.voted and agreement.voted[1])

    def voted_for(self, result: PartResult) -> bool:
        """Whether I have voted for these very bytes."""
        voted, key = self.round.agreement.voted, key_of(result)
        parts = () if voted is None else voted[1].parts
        return any((key_of(r), r.digest) == (key, result.digest) for r in parts)

    def dropped(self, key: PartKey) -> None:
        self.round.agreement.held.pop(key, None)

    def behind(self, peer: PeerId) -> bool:
        return self.round.company.behind(peer)

    def doubtful(self) -> Set[PeerId]:
        return self.missed.doubtful()

    def mute(self) -> Set[PeerId]:
        return self.missed.mute(self.round.place.round)
