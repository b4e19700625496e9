"""1-bit Adam: signs of the momentum travel, once the second moments are stable.

Tang et al., 2102.02888. For the first steps everybody runs Adam on the mean gradient and learns s,
the second moments. Then s is frozen. What is left is linear in the momentum, so this can be coded
as coarsely as one bit with error feedback, at the sender and at whoever merges::

    m_i ← β₁ m + (1 − β₁) g_i          from the common m
    c_i = C(m_i + e_i);  e_i ← m_i + e_i − c_i
    c̄ = C(mean c_i + e');  e' ← mean c_i + e' − c̄       by the one who merges
    m ← c̄;  θ ← θ − η m / (√s + ε)

C is any codec, the paper's a sign with one scale. Both errors are kept, so the sum of all m that
were applied is the sum of all that were meant, up to what is still in e and e'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Coded = Callable[[Tensor], Tensor]  # float32 [n] to what others decode of it


@dataclass(slots=True)
class OneBit:
    """One island's state after the warm-up: float32 [n] each."""

    momentum: Tensor  # m, equal on all
    second: Tensor  # s, equal on all, frozen
    error: Tensor  # e, its own


def init(momentum: Tensor, second: Tensor) -> OneBit:
    """From the moments of the warm-up with Adam, corrected for their start at zero."""
    return OneBit(momentum.clone(), second.clone(), torch.zeros_like(momentum))


@torch.no_grad()
def to_send(state: OneBit, gradient: Tensor, beta1: float) -> Tensor:
    """m_i + e_i, float32 [n]: to be encoded."""
    own = state.momentum * beta1
    return own.add_(gradient * (1 - beta1)).add_(state.error)


@torch.no_grad()
def sent(state: OneBit, meant: Tensor, decoded: Tensor) -> None:
    """Remember what encoding lost of ``meant``."""
    torch.sub(meant, decoded, out=state.error)


@torch.no_grad()
def merged(mean: Tensor, error: Tensor, coded: Coded) -> Tensor:
    """c̄ of a mean [n] at the one who merges; ``error`` e' in place."""
    meant = mean + error
    result = coded(meant)
    torch.sub(meant, result, out=error)
    return result


@torch.no_grad()
def step(state: OneBit, common: Tensor, params: Tensor, *, lr: float, eps: float = 1e-8) -> None:
    """θ ← θ − η m / (√s + ε) with the momentum that all decoded; in place."""
    state.momentum.copy_(common)
    params.sub_(common / (state.second.sqrt() + eps) * lr)
