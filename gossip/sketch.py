"""Consensus without moving parameters: 256 numbers from which distances can be estimated.

Every element gets a random sign and lands in one of :data:`SIZE` buckets (a count sketch,
Charikar, Chen and Farach-Colton 2002, whose hash is the position in a block). The sketch is
linear and E‖sketch(x)‖² = ‖x‖², so sketches of several islands, made with the signs of one run
and round, give every pairwise distance and the distance to the mean to within about
√(2/256) / 2 = 4.4 % (one standard deviation of the norm), whatever the length of the vector.
"""

from __future__ import annotations

import torch
from blake3 import blake3

SIZE = 256  # buckets; 1 KB in fp32
_ROWS = 4096  # blocks of SIZE elements worked on at a time


def sketch(vector: torch.Tensor, run: bytes, round_: int) -> bytes:
    """The projection of fp32 [N] with the signs of a run and round: 1 KB, little endian.

    One pass over the vector. Equal vectors have equal sketches on one machine; between machines
    the last bits of a sum may differ.
    """
    seed = blake3(b"atoll sketch\x00" + run + round_.to_bytes(8, "big")).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "big"))
    total = torch.zeros(SIZE, dtype=torch.float64)
    for start in range(0, len(vector), _ROWS * SIZE):
        piece = vector[start : start + _ROWS * SIZE]
        rows = -(-len(piece) // SIZE)
        signs = torch.randint(0, 2, (rows * SIZE,), generator=generator, dtype=torch.int8)
        signed = signs[: len(piece)].mul_(2).sub_(1) * piece
        if rows * SIZE != len(piece):
            signed = torch.nn.functional.pad(signed, (0, rows * SIZE - len(piece)))
        total += signed.view(rows, SIZE).sum(0, dtype=torch.float64)
    return total.to(torch.float32).numpy().tobytes()


def read(data: bytes) -> torch.Tensor | None:
    """A published sketch as fp32 [SIZE]; None if it is none, or not finite."""
    if len(data) != 4 * SIZE:
        return None
    values = torch.frombuffer(bytearray(data), dtype=torch.float32)
    return values if bool(torch.isfinite(values).all()) else None


def distances(sketches: torch.Tensor) -> torch.Tensor:
    """Estimated L2 distance of every pair: [K, SIZE] to [K, K]."""
    return torch.cdist(sketches.double(), sketches.double())


def relative_spread(sketches: torch.Tensor) -> float:
    """Mean distance to the mean, over the norm of the mean: [K, SIZE] to one number."""
    mean = sketches.double().mean(0)
    spread = (sketches.double() - mean).norm(dim=1).mean()
    return float(spread / mean.norm().clamp_min(1e-30))
