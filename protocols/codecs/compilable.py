"""How codecs call their compiled loops (:mod:`protocols.codecs.kernels`)."""

from __future__ import annotations

import math

from torch import Tensor

from protocols.codecs.base import Codec
from protocols.codecs.kernels import kernel
from protocols.errors import NonFinite


class Compilable(Codec):
    """A codec that may have loops in C. Each call says whether they did the work, or raises."""

    def _largest_scale(self) -> float:
        """Beyond it nothing is decoded; floats have no scales."""
        return math.inf

    def _encoded(self, values: Tensor, out: Tensor) -> bool:
        compiled = kernel(self.name)
        if compiled is not None and not compiled.encode(values, out):
            raise ValueError(f"a value is not finite or too large for {self.name}")
        return compiled is not None

    def _decoded(self, data: Tensor, weight: float, out: Tensor, *, add: bool) -> bool:
        compiled, limit = kernel(self.name), self._largest_scale()
        if compiled is not None and not compiled.decode(data, out, weight, limit, add=add):
            raise NonFinite(f"{self.name}: what it stands for is not finite or too large")
        return compiled is not None
