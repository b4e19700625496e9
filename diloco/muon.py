"""Muon's direction for several islands at once: momentum, made orthogonal by Newton and Schulz.

Jordan et al. 2024, *Muon: an optimizer for hidden layers*; inside of DiLoCo it is MuLoCo
(2505.23725). For one model :class:`torch.optim.Muon` does the same; this form takes matrices of K
islands [K, n, m] in one go, for simulations. Embeddings, heads and vectors are AdamW's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c of x ← a x + b x³ + c x⁵, by its author
STEPS = 5
MOMENTUM = 0.95
TINY = 1e-7


@torch.no_grad()
def orthogonalised(matrices: Tensor) -> Tensor:
    """Each of [..., n, m] with singular values near one (0.7 to 1.2), its singular vectors kept."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(TINY)
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    result: Tensor = x.mT if tall else x
    return result


@torch.no_grad()
def direction(buffer: Tensor, gradient: Tensor, momentum: float = MOMENTUM) -> Tensor:
    """The step's direction [..., n, m]; ``buffer`` B ← μ B + (1 − μ) g in place, used as Nesterov.

    Scaled by √max(1, n / m), so that one learning rate fits all shapes.
    """
    buffer.lerp_(gradient, 1 - momentum)
    found = orthogonalised(gradient.lerp(buffer, momentum))
    return found * math.sqrt(max(1.0, gradient.shape[-2] / gradient.shape[-1]))
