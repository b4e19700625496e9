"""The k largest of every 4096 elements, two bits each: for slow links, with feedback.

A group of 4096 elements becomes: two bf16 levels, where the k elements are, and two bits of each
(sign, and which level). The levels are the mean magnitudes of those below and of those above the
mean of the k (conditional means, as in SparseLoCo, 2508.15706).

Where they are: sorted indices with their low bits kept as they are and the differences of their
high bits in unary, in an array each: Rice's code in the arrangement of Elias (1974) and Fano. Its
length, ``k·low_bits + k + ⌈4096 / 2^low_bits⌉ − 1`` bits, depends on nothing else, so sizes are
known beforehand, and both directions are a few passes of numpy. Per index, in bits:

====== ==== ====== =========== ================ ========
name   k    plain  here        Rice on average  entropy
====== ==== ====== =========== ================ ========
top12  512  12     5.0         4.4              4.35
top3   128  12     7.0         6.5              6.41
====== ==== ====== =========== ================ ========

A slot that holds Rice's code of any k indices has to be within 1 % as long as this.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocols.codecs.base import CHUNK, Codec, scratch
from protocols.codecs.blocks import TINY, ceil_div, checked
from protocols.errors import Malformed, NonFinite

GROUP: Final = 4096
LIMIT: Final = 2.0**116  # of a magnitude; the sum over a group must stay finite

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]


class TopK(Codec):
    """``keep`` of each 4096; of the last n < 4096 the same share, rounded up."""

    feedback = True
    sparse = True
    block = GROUP
    longer = 1.3  # ample: means are no longer than what they stand for, but for rounding

    def __init__(self, name: str, keep: int, low_bits: int) -> None:
        self.name = name
        self.keep = keep
        self.low_bits = low_bits  # 2 or 4
        self.bits = 8.0 * self._group_size(GROUP) / GROUP

    def _size(self, count: int) -> int:
        whole, rest = divmod(count, GROUP)
        return whole * self._group_size(GROUP) + (self._group_size(rest) if rest else 0)

    def _group_size(self, length: int) -> int:
        return self._edges(length)[-1] + ceil_div(self._kept(length), 4)

    def _kept(self, length: int) -> int:
        return ceil_div(self.keep * length, GROUP)

    def _unary(self, length: int) -> int:
        """Bits of the high parts: a one for each index, a zero for each step up."""
        return self._kept(length) + ceil_div(length, 1 << self.low_bits) - 1

    # --- encoding ------------------------------------------------------------------------------

    def _encode(self, values: Tensor, out: Tensor) -> None:
        magnitudes = torch.abs(values, out=scratch.values[: len(values)])
        checked(torch.amax(magnitudes).item(), LIMIT)
        whole = len(values) // GROUP * GROUP
        edge = whole // GROUP * self._group_size(GROUP)
        target, given, sizes = out.numpy(), values.numpy(), magnitudes.numpy()
        if whole:
            rows = (-1, GROUP)
            self._encode_groups(
                given[:whole].reshape(rows),
                sizes[:whole].reshape(rows),
                target[:edge].reshape(-1, self._group_size(GROUP)),
            )
        if whole < len(values):
            self._encode_groups(given[None, whole:], sizes[None, whole:], target[None, edge:])

    def _encode_groups(self, values: Floats, magnitudes: Floats, out: Bytes) -> None:
        groups, length = values.shape
        keep, unary = self._kept(length), self._unary(length)
        found = _largest(magnitudes, keep)
        picked = values.reshape(-1).take(found).reshape(groups, keep)
        sizes = np.abs(picked)

        upper = sizes > sizes.mean(1, keepdims=True)
        counts = upper.sum(1)
        high = (sizes * upper).sum(1)
        low = (sizes.sum(1) - high) / np.maximum(keep - counts, 1)
        high /= np.maximum(counts, 1)
        levels = torch.from_numpy(np.stack([low, high], 1, dtype=np.float32))
        levels = levels.masked_fill_(levels < TINY, 0.0).to(torch.bfloat16)

        row = np.arange(groups)[:, None]
        indices = found.reshape(groups, keep) - row * length
        ones = np.zeros((groups, unary), np.uint8)
        ones.reshape(-1)[(indices >> self.low_bits) + (row * unary + np.arange(keep))] = 1
        fine = indices.astype(np.uint8) & np.uint8((1 << self.low_bits) - 1)

        a, b, c = self._edges(length)
        out[:, :a] = levels.view(torch.uint8).numpy()
        out[:, a:b] = _pack(fine, self.low_bits)
        out[:, b:c] = np.packbits(ones, axis=1, bitorder="little")
        out[:, c:] = _pack(upper.view(np.uint8) | (picked < 0).view(np.uint8) << 1, 2)

    def _edges(self, length: int) -> tuple[int, int, int]:
        """Where levels, low bits and high parts of a group end."""
        fine = ceil_div(self._kept(length) * self.low_bits, 8)
        return 4, 4 + fine, 4 + fine + ceil_div(self._unary(length), 8)

    # --- decoding ------------------------------------------------------------------------------

    def _decode(self, data: Tensor, out: Tensor) -> None:
        found = self._read(data, len(out))  # all of it before anything is written
        out.zero_()
        target = out.numpy()
        for indices, values in found:
            target[indices] = values

    def _decode_add(self, data: Tensor, weight: float, accumulator: Tensor) -> None:
        target = accumulator.numpy()
        for indices, values in self._read(data, len(accumulator)):
            target[indices] += values * np.float32(weight)  # no index occurs twice

    def _read(self, data: Tensor, count: int) -> list[tuple[Indices, Floats]]:
        """Indices and values of the whole groups, and of the rest."""
        whole = count // GROUP * GROUP
        edge = whole // GROUP * self._group_size(GROUP)
        source = data.numpy()
        found = []
        if whole:
            groups = source[:edge].reshape(-1, self._group_size(GROUP))
            found.append(self._read_groups(groups, GROUP, 0))
        if whole < count:
            found.append(self._read_groups(source[None, edge:], count - whole, whole))
        return found

    def _read_groups(self, data: Bytes, length: int, start: int) -> tuple[Indices, Floats]:
        groups, keep, unary = len(data), self._kept(length), self._unary(length)
        a, b, c = self._edges(length)
        levels = torch.from_numpy(data[:, :a].copy()).view(torch.bfloat16).float().numpy()
        largest = np.abs(levels).max()
        if not largest <= LIMIT:
            raise NonFinite(f"{self.name}: a level is {largest}")

        row = np.arange(groups)[:, None]
        ones = np.flatnonzero(np.unpackbits(data[:, b:c], axis=1, count=unary, bitorder="little"))
        if len(ones) != groups * keep:
            raise Malformed(f"{self.name}: {len(ones)} indices, expected {groups * keep}")
        places = ones.reshape(groups, keep) - row * unary
        if places.min() < 0 or places.max() >= unary:
            raise Malformed(f"{self.name}: a group has too few indices and another too many")
        fine = _unpack(data[:, a:b], self.low_bits, keep)
        indices = (places - np.arange(keep)) << self.low_bits | fine
        if indices[:, -1].max() >= length or (keep > 1 and np.diff(indices, axis=1).min() <= 0):
            raise Malformed(f"{self.name}: indices that do not ascend, or lie outside")

        codes = _unpack(data[:, c:], 2, keep)
        signed = np.concatenate([levels, -levels], 1)  # in the order of the codes
        values = signed.reshape(-1).take(codes + 4 * row)
        return (indices + (row * GROUP + start)).reshape(-1), values.reshape(-1)


def _largest(magnitudes: Floats, keep: int) -> Indices:
    """Where each row's largest are, ascending in the whole; of equals, those that come first."""
    groups, length = magnitudes.shape
    bound = np.partition(magnitudes, length - keep, axis=1)[:, length - keep, None]
    chosen = magnitudes >= bound
    found = np.flatnonzero(chosen)
    if len(found) != groups * keep:
        tied = np.flatnonzero(chosen.sum(1) != keep)
        above, equal = magnitudes[tied] > bound[tied], magnitudes[tied] == bound[tied]
        room = keep - above.sum(1, keepdims=True)
        chosen[tied] = above | (equal & (np.cumsum(equal, 1) <= room))
        found = np.flatnonzero(chosen)
    return found


def _pack(codes: Bytes, width: int) -> Bytes:
    """Codes [rows, n] of 2 or 4 bits, consecutive ones to a byte, the first in the lowest bits."""
    per = 8 // width
    padded = codes
    if codes.shape[1] % per:
        padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per)))
    packed = padded[:, ::per].copy()
    for place in range(1, per):
        packed |= padded[:, place::per] << (width * place)
    return packed


def _unpack(packed: Bytes, width: int, count: int) -> Bytes:
    """The inverse of :func:`_pack`: [rows, count]."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    codes = packed[:, :, None] >> shifts & np.uint8((1 << width) - 1)
    return codes.reshape(len(packed), -1)[:, :count]


assert CHUNK % GROUP == 0, "a chunk consists of whole groups"
