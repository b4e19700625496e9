"""The outer state where rounds merge a few coordinates each: mode ``sparta``.

All islands draw the same coordinates from the run's seed (:mod:`diloco.sparta`), so a round's
vector are the values there and nothing says which. Where it was merged, ``base`` is the islands'
mean and the trainer takes it over; everywhere else what an island has learnt stays its own, until
it is that coordinate's turn. ``base`` is so made of means of different rounds: what newcomers
begin with, and what is evaluated.
"""

from __future__ import annotations

from typing import Any

import torch

from diloco import optimizers, sparta
from diloco.pseudo_gradient import pseudo_gradient
from node.replicas.replica import OuterReplica
from protocols.codecs import RangeCodec


class SparseReplica(OuterReplica):
    """As :mod:`node.replicas.replica`; elements of rounds are the draw's coordinates."""

    whole = False
    _drawn: tuple[int, torch.Tensor] = (-1, torch.empty(0))

    def __init__(self, *state: Any, **options: Any) -> None:
        super().__init__(*state, **options)
        self.codec = RangeCodec(self.codec.name, self.size)  # matrices and vectors alike

    @property
    def size(self) -> int:
        """Of a round's vector. The last draw of a walk may be shorter: what is over is zero."""
        return sparta.drawn(len(self.base), self.manifest.rounds.share)

    @property
    def _at(self) -> torch.Tensor:
        """The coordinates of the round that comes next, int64, in the order of the vector."""
        round_, share = self.place.round, self.manifest.rounds.share
        if self._drawn[0] != round_:
            at = sparta.coordinates(len(self.base), share, round_, self.manifest.seed)
            self._drawn = round_, at.sort().values
        return self._drawn[1]

    def _progress(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        at = self._at[start:stop]
        out[len(at) :] = 0.0
        pseudo_gradient(self.base[at], self.sent[at], out[: len(at)])
        return out

    def _set_back(self, merged: list[tuple[int, int]]) -> None:
        counted = self._drawn_in(merged)
        values = self.sent[counted]
        self.sent.copy_(self.base)
        self.sent[counted] = values

    def _void(self, merged: list[tuple[int, int]]) -> None:
        self.sent[self._drawn_in(merged)] = torch.nan

    def _drawn_in(self, ranges: list[tuple[int, int]]) -> torch.Tensor:
        return torch.cat([self._at[:0], *(self._at[start:stop] for start, stop in ranges)])

    def _merge(self, here: slice, mean: torch.Tensor, rates: optimizers.Rates) -> None:
        at = self._at[here]
        params = self.base[at]
        vectors = {name: self.vectors[name][at] for name in self.rule.vectors}
        self.rule.step(vectors, mean[: len(at)], params, rates)
        self.base[at] = params
