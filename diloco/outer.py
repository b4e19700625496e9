"""The outer optimizer: SGD with Nesterov momentum on the merged pseudo-gradient D.

DiLoCo (2311.08105) section 3, with torch's form of the rule::

    v ← μ v + D            θ ← θ − η (D + μ v)

v is in rounds' work. If nobody could merge for a long while, one round brings all that was learnt
meanwhile, and its v would go on for ten rounds of usual length, which cannot make up for it: after
84 usual rounds' work θ came to lie four times as far from an optimum as it had moved. So v shrinks
with the work of a round where that has far less than the one before (:func:`carried`); no paper has
rounds that differ so much.

State is plain data and the update is a function of it. Every product is rounded before it is
added: no fused multiply-add, so CPUs, GPUs, thread counts and tile sizes give the same bits.
Islands compare digests of (θ, v) after each round and rely on this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import torch
from torch import Tensor

TILE = 65_536  # elements worked on at a time, so that the five passes hit the cache
FAR_LESS = 1 / 8  # of a round's work: so far apart islands of one swarm are not


@dataclass(frozen=True, slots=True)
class OuterState:
    """What the outer optimizer keeps between rounds, of the parameters' shape."""

    momentum: Tensor  # v, float32 [n]


def init(params: Tensor) -> OuterState:
    """The state before the first round: no momentum."""
    return OuterState(torch.zeros_like(params, dtype=torch.float32))


@torch.no_grad()
def update(
    state: OuterState,
    merged: Tensor,
    params: Tensor,
    *,
    lr: float,
    momentum: float,
    carried: float = 1.0,
    tile: int = TILE,
) -> None:
    """One outer step on ``params`` and ``state``, both in place; ``merged`` is left alone.

    ``carried``: what is left of v before the step, see :func:`carried`.
    All three are float32 vectors of one length on one device, or equal slices of such vectors:
    updating a vector slice by slice is updating it whole. Raises :class:`ValueError` for other
    shapes or types, before anything has changed.
    """
    velocity = state.momentum
    for name, one in (("params", params), ("momentum", velocity), ("merged", merged)):
        if one.dtype is not torch.float32 or one.shape != params.shape or one.dim() != 1:
            raise ValueError(
                f"{name}: expected float32 {[len(params)]}, got {one.dtype} {one.shape}"
            )
    scratch = torch.empty(min(tile, len(params)), device=params.device)
    for start in range(0, len(params), tile):
        d, v, theta = (x[start : start + tile] for x in (merged, velocity, params))
        step = scratch[: len(d)]
        v.mul_(momentum * carried).add_(d)
        torch.mul(v, momentum, out=step).add_(d).mul_(lr)
        theta.sub_(step)


def carried(now: Sequence[int], before: Sequence[int]) -> float:
    """What a round takes over of v, by the tokens of each island in it, and in the one before.

    1 unless all of them have far less than most had: islands are of unlike speed, and one alone
    may claim anything. 1 as well where one of the rounds has merged nothing, so one that comes
    between a long and a short one hides the first from the second.
    """
    if not now or not before:
        return 1.0
    most, usual = max(now), median_low(before)
    return most / usual if most < FAR_LESS * usual else 1.0


def outer_rates(
    round_: int,
    *,
    lr: float,
    momentum: float,
    lr_start: float,
    momentum_start: float,
    warmup_rounds: int,
) -> tuple[float, float]:
    """(η, μ) of a round, counted from 0: linear from the start values until the warm-up ends.

    Early pseudo-gradients point where the loss falls fast and differ little between islands, so
    the first rounds do best with η = 1 and little momentum, which is close to averaging models.
    """
    if round_ >= warmup_rounds:
        return lr, momentum
    share = max(round_, 0) / warmup_rounds
    return lr_start + (lr - lr_start) * share, momentum_start + (momentum - momentum_start) * share
