"""What codecs in blocks share: cutting values into blocks, and bf16 scales in both directions.

Those whose codes are levels of their block's scale are :class:`Blocks`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

import torch
from torch import Tensor

from protocols.codecs.base import scratch
from protocols.codecs.compilable import Compilable
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
    """``values`` as [blocks, block], the last ones filled up with zeros.

    A view of ``values`` where nothing has to be filled up, to be read and not changed; else of
    ``scratch.decoded``, which an encoder has no other use for until it is done with the blocks.
    """
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


class Blocks(Compilable):
    """A codec of levels: ⌈n / block⌉ bf16 scales, then the codes, each of which is a level.

    The elements of a block share a scale.
    """

    top: float  # the largest magnitude of a level

    def _largest_scale(self) -> float:
        return scales_limit(self.top)

    def _decode(self, data: Tensor, out: Tensor) -> None:
        self._decode_times(data, 1.0, out)

    def _decode_times(self, data: Tensor, weight: float, out: Tensor) -> None:
        if not self._decoded(data, weight, out, add=False):
            out.copy_(self._scaled(data, weight, len(out)))

    def _decode_add(self, data: Tensor, weight: float, accumulator: Tensor) -> None:
        if not self._decoded(data, weight, accumulator, add=True):
            accumulator.add_(self._scaled(data, weight, len(accumulator)))

    def _check(self, data: Tensor, count: int) -> None:
        read_scales(data[: 2 * ceil_div(count, self.block)], self.top)  # all codes are levels

    def _scaled(self, data: Tensor, weight: float, count: int) -> Tensor:
        edge = 2 * ceil_div(count, self.block)
        by = read_scales(data[:edge], self.top)
        values = self._levels(data[edge:], count)
        scale_blocks(values, self.block, by.mul_(weight))
        return values

    @abstractmethod
    def _levels(self, codes: Tensor, count: int) -> Tensor:
        """The levels of ``count`` codes, in ``scratch.decoded``; the caller changes them."""
