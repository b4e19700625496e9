"""PowerSGD: gradients as products of two thin matrices (Vogels et al., 1905.13727, algorithm 1).

A matrix M [n, m] travels as P [n, r] and Q [m, r], and both are merged by plain means: the islands'
approximations add up to that of the mean. One step of power iteration each time, from the last
step's Q, is enough since gradients change slowly. What is lost is kept and added to the next::

    M ← gradient + e
    P ← mean(M Q);  P̂ ← orthogonal(P)
    Q ← mean(Mᵀ P̂)
    M̂ = P̂ Qᵀ;      e ← M − M̂

Everybody needs the same Q to begin with and must take part in both means, so this is for a stable
group; whoever comes late starts from the others' Q. Vectors (norms, biases) travel as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

RANK = 4


def first_factor(columns: int, rank: int, seed: int) -> Tensor:
    """Q [m, r] to start from, equal everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(columns, rank, generator=generator)


@torch.no_grad()
def left(matrix: Tensor, right_factor: Tensor) -> Tensor:
    """P = M Q, float32 [n, r]: the first thing to be averaged."""
    return matrix @ right_factor


@torch.no_grad()
def orthogonal(factor: Tensor) -> Tensor:
    """The columns of P [n, r] made orthonormal by Gram and Schmidt's method, in a fixed order.

    A column that depends on those before it becomes zero.
    """
    columns: list[Tensor] = []
    for column in factor.double().unbind(1):
        size = column.norm().item()
        for _ in range(2):  # the second time takes away what rounding left
            for before in columns:
                column = column - before * torch.dot(before, column)
        rest = column.norm().item()
        columns.append(column / rest if rest > 1e-6 * size else torch.zeros_like(column))
    return torch.stack(columns, dim=1).to(factor.dtype)


@torch.no_grad()
def right(matrix: Tensor, basis: Tensor) -> Tensor:
    """Q = Mᵀ P̂, float32 [m, r]: the second thing to be averaged."""
    return matrix.T @ basis


@torch.no_grad()
def product(basis: Tensor, right_factor: Tensor) -> Tensor:
    """M̂ = P̂ Qᵀ, float32 [n, m]."""
    return basis @ right_factor.T
