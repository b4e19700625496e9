"""How a chain's rounds stand, for whoever trains, chooses knobs or watches."""

from __future__ import annotations

from gossip.chain.auditor import Auditor
from gossip.chain.missed import Missed
from gossip.chain.timing import Timing
from gossip.exchange.exchange import Exchange
from gossip.exchange.ledger import Ledger
from gossip.plans.ladder import Chosen
from gossip.rounds.earlier import Earlier
from protocols.identity import PeerId


class RoundFacts:
    """What a :class:`gossip.chain.chain.Chain` can be asked about its rounds."""

    exchange: Exchange
    ledger: Ledger
    timing: Timing
    missed: Missed
    auditor: Auditor

    @property
    def codec(self) -> str | None:
        """The codec of the newest round, None if that is not known."""
        newest = self.ledger.newest()
        return newest.outcome.codec if newest is not None else None

    @property
    def round_s(self) -> float:
        """Usual seconds from commit to commit."""
        return self.timing.round_s

    @property
    def chosen(self) -> Chosen | None:
        """How the codec of the newest round was chosen; None where the run has only one."""
        return self.timing.chosen

    @property
    def under_way(self) -> bool:
        """Whether the round under way has a plan."""
        return self.exchange.plan is not None

    @property
    def contributes(self) -> bool:
        """Whether this node's work is ready for the round under way, or in it.

        Also before there is a plan: the leader may have heard of the work, and plan with it later.
        """
        return self.exchange.offered and not self.exchange.closed

    @property
    def has_work(self) -> bool:
        """Whether this node's work may still be merged: as long as it may be sent."""
        return self.contributes

    @property
    def in_doubt(self) -> frozenset[PeerId]:
        """Nobody: what was merged is in the certificate, and what was not is still here."""
        return frozenset()

    async def settle(self) -> None:
        """Nothing is given away that might be lost: see :attr:`in_doubt`."""

    def timed(self) -> list[float]:
        """Seconds of the exchange that has just ended, from its plan to its last merged part."""
        took = self.timing.held_at - self.timing.planned_at
        return [took] if took > 0 else []

    def before(self, round_: int) -> Earlier:
        """What is known of the rounds before this one."""
        return Earlier(
            self.timing.round_s,
            self.timing.ladder,
            self.missed.rounds(round_),
            self.missed.unreliable(round_) | self.auditor.suspended(round_),
            self.missed.idle(round_),
        )
