"""What codecs in blocks share: cutting values into blocks, and bf16 scales in both directions."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from protocols.codecs.base import scratch
from protocols.errors import NonFinite

LIMIT: Final = 2.0**127  # magnitudes from here on are treated as infinite by the block codecs
TINY: Final = 2.0**-120  # smallest scale; a smaller one would have a subnormal neighbourhood


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)


def aligned(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes seen as ``dtype``, which torch allows at multiples of its size only."""
    return (data if data.storage_offset() % dtype.itemsize == 0 else data.clone()).view(dtype)


def blocked(values: Tensor, block: int, multiple: int = 1) -> Tensor:
    """``values`` as [blocks, block], the last ones filled up with zeros."""
    blocks = ceil_div(ceil_div(len(values), block), multiple) * multiple
    if blocks * block == len(values):
        return values.view(blocks, block)
    padded = scratch.decoded[: blocks * block]
    padded[: len(values)].copy_(values)
    padded[len(values) :].zero_()
    return padded.view(blocks, block)


def checked(largest: float, limit: float = LIMIT) -> None:
    """Raise :class:`ValueError` for what no scale can stand for, NaN as well."""
    if not largest < limit:
        raise ValueError(f"a value is not finite or too large: {largest}")


def scales(extreme: Tensor, levels: float, out: Tensor) -> Tensor:
    """Write bf16 scales, ``extreme / levels``, to ``out``; return what to multiply values with.

    Few operations, since on a thousand blocks each costs as much as a pass over the chunk's codes.
    """
    smallest, largest = (bound.item() for bound in torch.aminmax(extreme.abs()))
    checked(largest)
    flush = smallest < TINY * abs(levels)
    if flush:
        extreme = extreme.masked_fill(extreme.abs() < TINY * abs(levels), 0.0)
    stored = extreme.mul_(1 / levels).to(torch.bfloat16)
    out.copy_(stored.view(torch.uint8)[: len(out)])  # a filling block's scale does not travel
    inverse = stored.float().reciprocal_()
    if flush:
        inverse.masked_fill_(stored == 0, 0.0)
    return inverse[:, None]


def scales_limit(levels: float) -> float:
    """No encoder writes a scale beyond this."""
    return 1.01 * LIMIT / levels


def read_scales(data: Tensor, levels: float) -> Tensor:
    """Scales of a chunk; raises NonFinite for those that no encoder writes."""
    found = aligned(data, torch.bfloat16).float()
    largest = torch.amax(found.abs()).item()
    if not largest <= scales_limit(levels):
        raise NonFinite(f"a block's scale is {largest}")
    return found


def scale_blocks(values: Tensor, block: int, by: Tensor) -> None:
    """Multiply each block of ``values`` [n] with its scale, in place; the last may be short."""
    whole = len(values) // block
    if whole:
        values[: whole * block].view(whole, block).mul_(by[:whole, None])
    if whole < len(by):
        values[whole * block :].mul_(by[whole])
