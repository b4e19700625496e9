"""SPARTA: a few random coordinates are averaged after every inner step.

Exo Labs, *Sparse Parameter Averaging* (2025). All islands draw the same coordinates from a common
seed, so only values travel. The draw is a permutation walked in pieces: each coordinate comes
once before any comes again, and islands never drift apart further than one walk allows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SHARE = 0.005  # of all coordinates a step


def steps_a_walk(size: int, share: float) -> int:
    """After so many steps every coordinate has been averaged once."""
    if not 0 < share <= 1:
        raise ValueError(f"a share of {share} of the coordinates")
    return math.ceil(size / max(1, round(size * share)))


def coordinates(size: int, share: float, step: int, seed: int) -> Tensor:
    """The coordinates of inner step ``step`` (from 0), int64, equal on all islands."""
    walk, piece = divmod(step, steps_a_walk(size, share))
    generator = torch.Generator().manual_seed(seed * 1_000_003 + walk)
    count = max(1, round(size * share))
    return torch.randperm(size, generator=generator)[piece * count : (piece + 1) * count]


@torch.no_grad()
def average(local: Tensor, at: Tensor, mean: Tensor) -> Tensor:
    """Put the islands' mean [len(at)] in place of ``local`` [n] at these coordinates."""
    return local.index_copy_(0, at, mean)
