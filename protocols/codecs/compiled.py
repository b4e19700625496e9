"""How codecs call their compiled loops (:mod:`protocols.codecs.kernels`)."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from protocols.codecs.base import Codec
from protocols.codecs.blocks import ceil_div, read_scales, scale_blocks, scales_limit
from protocols.codecs.kernels import kernel
from protocols.errors import NonFinite


class Compiled(Codec):
    """A codec whose loops may be compiled. Each call says whether they are, or raises."""

    top = 1.0  # the largest magnitude of a level; floats have none

    def _encoded(self, values: Tensor, out: Tensor) -> bool:
        compiled = kernel(self.name)
        if compiled is not None and not compiled.encode(values, out):
            raise ValueError(f"a value is not finite or too large for {self.name}")
        return compiled is not None

    def _decoded(self, data: Tensor, weight: float, out: Tensor, *, add: bool) -> bool:
        compiled, limit = kernel(self.name), scales_limit(self.top)
        if compiled is not None and not compiled.decode(data, out, weight, limit, add=add):
            raise NonFinite(f"{self.name}: what it stands for is not finite or too large")
        return compiled is not None


class Blocks(Compiled):
    """A codec of levels: ⌈n / block⌉ bf16 scales, then the codes, each of which is a level."""

    block: int  # elements that share a scale

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
        """The levels of ``count`` codes, in a buffer of this thread's."""
