"""Gossip: parameters that are mixed between neighbours, with no round that all take part in.

NoLoCo (2506.10911) lets random pairs meet after H inner steps each. Island i has slow parameters
φ_i, its inner steps lead to θ_i, and it meets a partner::

    m_i ← α m_i + β (θ̄ − φ̄) + γ (φ̄ − φ_i)       bars: means over the pair
    φ_i ← φ_i + m_i

The first term carries on where the pair went, the second pulls the pair together. With β = γ they
become β (θ̄ − φ_i): φ̄ cancels, and **one tensor a meeting is exchanged, θ, not two**. That is the
form here. Fluctuations between islands die out if (its convergence condition, n in a group)::

    α √(n / (2 (n − 1))) < γ < √(n / (2 (n − 1))) √(2 + α²)

Also here: averaging of pairs (Boyd et al. 2006), push-sum for links that lose or go one way (Kempe
et al. 2003; Stochastic Gradient Push, 1811.10792) with running sums that survive any loss
(Hadjicostis et al. 2016), and how many exchanges keep islands together (Kong et al., 2102.04828).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

ALPHA, BETA = 0.5, 0.7  # NoLoCo's momentum and its β = γ
MOST_EXTRA = 3  # exchanges that consensus control may add to a meeting


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


@torch.no_grad()
def average(mine: Tensor, theirs: Tensor, weight: float = 0.5) -> Tensor:
    """``mine`` ← (1 − weight) mine + weight theirs in place; returns it.

    Written as a move towards the other, the same size on both sides: the pair's sum stays to
    within the rounding.
    """
    return mine.add_((theirs - mine).mul_(weight))


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


@dataclass(slots=True)
class RunningSums:
    """Push-sum over links that lose without telling, exact all the same.

    A sender keeps for each link the sum of all it ever put on it, and sends this sum. A receiver
    takes the difference to the last sum it got, so a lost message is made up for by the next one.
    Costs a vector a link at either end, in double: sums grow.
    """

    own: PushSum
    sent: dict[str, tuple[Tensor, float]] = field(default_factory=dict)
    got: dict[str, tuple[Tensor, float]] = field(default_factory=dict)

    def put(self, receivers: list[str]) -> dict[str, tuple[Tensor, float]]:
        """The running sums to send to each receiver now."""
        x, w = self.own.share(len(receivers))
        for receiver in receivers:
            before, weight = self.sent.get(
                receiver, (torch.zeros_like(x, dtype=torch.float64), 0.0)
            )
            self.sent[receiver] = (before + x, weight + w)
        return {receiver: self.sent[receiver] for receiver in receivers}

    def take(self, sender: str, x: Tensor, w: float) -> None:
        """A running sum that arrived; an older one that was overtaken changes nothing."""
        before, weight = self.got.get(sender, (torch.zeros_like(x), 0.0))
        if w > weight:
            self.own.take((x - before).to(self.own.x.dtype), w - weight)
            self.got[sender] = (x, w)


def disagreement(mine: Tensor, theirs: Tensor) -> float:
    """|aggregate − x_i|² of a pair, per element: this island's sample of the consensus distance."""
    return (theirs - mine).mul_(0.5).double().square().mean().item()


def extra_exchanges(distance: float, progress: float, bound: float = 1.0) -> int:
    """How many meetings to add, by Kong et al.'s rule that disagreement must not exceed progress.

    ``distance`` is a running mean of :func:`disagreement`, ``progress`` the mean square of what H
    inner steps moved this island (their lr · gradient, summed). An average of random pairs halves
    the disagreement, so a factor of 2ᵏ above ``bound`` · progress takes k meetings more.
    """
    if not (distance >= 0 and progress >= 0 and bound > 0):
        raise ValueError(f"no exchanges follow from {distance}, {progress}, {bound}")
    allowed = bound * progress
    if distance <= allowed:
        return 0
    return MOST_EXTRA if allowed == 0 else min(MOST_EXTRA, math.ceil(math.log2(distance / allowed)))
