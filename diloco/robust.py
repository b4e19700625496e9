"""Merging where some may lie: weights from inner products, and merges element by element.

Geometric median and CenteredClip move only within the span of their inputs, so what they come to
is Σ w·x, and the weights w follow from the inputs' Gram matrix G = X Xᵀ alone: a squared distance
‖x_k − Σ w·x‖² is G_kk − 2 (G w)_k + wᵀ G w. So vectors that lie on many machines, a part on each,
are merged as one: the machines add up the K x K Gram matrices of their parts and all derive the
same weights for the whole vector. An attacker then cannot hide in a part where it does harm and
behave in the others, as it can where each part is merged by itself.

Everyone must derive the same weights bit for bit: all arithmetic is in double and made of
additions, multiplications, divisions and roots of single elements, which IEEE 754 fixes; sums are
folded in a fixed order. (Library reductions order their sums by the width of the processor.)

Whoever is trusted with nothing cannot be trusted with the tokens it claims either, so in all
rules of this module a weight counts at most as much as the median one.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diloco import merge
from diloco.exact import root_

MEDIAN_STEPS = 64  # Weiszfeld's; each takes a constant share off the error
CLIP_STEPS = 16
SMOOTHING = 1e-3  # of the typical distance: nearer than that is as good as there
RESOLUTION = 1e-6  # of the typical norm: shorter distances drown in the Gram matrix's rounding
FAR = 2.0  # honest ones of many dims are nearly equally far from their middle
FAINT = 1e-3
TRIM = 0.25  # of the weight at each end
MAX_INPUTS = 512  # as many as a round may have members
PIECE = 8192  # columns sorted at a time, to stay in cache
_TIE = 1e-9

Doubles = NDArray[np.float64]  # numpy's calls cost a fraction of torch's, and inputs are few


def votes(weights: Sequence[float]) -> list[float]:
    """Shares of at most the median's; they sum to 1, or are all zero if no weight is positive.

    Raises :class:`ValueError` for a negative or non-finite weight.
    """
    merge.shares(weights)  # refuses what is no weight
    positive = [weight for weight in weights if weight > 0]
    bound = statistics.median(positive) if positive else 0.0
    return merge.shares([min(weight, bound) for weight in weights])


def norm_clip(gram: Tensor, weights: Sequence[float]) -> list[float]:
    """Coefficients of the mean with every input shrunk to the median norm; sum to 1 at most."""
    shares = votes(_checked(gram, weights))
    norms = root_(gram.diagonal().clone()).tolist()
    moving = [index for index, share in enumerate(shares) if share > 0]
    factors = merge.clip_factors([norms[index] for index in moving])
    for index, factor in zip(moving, factors, strict=True):
        shares[index] *= factor
    return shares


def geometric_median(gram: Tensor, weights: Sequence[float]) -> list[float]:
    """Coefficients of argmin_z Σ a_k ‖z − x_k‖, which half of the votes cannot move far.

    Weiszfeld's algorithm, smoothed as in RFA (1912.13445): w_k ∝ a_k / max(‖x_k − z‖, ε). ``gram``
    is float64 [K, K]. Not negative, and they sum to 1, unless no weight is positive.
    """

    def steps(inner: Doubles, share: Doubles, start: Doubles, spread: float) -> Doubles:
        w = start
        for _ in range(MEDIAN_STEPS):
            pull = share / np.maximum(_distances(inner, w), spread)
            before, w = w, pull / _fold(pull)
            if np.array_equal(before, w):  # and so in all further steps
                break
        return w

    return _iterated(gram, weights, steps)


def centered_clip(gram: Tensor, weights: Sequence[float]) -> list[float]:
    """Coefficients of CenteredClip (2012.10333): z ← z + Σ a_k (x_k − z) min(1, τ / ‖x_k − z‖).

    16 steps. τ is the distance from z within which more than half of the inputs lie, taken anew
    in each step: no radius has to be chosen, and a minority, wherever it is, cannot widen it
    beyond the reach of the honest. ``gram`` is float64 [K, K]. Not negative, and they sum to 1,
    unless no weight is positive.
    """

    def steps(inner: Doubles, share: Doubles, start: Doubles, spread: float) -> Doubles:
        w = start
        for _ in range(CLIP_STEPS):
            away = np.maximum(_distances(inner, w), spread)
            radius = np.sort(away)[len(away) // 2]
            moves = share * np.minimum(radius / away, 1.0)
            w = w * (1.0 - _fold(moves)) + moves
        return w

    return _iterated(gram, weights, steps)


def open_rule(gram: Tensor, weights: Sequence[float]) -> list[float]:
    """The rule among strangers: geometric median of five or more, else CenteredClip; norms of two.

    Of five and more, those that lie :data:`FAR` times as far from it as most do keep :data:`FAINT`
    of their votes, and the median is taken once more: each had pulled it by a whole vote. (A robust
    centre and then rejection, as in Rousseeuw and Leroy 1987, section 1.3, with a robust rule in
    place of their mean. Not to zero: work without any part in the merge would stay its island's
    own, be sent again, and lie farther off each time.) Of two nobody can say which one lies; that
    neither is longer than the other is all there is.
    """
    counted = [index for index, weight in enumerate(weights) if weight > 0]
    if len(counted) < 5:
        return (norm_clip if len(counted) < 3 else centered_clip)(gram, weights)
    found = geometric_median(gram, weights)
    away = _distances(_among(gram, counted), _column(found, counted)).tolist()
    bound = FAR * sorted(away)[len(away) // 2]
    far = {index for index, distance in zip(counted, away, strict=True) if distance > bound}
    if not far:
        return found
    bounded = votes(weights)
    left = [FAINT * one if index in far else one for index, one in enumerate(bounded)]
    return geometric_median(gram, left)


@torch.no_grad()
def coordinate_median(values: Tensor, weights: Sequence[float]) -> Tensor:
    """The weighted median of each column of float32 [K, n]: [n].

    Where the votes on both sides are equal it is the mean of the two in the middle. Zero where no
    weight is positive.
    """
    if values.shape[1] > PIECE:
        pieces = torch.split(values, PIECE, dim=1)
        return torch.cat([coordinate_median(piece, weights) for piece in pieces])
    ordered, upto, _ = _sorted_with_votes(values, weights)
    if ordered is None:
        return torch.zeros_like(values[0])
    low = (upto < 0.5 - _TIE).sum(0, keepdim=True)
    high = (upto < 0.5 + _TIE).sum(0, keepdim=True).clamp_max_(len(ordered) - 1)
    # half of each first: the sum of two large ones would overflow
    middle = ordered.gather(0, low).mul_(0.5).add_(ordered.gather(0, high).mul_(0.5))
    return middle.squeeze(0)


@torch.no_grad()
def trimmed_mean(values: Tensor, weights: Sequence[float], trim: float = TRIM) -> Tensor:
    """The mean of each column of float32 [K, n] without ``trim`` of the votes at each end: [n].

    Yin et al., 1803.01498. With equal votes of which ``trim`` is a whole number the largest and
    smallest are left out; in general the one on the edge counts in part. Zero where no weight is
    positive. Raises :class:`ValueError` unless 0 ≤ trim < 0.5.
    """
    if not 0 <= trim < 0.5:
        raise ValueError(f"trim must be from 0 to below 0.5, not {trim}")
    if values.shape[1] > PIECE:
        pieces = torch.split(values, PIECE, dim=1)
        return torch.cat([trimmed_mean(piece, weights, trim) for piece in pieces])
    ordered, upto, each = _sorted_with_votes(values, weights)
    if ordered is None:
        return torch.zeros_like(values[0])
    first = (upto - each).clamp_(trim, 1 - trim)
    kept = upto.clamp_(trim, 1 - trim).sub_(first).div_(1 - 2 * trim).to(torch.float32)
    return (ordered * kept).sum(0)


Steps = Callable[[Doubles, Doubles, Doubles, float], Doubles]


@np.errstate(all="ignore")  # what is not finite any more is what all others come to, too
def _iterated(gram: Tensor, weights: Sequence[float], steps: Steps) -> list[float]:
    """Run ``steps`` on the inputs with a vote, from a point that no minority can choose."""
    share = votes(_checked(gram, weights))
    counted = [index for index, one in enumerate(share) if one > 0]
    if not counted:
        return share
    inner = _among(gram, counted)
    start, reach = _amid_the_majority(inner)
    norms = np.sort(inner.diagonal())
    spread = max(SMOOTHING * reach, RESOLUTION * math.sqrt(norms[len(norms) // 2]))
    # without any spread most are the same point, which is where the start is
    found = steps(inner, _column(share, counted), start, spread) if spread > 0 else start
    result = [0.0] * len(share)
    for index, coefficient in zip(counted, found.tolist(), strict=True):
        result[index] = max(0.0, coefficient)
    return result


def _amid_the_majority(gram: Doubles) -> tuple[Doubles, float]:
    """Coefficients of the densest majority's mean, and how far that majority reaches.

    It is the smallest ball around one of the inputs in which more than half of them lie.
    """
    diagonal = gram.diagonal()
    squares = np.maximum(diagonal[:, None] + diagonal[None, :] - gram * 2.0, 0.0)
    half = len(gram) // 2
    reach = np.sort(squares, axis=1)[:, half].tolist()
    amid = reach.index(min(reach))
    nearest = np.argsort(squares[amid], kind="stable")[: half + 1]
    start = np.zeros(len(gram))
    start[nearest] = 1.0 / (half + 1)
    return start, math.sqrt(reach[amid])


@np.errstate(all="ignore")
def _distances(gram: Doubles, w: Doubles) -> Doubles:
    """‖x_k − Σ w·x‖ for each k: [K]."""
    projections = _fold(gram * w)
    squares = gram.diagonal() - projections * 2.0 + _fold(projections * w)
    return np.sqrt(np.maximum(squares, 0.0))


def _fold(values: Doubles) -> Doubles:
    """The sum over the last dim in an order that nothing but its length decides."""
    while (count := values.shape[-1]) > 1:
        half = (count + 1) // 2
        folded = values[..., :half].copy()
        folded[..., : count - half] += values[..., half:]
        values = folded
    return values[..., 0]


def _among(gram: Tensor, indices: Sequence[int]) -> Doubles:
    """Inner products of these inputs alone."""
    return gram.numpy()[np.ix_(indices, indices)]


def _column(values: Sequence[float], indices: Sequence[int]) -> Doubles:
    return np.array([values[index] for index in indices], dtype=np.float64)


def _checked(gram: Tensor, weights: Sequence[float]) -> Sequence[float]:
    count = len(weights)
    if gram.shape != (count, count) or gram.dtype is not torch.float64:
        raise ValueError(f"not the float64 Gram matrix of {count} inputs: {tuple(gram.shape)}")
    if not bool(gram.isfinite().all()) or bool((gram.diagonal() < 0).any()):
        raise ValueError("a Gram matrix with infinite products or negative squares")
    return weights


def _sorted_with_votes(
    values: Tensor, weights: Sequence[float]
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Columns in ascending order, the votes up to each element, and each one's own: [K, n]."""
    share = votes(weights)
    counted = [index for index, one in enumerate(share) if one > 0]
    if len(values) != len(share):
        raise ValueError(f"{len(values)} inputs with {len(share)} weights")
    if len(counted) > MAX_INPUTS:
        raise ValueError(f"more than {MAX_INPUTS} inputs")
    if not counted:
        return None, torch.empty(0), torch.empty(0)
    ordered, order = _sorted_columns(values[counted])
    each = torch.from_numpy(_column(share, counted))[order]
    return ordered, each.cumsum(0), each


