"""Floats, int8 and int4: what needs no error feedback; :mod:`protocols.codecs` describes them.

They have their loops in C as well (:mod:`protocols.codecs.kernels`), used where they are compiled,
and equal to the last bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from protocols.codecs.base import scratch
from protocols.codecs.blocks import (
    aligned,
    blocked,
    ceil_div,
    read_scales,
    scale_blocks,
    scales,
)
from protocols.codecs.compiled import Compiled
from protocols.codecs.kernels import kernel
from protocols.errors import NonFinite

_INT4_BLOCK = 64
_INT8_BLOCK = 256
# Adding 1.5 · 2²³ to a small float leaves the nearest integer, ties to even, in the low bits.
_ROUND = 12_582_912.0


class Float(Compiled):
    """The values themselves, in a floating-point type of torch's."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype
        self.bits = 8.0 * dtype.itemsize

    def _size(self, count: int) -> int:
        return count * self.dtype.itemsize

    def _encode(self, values: Tensor, out: Tensor) -> None:
        if self._encoded(values, out):
            return
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
        if self._decoded(data, 1.0, out, add=False):
            return
        if self.dtype is torch.float32:
            out.view(torch.uint8).copy_(data)
        else:
            out.copy_(aligned(data, self.dtype))
        self._finite(out)

    def _decode_times(self, data: Tensor, weight: float, out: Tensor) -> None:
        if not self._decoded(data, weight, out, add=False):
            super()._decode_times(data, weight, out)

    def _decode_add(self, data: Tensor, weight: float, accumulator: Tensor) -> None:
        if self._decoded(data, weight, accumulator, add=True):
            return
        if self.dtype is torch.float32:
            values = aligned(data, torch.float32)  # straight from the bytes
        else:
            values = scratch.decoded[: len(accumulator)]
            values.copy_(aligned(data, self.dtype))
        self._finite(values)
        product = torch.mul(values, weight, out=scratch.values[: len(values)])
        accumulator.add_(product)

    def _check(self, data: Tensor, count: int) -> None:
        compiled = kernel(self.name)
        if compiled is not None:
            if not compiled.finite(data, count):
                raise NonFinite(f"{self.name}: a value is not finite")
        elif self.dtype is torch.float32:
            self._finite(aligned(data, torch.float32))  # where it lies
        else:
            super()._check(data, count)

    def _finite(self, values: Tensor) -> None:
        square = torch.dot(values, values).item()  # if finite, it proves all of them so in one go
        if not math.isfinite(square) and not torch.isfinite(values).all():
            raise NonFinite(f"{self.name}: a value is not finite")


class Int8(Compiled):
    """Levels -127 to 127 times the block's scale, absmax / 127."""

    name = "int8"
    bits = 8.0 + 16 / _INT8_BLOCK
    top = 127.0

    def _size(self, count: int) -> int:
        return 2 * ceil_div(count, _INT8_BLOCK) + count

    def _encode(self, values: Tensor, out: Tensor) -> None:
        if self._encoded(values, out):
            return
        count = len(values)
        blocks = blocked(values, _INT8_BLOCK, 1)
        levels = scratch.values[: blocks.numel()].view_as(blocks)
        extreme = torch.amax(torch.abs(blocks, out=levels), 1)
        edge = 2 * len(blocks)
        torch.mul(blocks, scales(extreme, self.top, out[:edge]), out=levels)
        integers = levels.add_(_ROUND).view(torch.int32).view(-1)[:count]
        out[edge:].view(torch.int8).copy_(integers)

    def _decode(self, data: Tensor, out: Tensor) -> None:
        self._decode_times(data, 1.0, out)

    def _decode_times(self, data: Tensor, weight: float, out: Tensor) -> None:
        if not self._decoded(data, weight, out, add=False):
            self._scaled(data, weight, out)

    def _decode_add(self, data: Tensor, weight: float, accumulator: Tensor) -> None:
        if not self._decoded(data, weight, accumulator, add=True):
            accumulator.add_(self._scaled(data, weight, scratch.decoded[: len(accumulator)]))

    def _check(self, data: Tensor, count: int) -> None:
        read_scales(data[: 2 * ceil_div(count, _INT8_BLOCK)], self.top)  # all codes are levels

    def _scaled(self, data: Tensor, weight: float, out: Tensor) -> Tensor:
        edge = 2 * ceil_div(len(out), _INT8_BLOCK)
        by = read_scales(data[:edge], self.top)
        out.copy_(data[edge:].view(torch.int8))
        scale_blocks(out, _INT8_BLOCK, by.mul_(weight))
        return out


