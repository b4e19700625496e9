"""Eager updates: an outer step at once with what is known, corrected when the rest is there.

Kale et al., *Eager Updates for Overlapped Communication* (2502.12996). While the pseudo-gradients
of round k are on their way, an island already steps with its own for its own share of the mean,
and with the last round's for everybody else's::

    D̂_k = Δ_k / K + (mean Δ_{k−1} − Δ_{k−1,own} / K)
    Ĝ = Outer(G_k, D̂_k);  inner steps go on from Ĝ
    once the mean is there: G_{k+1} = Outer(G_k, mean Δ_k);  θ ← θ + (G_{k+1} − Ĝ)

The transfer then has a whole round of time. In the paper the islands' outer states differ by what
they do not know yet, and the correction goes into the next D, where momentum carries it on. Here
G and the momentum are those of the means alone, equal on all islands; only the inner steps of one
round start from Ĝ. Δ is what inner steps made, whatever they started from.

A guess that is wrong is corrected by inner steps too, and that part of Δ is then applied to a G
without the error: with the whole round on the way and inner steps that come close to an optimum,
Nesterov with η 0.7 goes astray, and η 0.4 does not (tests/diloco/test_eager.py, on quadratics).
Where the mean comes within half a round both are as stable as with waiting.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def others(mean: Tensor, own: Tensor | None, share: float) -> Tensor:
    """What the other islands brought to a mean [n] in which ``own`` [n] has this share.

    ``own`` None: nothing of this island is in it. Then room is made for its share of the next mean.
    """
    return mean * (1 - share) if own is None else mean - own * share


@torch.no_grad()
def expected(delta: Tensor, share: float, from_others: Tensor) -> Tensor:
    """D̂ from the own Δ [n], its share of the mean (1 / K) and what the others brought last."""
    return from_others + delta * share
