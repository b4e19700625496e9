"""What rounding takes from parameters that a script keeps in bf16 or fp16.

The outer state is fp32, and θ ← G loses what such a parameter has no bits for. The next snapshot
would send it as if it had been learnt, by all islands alike: G would be pulled back to values that
the type has, and steps shorter than half a bit of it would never add up. So the ranks keep it
beside θ, and whatever compares θ with G or moves it reckons with θ + remainder, in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from node.trainer.weights import Weights, itself, local

LOW = (torch.bfloat16, torch.float16)


class Remainders:
    """One remainder beside each parameter of a type in :data:`LOW`, in that type; none for others.

    Together they have twice the parameter's bits, in fp16 down to 2⁻²⁴. Each rank has those of its
    own parts.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self._beside: dict[Tensor, Tensor] = {}  # parameter: that of this rank's part

    def __len__(self) -> int:
        return len(self._beside)

    def exact(self, parameter: Tensor) -> Tensor:
        """θ + remainder, in fp32 and new; the parameter itself where its type has no remainder."""
        if parameter.dtype not in LOW:
            return itself(parameter)
        whole = itself(parameter).to(torch.float32)
        beside = self._beside.get(parameter)
        if beside is not None:
            part = local(whole)
            part.add_(beside.to(part.device))  # a script may have moved its model since
        return whole

    def keep(self, parameter: Tensor, exact: Tensor) -> None:
        """θ ← ``exact`` of this rank's part, rounded, and keep the rest; for types in LOW alone."""
        if parameter.dtype not in LOW:
            self._beside.pop(parameter, None)  # a script may have changed the type since
            return
        part, beside = local(parameter), self._beside.get(parameter)
        if beside is None or (beside.dtype, beside.device) != (part.dtype, part.device):
            beside = self._beside[parameter] = torch.empty_like(part)
        part.copy_(exact)
        torch.sub(exact, part, out=beside)
        beside.nan_to_num_(0.0, 0.0, 0.0)  # θ says that it is not finite, until it is set anew

    def set(self, name: str, whole: Tensor | None) -> None:
        """See :meth:`Weights.set`, of θ itself; every rank must call it."""
        part = self.weights.scatter(name, whole)
        for parameter in self.weights.parts.get(name, ()):
            assert part is not None
            local(parameter).copy_(part)
            self.keep(parameter, part)
