"""The five codecs; :mod:`protocols.codecs` tells what they do."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from protocols.codecs.base import Codec, scratch
from protocols.errors import Malformed, NonFinite

NAMES: Final = ("fp32", "bf16", "fp16", "int8", "int4")

_LIMIT = 2.0**127  # magnitudes from here on are treated as infinite by the block codecs
_TINY = 2.0**-120  # smallest scale; a smaller one would have a subnormal neighbourhood
_INT4_BLOCK = 64
_INT8_BLOCK = 256
# Adding 1.5 · 2²³ to a small float leaves the nearest integer, ties to even, in the low bits.
_ROUND = 12_582_912.0


class _Float(Codec):
    """The values themselves, in a floating-point type of torch's."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype
        self.bits = 8.0 * dtype.itemsize

    def _size(self, count: int) -> int:
        return count * self.dtype.itemsize

    def _encode(self, values: Tensor, out: Tensor) -> None:
        if self.dtype is torch.float32:
            typed = values
        else:
            typed = scratch.half[: len(values)].view(self.dtype)
            typed.copy_(values)
        # A small sum of squares proves every value finite and in range at 80 GB/s.
        bound = torch.finfo(self.dtype).max
        square = torch.dot(values, values).item()
        if not square < min(bound * bound, 1e38) and not torch.isfinite(typed).all():
            raise ValueError(f"a value is not finite or beyond {self.name}'s {bound:.4g}")
        out.copy_(typed.view(torch.uint8))

    def _decode(self, data: Tensor, out: Tensor) -> None:
        if self.dtype is torch.float32:
            out.view(torch.uint8).copy_(data)
        else:
            out.copy_(_aligned(data, self.dtype))
        if not math.isfinite(torch.dot(out, out).item()) and not torch.isfinite(out).all():
            raise NonFinite(f"{self.name}: a value is not finite")


class _Int8(Codec):
    """Levels -127 to 127 times the block's scale, absmax / 127."""

    name = "int8"
    bits = 8.0 + 16 / _INT8_BLOCK

    def _size(self, count: int) -> int:
        return 2 * _ceil_div(count, _INT8_BLOCK) + count

    def _encode(self, values: Tensor, out: Tensor) -> None:
        count = len(values)
        blocks = _blocked(values, _INT8_BLOCK, 1)
        levels = scratch.values[: blocks.numel()].view_as(blocks)
        extreme = torch.amax(torch.abs(blocks, out=levels), 1)
        edge = 2 * len(blocks)
        torch.mul(blocks, _scales(extreme, 127.0, out[:edge]), out=levels)
        integers = levels.add_(_ROUND).view(torch.int32).view(-1)[:count]
        out[edge:].view(torch.int8).copy_(integers)

    def _decode(self, data: Tensor, out: Tensor) -> None:
        count = len(out)
        number = _ceil_div(count, _INT8_BLOCK)
        scales = _read_scales(data[: 2 * number], 127.0)
        out.copy_(data[2 * number :].view(torch.int8))
        whole = count // _INT8_BLOCK
        if whole:
            out[: whole * _INT8_BLOCK].view(whole, _INT8_BLOCK).mul_(scales[:whole, None])
        if whole < number:
            out[whole * _INT8_BLOCK :].mul_(scales[whole])


