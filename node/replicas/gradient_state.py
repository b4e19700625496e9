"""The outer state where islands send gradients: mode ``allreduce``, data parallelism every step.

The pseudo-gradient is the gradient and the outer optimizer is the only one there is, so its moments
are what all members have in common: they are in the digest, in a joiner's download and in
checkpoints like any outer state. ``sent`` holds an island's gradient at ``base``; what does not get
into its round is worth nothing in the next, and the trainer drops it.

Learning rate, betas, epsilon and decay are those of the table ``inner``; a round is a step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from diloco import optimizers
from node.replicas.replica import OuterReplica
from node.schedule import learning_rate
from node.trainer.layout import Entry
from node.trainer.optim import is_matrix


def decaying(entries: Iterable[Entry]) -> list[int]:
    """Where weight decay begins, ends, begins again, and so on, in the vector of these parameters.

    It is for those that the inner optimizers have it for, which follows from names and shapes.
    """
    edges: list[int] = []
    for entry in entries:
        if not is_matrix(entry.name, len(entry.shape)):
            continue
        if edges and edges[-1] == entry.offset:
            edges.pop()
        else:
            edges.append(entry.offset)
        edges.append(entry.offset + entry.size)
    return edges


class GradientReplica(OuterReplica):
    """As :class:`~node.replicas.replica.OuterReplica`; there is one fragment, the whole model."""

    def __init__(self, *state: Any, edges: Sequence[int] | None = None) -> None:
        """``edges``: see :func:`decaying`; without names all of two dims and more decays."""
        super().__init__(*state)
        self._edges = (0, self.dense) if edges is None else tuple(edges)

    def _progress(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        out.copy_(self.sent[start:stop])
        if self.rule.brings is not None:
            vectors = {name: self.vectors[name][start:stop] for name in self.rule.vectors}
            self.rule.brings(vectors, out, self._rates_of(self.place.round))
        return out

    def _set_back(self, merged: list[tuple[int, int]]) -> None:
        """There is no work that could count later."""

    def _merge(self, here: slice, mean: torch.Tensor, rates: optimizers.Rates) -> None:
        at, still = here.start, replace(rates, decay=0.0)
        while at < here.stop:
            passed = bisect_right(self._edges, at)
            stop = min([here.stop, *self._edges[passed : passed + 1]])
            piece = mean[at - here.start : stop - here.start]
            super()._merge(slice(at, stop), piece, rates if passed % 2 else still)
            at = stop

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
