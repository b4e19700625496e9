"""Sums that come to the same bits on every machine.

A library adds in the order that suits its processor; here halves are added to each other, element
by element, which leaves nothing to choose.
"""

from __future__ import annotations

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
