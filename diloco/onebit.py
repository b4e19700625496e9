"""1-bit Adam: signs of the momentum travel, once the second moments are stable.

Tang et al., 2102.02888. For the first steps everybody runs Adam on the mean gradient and learns s,
the second moments. Then s is frozen. What is left is linear in the momentum, so this can be coded
as coarsely as one bit with error feedback, at the sender and at whoever merges::

    m_i ← β₁ m + (1 − β₁) g_i          from the common m
    c_i = C(m_i + e_i);  e_i ← m_i + e_i − c_i
    c̄ = C(mean c_i + e');  e' ← mean c_i + e' − c̄       by the one who merges
    m ← c̄;  θ ← θ − η m / d

C is any codec, the paper's a sign with one scale. Both errors are kept (:mod:`diloco.feedback`
with a decay of 1), so the sum of all m that were applied is the sum of all that were meant, up to
what is still in e and e'.

The paper's d is Adam's √s + ε. A sign has no zero: where an element never had a gradient, s is
nothing, and the step η / ε of a momentum that is all rounding. So here, and this is ours::

    d = √s + max(ε, FLOOR · mean(√s))

which is at least the mean, and for a typical element twice its √s: its steps become half as long
when s is frozen. Adam's correction of m and s for their start at zero is made once, before
(``diloco.optimizers._freeze``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.exact import root_, total

FLOOR = 1.0  # of what is added to √s, in terms of its mean


@torch.no_grad()
def freeze(second: Tensor, epsilon: float) -> Tensor:
    """d = √s + max(ε, FLOOR · mean(√s)), which later steps divide by, in place of s [n].

    Whoever calls has corrected s for its start at zero.
    """
    root_(second)
    return second.add_(max(epsilon, FLOOR * mean(second)))


@torch.no_grad()
def own_momentum(momentum: Tensor, gradient: Tensor, beta1: float) -> Tensor:
    """m_i from the common m [n], in place of an island's own gradient [n]."""
    return gradient.mul_(1 - beta1).add_(momentum * beta1)


@torch.no_grad()
def step(momentum: Tensor, divisor: Tensor, common: Tensor, params: Tensor, *, lr: float) -> None:
    """m ← c̄, the momentum that all decoded; θ ← θ − η m / d. All [n], two in place."""
    momentum.copy_(common)
    params.sub_((common * lr).div_(divisor))


def mean(values: Tensor) -> float:
    """Of float32 [n], to the same bits everywhere."""
    return total(values).item() / len(values)
