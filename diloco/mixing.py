"""Gossip: parameters that are mixed between neighbours, with no round that all take part in.

NoLoCo (2506.10911) lets random pairs meet after H inner steps each. Island i has slow parameters
φ_i, its inner steps lead to θ_i, and it meets a partner::

    m_i ← α m_i + β (θ̄ − φ̄) + γ (φ̄ − φ_i)       bars: means over the pair
    φ_i ← φ_i + m_i

The first term carries on where the pair went, the second pulls the pair together. With β = γ they
become β (θ̄ − φ_i): φ̄ cancels, and **one tensor a meeting is exchanged, θ, not two**. So it is heavy
ball on φ_i − θ̄ with η = β and μ = α (:mod:`diloco.optimizers`), which is the form that islands use.
Fluctuations between islands die out if (its convergence condition, n in a group)::

    α √(n / (2 (n − 1))) < γ < √(n / (2 (n − 1))) √(2 + α²)

Also here: how many exchanges keep islands together (Kong et al., 2102.04828), and push-sum for
links that lose or go one way (Kempe et al. 2003; Stochastic Gradient Push, Assran et al. 2019,
1811.10792). There x and w move together, and z = x / w is an island's estimate of the mean. Islands
keep z and w, so that what travels is z and as large as parameters are. Whatever is given away is
subtracted as it arrives, so the sums of x and of w over islands *and letters* never change; what is
lost on its way takes its weight along.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ALPHA, BETA = 0.5, 0.7  # NoLoCo's momentum and its β = γ
MOST_EXTRA = 8  # exchanges that consensus control may add to a meeting; a run allows fewer


def check_noloco(alpha: float, beta: float, gamma: float, group: int = 2) -> None:
    """Raise :class:`ValueError` where NoLoCo's coefficients let islands drift apart."""
    if group < 2:
        raise ValueError(f"a group of {group} has nobody to meet")
    if not 0 <= alpha < 1:
        raise ValueError(f"NoLoCo's momentum alpha = {alpha:g} is not in [0, 1)")
    root = math.sqrt(group / (2 * (group - 1)))
    low, high = alpha * root, root * math.sqrt(2 + alpha * alpha)
    if not low < gamma < high:
        raise ValueError(
            f"NoLoCo's gamma = {gamma:g} is not between {low:.3f} and {high:.3f}, which "
            f"alpha = {alpha:g} and groups of {group} ask for: islands would "
            "drift apart instead of together"
        )
    if beta != gamma:
        raise ValueError(
            f"NoLoCo with beta = {beta:g} and gamma = {gamma:g} needs two tensors a meeting; "
            "only equal ones let the slow parameters cancel"
        )


@torch.no_grad()
def give_shares(estimate: Tensor, weight: float, sent: Tensor, receivers: int) -> float:
    """Push-sum's first half: of n + 1 equal shares of x and w one stays, n go to receivers.

        w ← w / (n + 1);  x ← x − n w ẑ;  z ← x / w = z + n (z − ẑ)

    in place on ``estimate`` z, float32 [n] or a slice of it. ``sent`` is ẑ, which is z as others
    decode it: what its coding lost stays here. Returns w, which each share carries and which is
    left.
    """
    estimate.add_(estimate - sent, alpha=receivers)
    return weight / (receivers + 1)


@torch.no_grad()
def take_share(estimate: Tensor, weight: float, sent: Tensor, share: float) -> float:
    """Push-sum's second half: x ← x + w_j ẑ_j; w ← w + w_j, ``share`` being w_j.

    That is z ← (w z + w_j ẑ_j) / (w + w_j) in place on ``estimate``, float32 [n] or a slice of it.
    A share that could not be delivered is taken back in the same way. Returns the new w.
    """
    whole = weight + share
    estimate.lerp_(sent, share / whole)
    return whole


def extra_exchanges(distance: float, progress: float, bound: float = 1.0, lost: float = 0.0) -> int:
    """How many meetings to add, by Kong et al.'s rule that disagreement must not exceed progress.

    ``distance`` is the mean square distance of islands to their mean, ``progress`` the mean square
    of what H inner steps moved this island (their lr · gradient, summed), both per element. An
    average of random pairs halves the disagreement, so a factor of 2ᵏ above ``bound`` · progress
    takes k meetings more. Random pairs of islands whose inner steps have nothing in common rest at
    1 + β (1 + α) / (2 (1 − α²) − β) times their progress (2.31 for NoLoCo; 2 for plain averages,
    where α is 0 and β 1), so with a bound above that a healthy swarm adds no meetings.

    ``lost`` is the mean square of what the codec loses of an element. Each meeting leaves a pair as
    far apart as inner steps of that size would, once they are averaged: at the same numbers less 1.
    More meetings do not bring that down, so it does not count where inner steps are small.
    """
    if not (distance >= 0 and progress >= 0 and bound > 0 and lost >= 0):
        raise ValueError(f"no exchanges follow from {distance}, {progress}, {bound}, {lost}")
    allowed = bound * progress + max(0.0, bound - 1) * lost
    if distance <= allowed:
        return 0
    return MOST_EXTRA if allowed == 0 else min(MOST_EXTRA, math.ceil(math.log2(distance / allowed)))