def _sorted_columns(values: Tensor) -> tuple[Tensor, Tensor]:
    """Finite [K, n] with each column ascending, and the rows that its elements come from.

    A sorting network whose comparisons are minima and maxima of whole rows: over so few rows it
    is many times as fast as a sort of each column. A float32 leaves the low bits of a double free,
    which is where the number of the row travels.
    """
    keys = values.double()
    keys.view(torch.int64).bitwise_or_(torch.arange(len(values))[:, None])
    rows = list(keys.unbind())
    for low, high in _network(len(rows)):
        a, b = rows[low], rows[high]
        rows[low], rows[high] = torch.minimum(a, b), torch.maximum(a, b)
    bits = torch.stack(rows).view(torch.int64)
    origins = bits & (MAX_INPUTS - 1)
    return bits.sub_(origins).view(torch.float64).float(), origins


@functools.cache
def _network(count: int) -> tuple[tuple[int, int], ...]:
    """The comparisons of Batcher's odd-even merge sort (1968) of ``count`` rows."""
    found = []
    size = 1
    while size < count:
        step = size
        while step >= 1:
            for first in range(step % size, count - step, 2 * step):
                for low in range(first, first + min(step, count - first - step)):
                    if low // (2 * size) == (low + step) // (2 * size):
                        found.append((low, low + step))
            step //= 2
        size *= 2
    return tuple(found)
