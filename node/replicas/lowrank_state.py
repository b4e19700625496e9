"""The outer state where gradients travel as thin factors: PowerSGD in rounds of one mean each.

Mode ``allreduce`` with ``outer.optimizer = "powersgd"`` (:mod:`diloco.lowrank`). A round's vector
holds one factor of each matrix, and the rest of the gradient as it is. The basis that everybody
projects on is what the round before came to, so it is outer state like the moments: in the digest,
in a newcomer's download, in checkpoints. Nothing has to be agreed on when members come or go, and a
round that fails leaves all of it as it was.

What an island's own factors do not say of its gradient stays its own (:class:`FactorErrors`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from diloco import lowrank
from node.replicas.gradient_state import GradientReplica
from node.replicas.replica import gaps
from node.replicas.residual import Delta, Residual
from node.trainer.layout import Entry
from protocols.codecs import Chunk, RangeCodec
from protocols.identity import PeerId
from protocols.messages import Outcome

BASES = "bases"  # among the vectors of the outer state


def plan_of(entries: Sequence[Entry], rank: int) -> lowrank.Plan:
    """What of a model travels as factors; raises ValueError where no matrix is large enough."""
    return lowrank.Plan.of([(entry.offset, entry.shape) for entry in entries], rank)


class LowRankReplica(GradientReplica):
    """As :mod:`node.replicas.gradient_state`; elements of rounds are those of factors.

    A part that nobody could complete is certified as empty: there the common gradient is zero.
    """

    def __init__(self, *state: Any, plan: lowrank.Plan, edges: Sequence[int] | None = None) -> None:
        super().__init__(*state, edges=edges)
        self.plan = plan
        self.codec = RangeCodec(self.codec.name, plan.kept)
        self.vectors[BASES] = lowrank.first_bases(plan, self.manifest.seed)
        self._own = torch.zeros(plan.size)  # what is sent of the snapshot that is out
        self._mean = torch.zeros(plan.size)  # of the round that is being applied

    @property
    def size(self) -> int:
        """Elements of a round's vector."""
        return self.plan.size

    @property
    def bases(self) -> torch.Tensor:
        """The basis that the next round's factors are made with, as the last round left it."""
        return self.vectors[BASES]

    def new_residual(self) -> Residual:
        """Zeros; always, since a few columns never say everything."""
        return FactorErrors(self)

    def norm(self) -> float:
        """Norm of the factors of a new snapshot, which are made here."""
        errors = self.residual
        self._own = lowrank.contribution(
            self.plan,
            self.place.round,
            self.bases,
            self.sent,
            torch.zeros_like(self.sent) if errors is None else errors.values,
            0.0 if errors is None else errors.decay,
        )
        return super().norm()

    def _progress(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(self._own[start:stop])

    def _merge(self, here: slice, mean: torch.Tensor, rates: Any) -> None:
        """Gather the parts until all are there: a product takes both factors whole."""
        self._mean[here] = mean

    def _finish(self, mine: list[tuple[int, int]], outcome: Outcome) -> None:
        if any(part.digest for part in outcome.parts):
            rates = self._rates(outcome)
            factors = lowrank.expanded(self.plan, outcome.round, self.bases, self._mean)
            for here, gradient in factors:
                super()._merge(here, gradient, rates)
        # also after a round of nothing: the next one projects on bases of the other side
        lowrank.turn(self.plan, outcome.round, self.bases, self._mean, self.manifest.seed)
        self._mean.zero_()


class FactorErrors(Residual):
    """The part of this island's gradients that no factors have carried yet: e, float32 [N].

    It goes into the factors where they are made, so there is nothing to add to a round's vector.
    """

    def __init__(self, replica: LowRankReplica) -> None:
        super().__init__(len(replica.base), replica.manifest.rounds.feedback)
        self.replica = replica

    def add_to(self, delta: torch.Tensor, start: int) -> torch.Tensor:
        """It is in there already."""
        return delta

    def note_lost(
        self, codec: RangeCodec, chunk: Chunk, mean: torch.Tensor, data: torch.Tensor, share: float
    ) -> None:
        """The codecs that are allowed lose too little to be sent later."""

    def settle(self, outcome: Outcome, me: PeerId, codec: RangeCodec, delta: Delta) -> None:
        """The round is committed with a gradient of mine: what was not merged of it is kept."""
        one = self.replica
        counted = delta(0, one.size, torch.empty(one.size))
        for start, stop in gaps(one.merged_of_mine(outcome), one.size):
            counted[start:stop] = 0.0
        plan, round_, bases = one.plan, outcome.round, one.bases
        lowrank.keep_lost(plan, round_, bases, one.sent, counted, self.values, self.decay)

    def settle_unseen(self, merged: Sequence[tuple[int, int]]) -> None:
        """Of these values, what that round's factors could carry was merged; the rest is kept."""
        one, nothing = self.replica, torch.zeros_like(self.values)
        plan, round_, bases = one.plan, one.place.round, one.bases
        said = lowrank.contribution(plan, round_, bases, nothing, self.values, self.decay)
        for start, stop in gaps(merged, one.size):
            said[start:stop] = 0.0
        lowrank.keep_lost(plan, round_, bases, nothing, said, self.values, self.decay)
