"""Consensus without moving parameters: a random projection of the vector to 256 numbers."""

from __future__ import annotations

import torch

SIZE = 256


def sketch(vector: torch.Tensor, seed: bytes) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "big"))
    blocks = len(vector) // SIZE
    rows = vector[: blocks * SIZE].view(blocks, SIZE)
    signs = torch.randint(0, 2, (blocks, SIZE), generator=generator, dtype=torch.int8) * 2 - 1
    out = (rows * signs).sum(0)
    rest = vector[blocks * SIZE :]
    out[: len(rest)] += rest
    return out


def relative_spread(sketches: torch.Tensor) -> float:
    mean = sketches.mean(0)
    return float((sketches - mean).norm(dim=1).mean() / mean.norm().clamp_min(1e-30))