class _Int4(Codec):
    """Levels -8 to 7 times the block's signed scale, extreme / -8.

    The codes of a chunk's first half of blocks are the low nibbles, those of the second half the
    high ones, so that packing and unpacking run over long contiguous stretches.
    """

    name = "int4"
    bits = 4.0 + 16 / _INT4_BLOCK

    def _size(self, count: int) -> int:
        blocks = _ceil_div(count, _INT4_BLOCK)
        return 2 * blocks + _ceil_div(blocks, 2) * _INT4_BLOCK

    def _encode(self, values: Tensor, out: Tensor) -> None:
        blocks = _blocked(values, _INT4_BLOCK, 2)  # an even number of them
        highest, lowest = torch.amax(blocks, 1), torch.amin(blocks, 1)
        extreme = torch.where(highest + lowest < 0, lowest, highest)
        edge = 2 * _ceil_div(len(values), _INT4_BLOCK)
        inverse = _scales(extreme, -8.0, out[:edge])
        levels = torch.mul(blocks, inverse, out=scratch.values[: blocks.numel()].view_as(blocks))
        low, high = levels.round_().clamp_(max=7.0).view(2, -1)
        packed = torch.add(low, high, alpha=16.0, out=scratch.packed[: len(low)])  # exact
        out[edge:].copy_(packed.add_(_ROUND + 136).view(torch.int32))  # 136: from -8 to 0

    def _decode(self, data: Tensor, out: Tensor) -> None:
        number = _ceil_div(len(out), _INT4_BLOCK)
        scales = _read_scales(data[: 2 * number], 8.0)
        packed = data[2 * number :]
        half = len(packed)
        direct = len(out) == 2 * half
        values = out if direct else scratch.values[: 2 * half]
        codes = scratch.codes[:half]
        for place, part in enumerate(values.view(2, half)):
            if place == 0:
                torch.bitwise_and(packed, 15, out=codes)
            else:
                torch.bitwise_right_shift(packed, 4, out=codes)
            part.copy_(codes.sub_(8).view(torch.int8))
        values[: number * _INT4_BLOCK].view(number, _INT4_BLOCK).mul_(scales[:, None])
        if not direct:
            out.copy_(values[: len(out)])


_CODECS: Final[dict[str, Codec]] = {
    one.name: one
    for one in (
        _Float("fp32", torch.float32),
        _Float("bf16", torch.bfloat16),
        _Float("fp16", torch.float16),
        _Int8(),
        _Int4(),
    )
}


def codec(name: str) -> Codec:
    """The codec of that name; raises :class:`~protocols.errors.Malformed` for another one."""
    try:
        return _CODECS[name]
    except KeyError:
        raise Malformed(f"codec {name!r} is none of {', '.join(NAMES)}") from None


def _aligned(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes seen as ``dtype``, which torch allows at multiples of its size only."""
    return (data if data.storage_offset() % dtype.itemsize == 0 else data.clone()).view(dtype)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _blocked(values: Tensor, block: int, multiple: int) -> Tensor:
    """``values`` as [blocks, block], the last ones filled up with zeros."""
    blocks = _ceil_div(_ceil_div(len(values), block), multiple) * multiple
    if blocks * block == len(values):
        return values.view(blocks, block)
    padded = scratch.decoded[: blocks * block]
    padded[: len(values)].copy_(values)
    padded[len(values) :].zero_()
    return padded.view(blocks, block)


def _scales(extreme: Tensor, levels: float, out: Tensor) -> Tensor:
    """Write bf16 scales, ``extreme / levels``, to ``out``; return what to multiply values with.

    Few operations, since on a thousand blocks each costs as much as a pass over the chunk's codes.
    """
    smallest, largest = (bound.item() for bound in torch.aminmax(extreme.abs()))
    if not largest < _LIMIT:  # also where it is NaN
        raise ValueError(f"a value is not finite or too large: {largest}")
    flush = smallest < _TINY * abs(levels)
    if flush:
        extreme = extreme.masked_fill(extreme.abs() < _TINY * abs(levels), 0.0)
    stored = extreme.mul_(1 / levels).to(torch.bfloat16)
    out.copy_(stored.view(torch.uint8)[: len(out)])  # a filling block's scale does not travel
    inverse = stored.float().reciprocal_()
    if flush:
        inverse.masked_fill_(stored == 0, 0.0)
    return inverse[:, None]


def _read_scales(data: Tensor, levels: float) -> Tensor:
    """Scales of a chunk; raises NonFinite for those that no encoder writes."""
    scales = _aligned(data, torch.bfloat16).float()
    largest = torch.amax(scales.abs()).item()
    if not largest <= 1.01 * _LIMIT / levels:
        raise NonFinite(f"a block's scale is {largest}")
    return scales
