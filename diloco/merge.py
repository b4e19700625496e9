"""The merge: one D out of K pseudo-gradients.

The plain merge is the mean weighted by tokens, DiLoCo's (2311.08105) with islands that differ in
speed. Among friends a bound on each norm is added: a pseudo-gradient longer than the median one is
scaled down to the median norm (as SparseLoCo does, 2508.15706), so that an island whose training
blew up cannot drag the others along.

Sums run in float32 in the order of the members, the product rounded before it is added; they do
not depend on who arrived first, on threads or on the size of the tiles.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

TILE = 131_072  # elements worked on at a time, so that the accumulator stays in the cache


def shares(weights: Sequence[float]) -> list[float]:
    """Weights scaled to sum to 1; all zero if none is positive.

    Raises :class:`ValueError` for a negative or non-finite weight.
    """
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"weights must be finite and not negative: {list(weights)}")
    total = math.fsum(weights)
    return [weight / total if total > 0 else 0.0 for weight in weights]


def median_norm(norms: Sequence[float]) -> float:
    """The median of the norms above zero; 0 if there is none.

    An island without progress says nothing about the length of the others' steps. Raises
    :class:`ValueError` for a negative or non-finite norm.
    """
    if not all(math.isfinite(norm) and norm >= 0 for norm in norms):
        raise ValueError(f"norms must be finite and not negative: {list(norms)}")
    moving = [norm for norm in norms if norm > 0]
    return statistics.median(moving) if moving else 0.0


def clip_factors(norms: Sequence[float]) -> list[float]:
    """What shrinks each pseudo-gradient to the median norm; 1 for those below it.

    Raises as :func:`median_norm`.
    """
    median = median_norm(norms)
    return [median / norm if norm > median else 1.0 for norm in norms]


@torch.no_grad()
def weighted_sum(
    deltas: Sequence[Tensor], coefficients: Sequence[float], out: Tensor, *, tile: int = TILE
) -> Tensor:
    """``out`` ← Σ coefficient · delta in the order given, float32 [n]; returns it.

    ``out`` must not be one of ``deltas``. Members with coefficient 0 are not read.
    """
    counted = [(d, c) for d, c in zip(deltas, coefficients, strict=True) if c != 0.0]
    scratch = torch.empty(min(tile, len(out)), device=out.device)
    for start in range(0, len(out), tile):
        accumulator = out[start : start + tile].zero_()
        product = scratch[: len(accumulator)]
        for delta, coefficient in counted:
            accumulator.add_(torch.mul(delta[start : start + tile], coefficient, out=product))
    return out


def weighted_mean(deltas: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> Tensor:
    """``out`` ← Σ w · delta / Σ w, float32 [n], zero where no weight is positive; returns it."""
    return weighted_sum(deltas, shares(weights), out)
