"""Sums and roots that come to the same bits on every machine.

A library adds in the order that suits its processor; here halves are added to each other, element
by element, which leaves nothing to choose. And torch takes roots on a CPU by MKL, where it has it,
which gives one in 150 the neighbour of what IEEE 754 asks for; numpy's and CUDA's are as asked for.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


@torch.no_grad()
def total(values: Tensor) -> Tensor:
    """The sum over the first dimension of floats [n, ...], of at least one: [...]."""
    while len(values) > 1:
        half = len(values) // 2
        rest = values[2 * half :]
        values = values[:half] + values[half : 2 * half]
        if len(rest):
            values = torch.cat((values[:-1], values[-1:] + rest))
    return values[0]


@torch.no_grad()
def root_(values: Tensor) -> Tensor:
    """√ of floats that are not negative, in place, rounded as IEEE 754 has it."""
    if values.device.type != "cpu":
        return values.sqrt_()
    there = values.numpy()
    np.sqrt(there, out=there)
    return values
