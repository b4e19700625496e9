"""Pseudo-gradients: what an island contributes, and what it keeps when a round is over.

After its inner steps an island stands at θ_local and the swarm at G. What it has found out is
Δ = G − θ_local, which points like a gradient. When the round commits, G moves on, and whatever
the island did that the round has not accounted for moves along with it::

    θ_local ← G_new + (θ_local − accounted)

``accounted`` is the snapshot that was sent where it reached the merge, and the old G elsewhere:
inner steps taken while the round ran, and parts that were lost on the way, are rebased and sent
with the next round instead of being thrown away.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TILE = 131_072  # elements worked on at a time, so that several passes hit the cache
SMALL_SQUARE = 1e-20  # what is lost by elements of a tile whose squares vanish is far below this


@torch.no_grad()
def pseudo_gradient(base: Tensor, local: Tensor, out: Tensor) -> Tensor:
    """``out`` ← base − local, float32 [n]; returns it."""
    return torch.sub(base, local, out=out)


@torch.no_grad()
def rebase(local: Tensor, new_base: Tensor, accounted: Tensor) -> None:
    """``local`` ← new_base + (local − accounted) in place, float32 of one shape each.

    Where nothing happened since the snapshot the difference is exactly zero, so that such an
    island ends on ``new_base`` bit for bit.
    """
    three = (local, accounted, new_base)
    if local.device.type != "cpu" or not all(one.is_contiguous() for one in three):
        local.sub_(accounted).add_(new_base)
        return
    for mine, old, new in zip(*(torch.split(one.view(-1), TILE) for one in three), strict=True):
        mine.sub_(old).add_(new)


@torch.no_grad()
def norm(delta: Tensor) -> float:
    """The L2 norm of float32 [n], summed over tiles in double; NaN or infinite if an element is.

    Equal for equal vectors on one machine; between machines it may differ in the last bits, so
    whatever is derived from it and must be equal everywhere is computed once and announced.
    """
    total = 0.0
    for part in torch.split(delta, TILE):
        square = torch.dot(part, part).item()
        if SMALL_SQUARE < square < math.inf:  # nearly always: one pass, and nothing was lost
            total += square
            continue
        largest = part.abs().amax().item() if len(part) else 0.0
        if largest == 0.0 or not math.isfinite(largest):
            total += largest
            continue
        scaled = part / largest  # huge elements would overflow when squared, tiny ones vanish
        total += torch.dot(scaled, scaled).item() * largest * largest
    return math.sqrt(total)


def is_finite(delta: Tensor) -> bool:
    """Whether no element is NaN or infinite.

    A finite sum of squares proves it in one pass; only where it is not (huge values overflow it)
    each element is looked at. On a GPU one pass looks at all, without waiting for it in between.
    """
    if delta.device.type != "cpu":
        return bool(torch.isfinite(delta).all())
    return all(
        math.isfinite(torch.dot(part, part).item()) or bool(torch.isfinite(part).all())
        for part in torch.split(delta, TILE)
    )
