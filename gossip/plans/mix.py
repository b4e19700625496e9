"""How contributions are combined: the run's merge rule, as far as plans and owners know it.

The arithmetic is injected as pure functions (a node takes those of :mod:`diloco`). Every rule has
at most one of these:

- ``clip``: each share is scaled by what all contributors have announced of their norms.
- ``weigh``: each share is scaled by what the inner products of all slices say. They are known only
  once the slices are with their owners, so the plan comes in two steps, see
  :mod:`gossip.plans.weighing`.
- ``column``: owners merge element by element, and no share is scaled.

Without any of them it is the weighted mean. A contributor's share times its scale is the
coefficient of what it sent, in all parts alike; scales stand in the plan and so in the
certificate, where everybody can see who was discounted. Where a slice is missing, the shares of
the others are taken of what is there; what is scaled off a share does not go to the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from protocols.codecs import codec
from protocols.errors import Malformed
from protocols.messages import Contributor

MAX_NORM = 1e45  # no vector of finite fp32 values is longer
MAX_SCALE = 2.0**64

Clip = Callable[[Sequence[float]], list[float]]  # norms to factors
Weigh = Callable[[torch.Tensor, Sequence[float]], list[float]]
"""Gram matrix [K, K] and weights to coefficients. One of 0 tells its island that its work is not in
the mean: it keeps it and sends it again. So whoever may be honest gets a little more than 0."""
Column = Callable[[torch.Tensor, Sequence[float]], torch.Tensor]  # fp32 [K, n], weights to [n]


@dataclass(frozen=True)
class Mix:
    """The rule by which contributions become one."""

    clip: Clip | None = None
    weigh: Weigh | None = None
    column: Column | None = None

    def scaled(self, contributors: Sequence[Contributor]) -> tuple[Contributor, ...]:
        """The contributors with the scales that a first plan has to give them."""
        counted = [c.norm for c in contributors if c.weight > 0]
        factors = iter(self.clip(counted) if self.clip and counted else [1.0] * len(counted))
        return tuple(
            dataclasses.replace(c, scale=next(factors) if c.weight > 0 else 1.0)
            for c in contributors
        )

    def check(self, contributors: Sequence[Contributor]) -> None:
        """Raise :class:`Malformed` unless the scales are those of this rule.

        Those of ``weigh`` cannot be judged by the contributors alone, see
        :func:`gossip.plans.weighing.check_scales`.
        """
        if self.weigh is None and tuple(contributors) != self.scaled(contributors):
            raise Malformed("scales that do not follow from the norms")

    def limit(self, contributor: Contributor, name: str) -> float | None:
        """Norm that no slice of a contributor may exceed with the codec of that name.

        None: its norm is of no importance.
        """
        if self.clip is None and self.weigh is None:
            return None
        return contributor.norm * codec(name).longer


MEAN = Mix()
