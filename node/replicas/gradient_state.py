"""The outer state where islands send gradients: mode ``allreduce``, data parallelism every step.

The pseudo-gradient is the gradient and the outer optimizer is the only one there is, so its moments
are what all members have in common: they are in the digest, in a joiner's download and in
checkpoints like any outer state. ``sent`` holds an island's gradient at ``base``; what does not get
into its round is worth nothing in the next, and the trainer drops it.

Learning rate, betas, epsilon and decay are those of the table ``inner``; a round is a step.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from diloco import optimizers
from node.replicas.replica import OuterReplica
from node.schedule import learning_rate


class GradientReplica(OuterReplica):
    """As :class:`~node.replicas.replica.OuterReplica`; matrices, which decay, come first."""

    def _progress(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        out.copy_(self.sent[start:stop])
        if self.rule.brings is not None:
            vectors = {name: self.vectors[name][start:stop] for name in self.rule.vectors}
            self.rule.brings(vectors, out, self._rates_of(self.place.round))
        return out

    def _set_back(self, merged: list[tuple[int, int]]) -> None:
        """There is no work that could count later."""

    def _merge(self, here: slice, mean: torch.Tensor, rates: optimizers.Rates) -> None:
        if here.start >= self.dense:
            rates = replace(rates, decay=0.0)
        super()._merge(here, mean, rates)

    def _rates_of(self, round_: int) -> optimizers.Rates:
        inner = self.manifest.inner
        beta1, beta2 = inner.betas
        return optimizers.Rates(
            learning_rate(inner, round_),
            beta1,
            round_ + 1,
            beta2=beta2,
            epsilon=inner.eps,
            decay=inner.weight_decay,
            warmup=self.manifest.outer.warmup_rounds,
        )
