"""Contributions of the honest, and of those who attack a merge."""

from __future__ import annotations

import torch
from torch import Tensor

N = 20_000


def gram(inputs: Tensor) -> Tensor:
    wide = inputs.double()
    product: Tensor = wide @ wide.T
    return product


def honest(count: int, size: int = N, *, seed: int = 0, noise: float = 1.0) -> Tensor:
    """Pseudo-gradients with something in common: float64 [count, size]."""
    random = torch.Generator().manual_seed(seed)
    common = torch.randn(size, generator=random, dtype=torch.float64)
    return common + noise * torch.randn(count, size, generator=random, dtype=torch.float64)


def cosine(a: Tensor, b: Tensor) -> float:
    return (a @ b / (a.norm() * b.norm())).item()


def attacked(
    name: str, count: int = 8, liars: int = 2, noise: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Inputs of which the last ``liars`` lie, and the mean of the honest ones."""
    inputs = honest(count, noise=noise)
    good = inputs[: count - liars]
    mean, deviation = good.mean(0), good.std(0)
    lies = {
        "turned": -3 * inputs[count - liars :],
        "loud": 1000 * inputs[count - liars :],
        "turned and loud": -1000 * inputs[count - liars :],
        "absurd": -1e15 * inputs[count - liars :],
        "inner product manipulation": -0.5 * mean,  # 1903.03936: just enough to turn a mean
        "a little is enough": mean - 1.0 * deviation,  # 1902.06156: within what is usual
        "silent": 0 * mean,
    }
    inputs[count - liars :] = lies[name]
    return inputs, mean


ATTACKS = (
    "turned",
    "loud",
    "turned and loud",
    "absurd",
    "inner product manipulation",
    "a little is enough",
    "silent",
)
