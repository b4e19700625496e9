"""Floats, int8 and int4: what needs no error feedback; :mod:`protocols.codecs` describes them.

They have their loops in C as well (:mod:`protocols.codecs.kernels`), used where they are compiled,
and equal to the last bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from protocols.codecs.base import scratch
from protocols.codecs.blocks import Blocks, aligned, blocked, ceil_div, scales
from protocols.codecs.compilable import Compilable
from protocols.codecs.kernels import kernel
from protocols.errors import NonFinite

# Adding 1.5 · 2²³ to a small float leaves the nearest integer, ties to even, in the low bits.
_ROUND = 12_582_912.0


class Float(Compilable):
    """The values themselves, in a floating-point type of torch's."""

    block = 1

    def __init__(self, name: str, dtype: torch.dtype, longer: float) -> None:
        self.name = name
        self.dtype = dtype
        self.longer = longer
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


class Int8(Blocks):
    """Levels -127 to 127 times the block's scale, absmax / 127."""

    name = "int8"
    block = 256
    bits = 8.0 + 16 / block
    top = 127.0
    longer = 1.04  # the rest at 7.5 steps: 1.032, and a bf16 scale is off by 0.2 %

    def _size(self, count: int) -> int:
        return 2 * ceil_div(count, self.block) + count

    def _encode(self, values: Tensor, out: Tensor) -> None:
        if self._encoded(values, out):
            return
        count = len(values)
        blocks = blocked(values, self.block, 1)
        levels = scratch.values[: blocks.numel()].view_as(blocks)
        extreme = torch.amax(torch.abs(blocks, out=levels), 1)
        edge = 2 * len(blocks)
        torch.mul(blocks, scales(extreme, self.top, out[:edge]), out=levels)
        integers = levels.add_(_ROUND).view(torch.int32).view(-1)[:count]
        out[edge:].view(torch.int8).copy_(integers)

    def _levels(self, codes: Tensor, count: int) -> Tensor:
        return scratch.decoded[:count].copy_(codes.view(torch.int8))


class Int4(Blocks):
    """Levels -8 to 7 times the block's signed scale, extreme / -8.

    The codes of a chunk's first half of blocks are the low nibbles, those of the second half the
    high ones, so that packing and unpacking run over long contiguous stretches.
    """

    name = "int4"
    block = 64
    bits = 4.0 + 16 / block
    top = 8.0
    longer = 1.3  # the rest at half a step: 1.262

    def _size(self, count: int) -> int:
        blocks = ceil_div(count, self.block)
        return 2 * blocks + ceil_div(blocks, 2) * self.block

    def _encode(self, values: Tensor, out: Tensor) -> None:
        if self._encoded(values, out):
            return
        blocks = blocked(values, self.block, 2)  # an even number of them
        highest, lowest = torch.amax(blocks, 1), torch.amin(blocks, 1)
        extreme = torch.where(highest + lowest < 0, lowest, highest)
        edge = 2 * ceil_div(len(values), self.block)
        inverse = scales(extreme, -self.top, out[:edge])
        levels = torch.mul(blocks, inverse, out=scratch.values[: blocks.numel()].view_as(blocks))
        low, high = levels.round_().clamp_(max=7.0).view(2, -1)
        packed = torch.add(low, high, alpha=16.0, out=scratch.packed[: len(low)])  # exact
        out[edge:].copy_(packed.add_(_ROUND + 136).view(torch.int32))  # 136: from -8 to 0

    def _levels(self, codes: Tensor, count: int) -> Tensor:
        half = len(codes)
        values, nibbles = scratch.decoded[: 2 * half], scratch.codes[:half]
        low, high = values.view(2, half)
        low.copy_(torch.bitwise_and(codes, 15, out=nibbles).sub_(8).view(torch.int8))
        high.copy_(torch.bitwise_right_shift(codes, 4, out=nibbles).sub_(8).view(torch.int8))
        return values[:count]
