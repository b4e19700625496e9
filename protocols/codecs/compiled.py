"""How codecs call their compiled loops (:mod:`protocols.codecs.kernels`)."""

from __future__ import annotations

from torch import Tensor

from protocols.codecs.base import Codec
from protocols.codecs.blocks import scales_limit
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