class Int4(Compiled):
    """Levels -8 to 7 times the block's signed scale, extreme / -8.

    The codes of a chunk's first half of blocks are the low nibbles, those of the second half the
    high ones, so that packing and unpacking run over long contiguous stretches.
    """

    name = "int4"
    bits = 4.0 + 16 / _INT4_BLOCK
    top = 8.0

    def _size(self, count: int) -> int:
        blocks = ceil_div(count, _INT4_BLOCK)
        return 2 * blocks + ceil_div(blocks, 2) * _INT4_BLOCK

    def _encode(self, values: Tensor, out: Tensor) -> None:
        if self._encoded(values, out):
            return
        blocks = blocked(values, _INT4_BLOCK, 2)  # an even number of them
        highest, lowest = torch.amax(blocks, 1), torch.amin(blocks, 1)
        extreme = torch.where(highest + lowest < 0, lowest, highest)
        edge = 2 * ceil_div(len(values), _INT4_BLOCK)
        inverse = scales(extreme, -self.top, out[:edge])
        levels = torch.mul(blocks, inverse, out=scratch.values[: blocks.numel()].view_as(blocks))
        low, high = levels.round_().clamp_(max=7.0).view(2, -1)
        packed = torch.add(low, high, alpha=16.0, out=scratch.packed[: len(low)])  # exact
        out[edge:].copy_(packed.add_(_ROUND + 136).view(torch.int32))  # 136: from -8 to 0

    def _decode(self, data: Tensor, out: Tensor) -> None:
        self._decode_times(data, 1.0, out)

    def _decode_times(self, data: Tensor, weight: float, out: Tensor) -> None:
        if self._decoded(data, weight, out, add=False):
            return
        if len(out) == 2 * (len(data) - 2 * ceil_div(len(out), _INT4_BLOCK)):
            self._scaled(data, weight, len(out), out)
        else:
            out.copy_(self._scaled(data, weight, len(out), scratch.decoded)[: len(out)])

    def _decode_add(self, data: Tensor, weight: float, accumulator: Tensor) -> None:
        if self._decoded(data, weight, accumulator, add=True):
            return
        count = len(accumulator)
        accumulator.add_(self._scaled(data, weight, count, scratch.decoded)[:count])

    def _check(self, data: Tensor, count: int) -> None:
        read_scales(data[: 2 * ceil_div(count, _INT4_BLOCK)], self.top)  # all codes are levels

    def _scaled(self, data: Tensor, weight: float, count: int, out: Tensor) -> Tensor:
        """``count`` elements and what fills the last pair of blocks, into the first of ``out``."""
        number = ceil_div(count, _INT4_BLOCK)
        by = read_scales(data[: 2 * number], self.top)
        packed = data[2 * number :]
        half = len(packed)
        values, codes = out[: 2 * half], scratch.codes[:half]
        for place, part in enumerate(values.view(2, half)):
            if place == 0:
                torch.bitwise_and(packed, 15, out=codes)
            else:
                torch.bitwise_right_shift(packed, 4, out=codes)
            part.copy_(codes.sub_(8).view(torch.int8))
        values[: number * _INT4_BLOCK].view(number, _INT4_BLOCK).mul_(by.mul_(weight)[:, None])
        return values
