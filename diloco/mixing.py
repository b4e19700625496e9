"""Gossip: parameters that are mixed between neighbours, with no round that all take part in.

NoLoCo (2506.10911) lets random pairs meet after H inner steps each. Island i has slow parameters
φ_i, its inner steps lead to θ_i, and it meets a partner::

    m_i ← α m_i + β (θ̄ − φ̄) + γ (φ̄ − φ_i)       bars: means over the pair
    φ_i ← φ_i + m_i

The first term carries on where the pair went, the second pulls the pair together. With β = γ they
become β (θ̄ − φ_i): φ̄ cancels, and **one tensor a meeting is exchanged, θ, not two**. That is the
form here. Fluctuations between islands die out if (its convergence condition, n in a group)::

    α √(n / (2 (n − 1))) < γ < √(n / (2 (n − 1))) √(2 + α²)

Also here: push-sum for links that lose or go one way (Kempe et al. 2003; Stochastic Gradient Push,
1811.10792), and how many exchanges keep islands together (Kong et al., 2102.04828).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
def noloco(
    slow: Tensor, momentum: Tensor, mine: Tensor, theirs: Tensor, *, alpha: float, beta: float
) -> None:
    """One meeting: ``slow`` φ and ``momentum`` m in place, from θ of both, float32 [n] each.

    With nobody there (``theirs`` is ``mine``) it is the same step on the own progress alone, so
    a partner that vanished costs one exchange and no work.
    """
    mean = (mine + theirs).mul_(0.5)
    momentum.mul_(alpha).add_(mean.sub_(slow).mul_(beta))
    slow.add_(momentum)


@dataclass(slots=True)
class PushSum:
    """Push-sum: x and w move together, and x / w is this island's estimate of the mean.

    What is sent is subtracted here, so the sums of x and of w over islands *and links* never
    change; whatever is lost takes its weight along.
    """

    x: Tensor  # float32 [n]
    w: float = 1.0

    def share(self, receivers: int) -> tuple[Tensor, float]:
        """What each of so many receivers gets; the own share is kept."""
        if receivers < 0:
            raise ValueError(f"{receivers} receivers")
        part = 1.0 / (receivers + 1)
        sent = self.x * part, self.w * part
        self.x = self.x * part  # not x − n·sent: equal shares are equal bits
        self.w *= part
        return sent

    def take(self, x: Tensor, w: float) -> None:
        """Add what arrived, or what came back since it could not be delivered."""
        if not 0 <= w < math.inf:
            raise ValueError(f"a push-sum weight of {w}")
        self.x = self.x + x
        self.w += w

    def estimate(self) -> Tensor:
        """x / w, float32 [n]."""
        return self.x / self.w


def steady_disagreement(alpha: float, beta: float) -> float:
    """Where random pairs keep islands whose inner steps have nothing in common.

    The mean square distance of θ to the mean over that of what H inner steps moved an island,
    before the pairs meet, in a large swarm. With δ the islands' independent progress, φ and m as
    distances to their means, and a partner drawn anew, second moments per element follow

        m' = α m + β ((φ_j − φ_i) / 2 + (δ_i + δ_j) / 2)        φ' = φ + m'

    and come to rest at E φ² = E δ² · β (1 + α) / (2 (1 − α²) − β). Plain averaging is α = 0, β = 1.
    Raises :class:`ValueError` where they do not come to rest.
    """
    room = 2 * (1 - alpha * alpha) - beta
    if not (0 <= alpha < 1 and beta > 0 and room > 0):
        raise ValueError(f"islands with alpha = {alpha:g} and beta = {beta:g} drift apart")
    return 1 + beta * (1 + alpha) / room


def extra_exchanges(distance: float, progress: float, bound: float = 1.0) -> int:
    """How many meetings to add, by Kong et al.'s rule that disagreement must not exceed progress.

    ``distance`` is the mean square distance of islands to their mean, ``progress`` the mean square
    of what H inner steps moved this island (their lr · gradient, summed), both per element. An
    average of random pairs halves the disagreement, so a factor of 2ᵏ above ``bound`` · progress
    takes k meetings more. A bound above :func:`steady_disagreement` lets swarms alone that are
    well.
    """
    if not (distance >= 0 and progress >= 0 and bound > 0):
        raise ValueError(f"no exchanges follow from {distance}, {progress}, {bound}")
    allowed = bound * progress
    if distance <= allowed:
        return 0
    return MOST_EXTRA if allowed == 0 else min(MOST_EXTRA, math.ceil(math.log2(distance / allowed)))
