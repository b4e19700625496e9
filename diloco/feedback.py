"""Error feedback: what a coarse encoding lost of one round is added to what is sent in the next.

An island keeps a residual e beside its pseudo-gradients (Seide et al. 2014; Karimireddy et al.,
1901.09847; with decay SparseLoCo, 2508.15706)::

    x = Δ + decay · e           what is encoded; q is what the others decode
    e ← x − q                   where q was merged
    e ← e                       where it was not

In the second case nothing of x has been counted. Papers add q back to e there, since their islands
start the next round from G without Δ. Ours keep the inner steps themselves (see
:mod:`diloco.pseudo_gradient`), so Δ comes again by itself and would otherwise count twice.

An encoder gives equal bytes for equal values. So nobody keeps q: it is made again from Δ and e
once it is known which ranges were merged, and the residual is the only vector that this costs.

The merged result is encoded as well, by whoever owns a part: mean D, decoded by all as D'. Only
the owner knows D − D'. It adds (D − D') / share to its own e, ``share`` being its own share of the
weight; so the next mean has what this one lost, whoever merges these elements then::

    e ← 0 + (D − D') / share    in a part of its own, to which it adds x as it is

Of an island with few tokens beside fast ones, or of one that merges most of the vector, that may be
many times as long as any Δ. A merge that clips would shrink all of its x, so its own work and its
own loss would count for next to nothing. So all of it together is made no longer than the round's
median contribution (:func:`limit_lost`), and ``share`` is without the scale of a merge rule: each
time that x was clipped e would grow, and be clipped more. What that leaves of D − D' is dropped.

>>> feedback.compensate(delta, residual, 0.95)
>>> feedback.keep_lost(delta, residual, 0.95, coded)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from diloco import merge
from diloco.pseudo_gradient import norm

LEAST_SHARE = 2.0**-10  # of the mean: with less, (D − D') / share would be too large


@torch.no_grad()
def compensate(delta: Tensor, residual: Tensor, decay: float) -> Tensor:
    """``delta`` ← Δ + decay · e in place, float32 [n]; returns it.

    The product is rounded before it is added, so that the same values come out again whenever
    they are asked for, however the vector is cut.
    """
    return delta.add_(residual * decay)


@torch.no_grad()
def keep_lost(
    delta: Tensor, residual: Tensor, decay: float, coded: Callable[[Tensor], Tensor]
) -> None:
    """``residual`` ← x − q in place, for a piece [n] that was merged; ``delta`` becomes x.

    ``coded`` gives what others decode of x [n], encoded as it was when it was sent.
    """
    torch.sub(compensate(delta, residual, decay), coded(delta), out=residual)


@torch.no_grad()
def lost_by_owner(mean: Tensor, decoded: Tensor, share: float) -> Tensor:
    """(D − D') / share, float32 [n]: what the owner of a part adds to its own residual.

    Zero where its share of the mean is too small for its own contribution to make up for it.
    Raises :class:`ValueError` for a share that is none.
    """
    if not 0 <= share <= 1.001:  # sums of shares round
        raise ValueError(f"{share} is no share")
    lost = mean - decoded
    return lost.div_(share) if share >= LEAST_SHARE else lost.zero_()


@torch.no_grad()
def limit_lost(pieces: Sequence[Tensor], norms: Sequence[float]) -> None:
    """Shrink (D − D') / share of all parts of an owner, in place, to the median of ``norms``.

    ``pieces`` are float32 [n] each; ``norms`` are those of the round's contributions. Where no norm
    is known (all are 0), or the pieces together are not longer, nothing is done.
    """
    length, most = math.hypot(*(norm(piece) for piece in pieces)), merge.median_norm(norms)
    if 0.0 < most < length:
        for piece in pieces:
            piece.mul_(most / length)
