"""Attempts at a round: the plans that a member works by, and which of them come to nothing."""

from __future__ import annotations

from gossip.chain.timing import Timing
from gossip.common import Wired
from gossip.exchange.exchange import Exchange
from gossip.hooks import Hooks
from protocols.messages import Plan


class Attempts(Wired):
    """The part of a :class:`gossip.chain.chain.Chain` that works by plans, one after the other."""

    exchange: Exchange
    hooks: Hooks
    timing: Timing

    def _follow(self, plan: Plan) -> None:
        """Work by a plan. One of a higher ballot than before gives up what that has begun.

        The final plan of a draft has the draft's ballot: both are one attempt.
        """
        before = self.exchange.plan
        if before is None:
            self.timing.planned_at = self.now()
        self.exchange.work(plan)
        if self.exchange.plan is not plan or before is None:  # over already, or the first one
            return
        if (plan.epoch, plan.ballot) > (before.epoch, before.ballot):
            self.hooks.gave_up(before, plan)

    def _abandon(self) -> None:
        """The round under way is left for another chain, or begins anew from another state."""
        if (plan := self.exchange.plan) is not None:
            self.hooks.gave_up(plan, None)
