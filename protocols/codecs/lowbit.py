"""Two bits and one bit an element, in blocks of 64 with a bf16 scale: for use with feedback.

Codes are packed with consecutive elements in one byte, the first in the lowest bits. Scales are
the least-squares fit to the block, so that a block is never further from its decoded values than
from zero: the contraction that error feedback needs to converge (Karimireddy et al., 1901.09847).

Both have their loops in C as well, equal to the last bit: so sums over a block are always added up
in one order (:func:`_sums`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from protocols.codecs.base import scratch
from protocols.codecs.blocks import TINY, Blocks, blocked, ceil_div, checked

BLOCK: Final = 64
_LANES: Final = 16
LIMIT: Final = 2.0**121  # of a magnitude; the sum over a block must stay finite

# The best step of four uniform levels for Gaussian values is 0.9957 σ (Max, 1960), and their mean
# magnitude is 0.7979 σ. Uniform levels have an error of 0.345, the best non-uniform ones of 0.343.
_STEP: Final = 0.9957 / 0.7979
# Bytes of codes 0 to 3, seen as one number, times this have all four in the highest byte.
_GATHER: Final = np.uint32(1 << 24 | 1 << 18 | 1 << 12 | 1 << 6)
# The four levels of each byte, as one element of 16 bytes: numpy takes those at memory speed.
_LEVELS: Final = np.array(
    [[(byte >> shift & 3) - 1.5 for shift in (0, 2, 4, 6)] for byte in range(256)], np.float32
).view(np.complex128)[:, 0]


class _LowBit(Blocks):
    """What both have in common."""

    feedback = True
    block = BLOCK
    longer = 1.3  # ample: a least-squares fit is no longer than what it fits, but for rounding
    width: int  # bits of a code

    def _size(self, count: int) -> int:
        return 2 * ceil_div(count, BLOCK) + ceil_div(count * self.width, 8)


def _sums(blocks: Tensor) -> Tensor:
    """[n] sums over [n, BLOCK]: of every 16th element first, then of halves of what is left."""
    rows = blocks.view(-1, BLOCK // _LANES, _LANES)
    total = rows[:, 0] + rows[:, 1]
    for row in range(2, BLOCK // _LANES):
        total.add_(rows[:, row])
    width = _LANES
    while width > 1:
        width //= 2
        total = total[:, :width] + total[:, width:]
    return total[:, 0]


def _write_scales(by: Tensor, out: Tensor) -> None:
    out.copy_(by.masked_fill_(by < TINY, 0.0).to(torch.bfloat16).view(torch.uint8))


class Int2(_LowBit):
    """Levels -1.5, -0.5, 0.5 and 1.5 times the scale."""

    name = "int2"
    bits = 2.0 + 16 / BLOCK
    width = 2
    top = 1.5

    def _encode(self, values: Tensor, out: Tensor) -> None:
        if self._encoded(values, out):
            return
        count = len(values)
        blocks = blocked(values, BLOCK)
        work = scratch.values[: blocks.numel()].view_as(blocks)
        fillers = blocks.numel() - count
        step = _sums(torch.abs(blocks, out=work)).mul_(_STEP / BLOCK)  # of the first guess
        step[-1] *= BLOCK / (BLOCK - fillers)
        checked(torch.amax(step).item(), LIMIT * _STEP)
        inverse = step.reciprocal().masked_fill_(step < TINY, 0.0)
        scaled = torch.mul(blocks, inverse[:, None], out=work)
        levels = scratch.levels[: blocks.numel()].view_as(blocks)
        torch.floor(scaled, out=levels).clamp_(-2.0, 1.0).add_(0.5)
        fit = _sums(scaled.mul_(levels))
        squares = torch.mul(levels, levels, out=work).sum(1)
        squares[-1] -= 0.25 * fillers
        fit.div_(squares)
        edge = 2 * len(blocks)
        _write_scales(fit.mul_(step), out[:edge])
        codes = scratch.codes[: ceil_div(count, 4) * 4]
        codes.view(torch.int8).copy_(levels.add_(1.5).view(-1)[: len(codes)])
        packed = codes.numpy().view(np.uint32) * _GATHER >> 24
        out[edge:].copy_(torch.from_numpy(packed.astype(np.uint8)))

    def _levels(self, codes: Tensor, count: int) -> Tensor:
        values = scratch.decoded[: 4 * len(codes)]
        np.take(_LEVELS, codes.numpy(), out=values.numpy().view(np.complex128), mode="clip")
        return values[:count]


class Int1(_LowBit):
    """The sign times the mean magnitude of the block (1-bit SGD, Seide et al. 2014)."""

    name = "int1"
    bits = 1.0 + 16 / BLOCK
    width = 1
    top = 1.0

    def _encode(self, values: Tensor, out: Tensor) -> None:
        if self._encoded(values, out):
            return
        count = len(values)
        blocks = blocked(values, BLOCK)
        total = _sums(torch.abs(blocks, out=scratch.values[: blocks.numel()].view_as(blocks)))
        checked(torch.amax(total).item(), LIMIT * BLOCK)
        edge = 2 * len(blocks)
        total.div_(BLOCK)
        total[-1] *= BLOCK / (BLOCK - (blocks.numel() - count))  # the mean over what is there
        _write_scales(total, out[:edge])
        negative = scratch.codes[:count].numpy().view(np.bool_)
        np.less(values.numpy(), 0.0, out=negative)
        out[edge:].copy_(torch.from_numpy(np.packbits(negative, bitorder="little")))

    def _levels(self, codes: Tensor, count: int) -> Tensor:
        signs = np.unpackbits(codes.numpy(), count=count, bitorder="little").view(np.int8)
        values = scratch.decoded[:count]
        values.copy_(torch.from_numpy(signs))
        return values.mul_(-2.0).add_(1.0)
