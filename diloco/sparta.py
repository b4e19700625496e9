"""SPARTA: a few random coordinates are averaged after every inner step.

Exo Labs, *Sparse Parameter Averaging* (2025). All islands draw the same coordinates from a common
seed, so only values travel. The draw is a permutation walked in pieces: each coordinate comes
once before any comes again, and islands never drift apart further than one walk allows. It is made
of whole numbers alone (x → a x + b modulo the size), the same with any version of anything.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

MOST = 2**31  # coordinates whose products fit into 63 bits


def steps_a_walk(size: int, share: float) -> int:
    """The number of steps after which every coordinate has been averaged once."""
    if not 0 < share <= 1:
        raise ValueError(f"a share of {share} of the coordinates")
    if size > MOST:
        raise ValueError(f"{size} coordinates are more than {MOST}")
    return math.ceil(size / drawn(size, share))


def drawn(size: int, share: float) -> int:
    """How many coordinates a step has."""
    return max(1, round(size * share))


def coordinates(size: int, share: float, step: int, seed: int) -> Tensor:
    """The coordinates of inner step ``step`` (from 0), int64 [k], equal on all islands.

    k is :func:`drawn`, and less in the last step of a walk.
    """
    walk, piece = divmod(step, steps_a_walk(size, share))
    drawn_by = hashlib.blake2b(f"{seed} {walk}".encode(), digest_size=16).digest()
    offset = int.from_bytes(drawn_by[:8], "big") % size
    stride = int.from_bytes(drawn_by[8:], "big") % size
    while math.gcd(stride, size) > 1:
        stride = (stride + 1) % size
    count = drawn(size, share)
    places = torch.arange(piece * count, min(size, (piece + 1) * count))
    return places.mul_(stride).add_(offset).remainder_(size)
