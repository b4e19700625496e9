"""Eager updates: an outer step at once with what is known, corrected a round later.

Kale et al., *Eager Updates for Overlapped Communication* (2502.12996). While the pseudo-gradients
of round k are on their way, an island already steps with its own for its own share of the mean,
and with the last round's for everybody else's::

    D_k = Δ_k / K + (mean Δ_{k−1} − Δ_{k−1,own} / K)

The transfer then has a whole round of time. Islands differ by what they do not know yet: each has
an outer state of its own. The sum of all D over the rounds is that of the means, one round late.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Eager:
    """What an island remembers of its last round: Δ / K as it sent it, float32 [n]."""

    own: Tensor


def init(params: Tensor) -> Eager:
    """Before the first round nothing was sent."""
    return Eager(torch.zeros_like(params))


@torch.no_grad()
def step_with(state: Eager, delta: Tensor, share: float, last_mean: Tensor) -> Tensor:
    """D_k, from this round's own Δ [n], its share of the mean (1 / K) and last round's mean [n].

    ``last_mean`` is zero in the first round. ``state`` moves on; the inputs are left alone.
    """
    own = delta * share
    others = last_mean - state.own
    state.own = own
    return others.add_(own)
