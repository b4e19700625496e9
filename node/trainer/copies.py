"""Points of parameter space that an optimizer keeps beside θ: slow weights, averages, fp32 masters.

Its next steps draw θ to where these are. A merge that moved θ alone would be undone by them, and
the way back be sent as if it had been learnt; so whatever moves θ moves these as far. They are
known by their names. Values do not tell: LoRA's B begins with zeros, and so do its moments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from node.trainer.weights import local

LOW = (torch.bfloat16, torch.float16)  # types of θ that lose what a master keeps
WIDE = (torch.float32, torch.float64)
MASTERS = {
    *("master", "master_param", "master_params", "master_weight", "master_weights"),
    *("main_param", "main_params", "fp32_param", "fp32_params", "param_fp32"),
}
POINTS = MASTERS | {
    *("slow_buffer", "slow_param", "slow_params", "slow_weight", "slow_weights"),  # Lookahead
    *("lookahead_slow_buff", "lookahead_params", "cached_params", "backup_params"),
    "x0",  # MADGRAD, dual averaging: θ is this and a sum of gradients
    "ax",  # ASGD
}
BEGINNINGS = {"x0"}
# momentum that Lookahead pulls the inner one's back to, beside slow weights: no point, and zero
# before its first step
PULLED = {"cached_mom", "slow_momentum"}
# of schedule-free optimizers, which are known by a key of their groups: FTRL's z is no point
SCHEDULE_FREE = POINTS | {"x", "y", "z"}
OF_SCHEDULE_FREE = "weight_sum"


def each_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """The optimizers of a script that gave several; else the only one."""
    found: Sequence[torch.optim.Optimizer] = getattr(optimizer, "optimizers", (optimizer,))
    return found


class Copies:
    """Those of one optimizer, or of several; looked up anew each time, as any step may make some.

    A master is the fp32 that the optimizer keeps of a θ in 16 bits: θ is that, rounded, and
    :class:`~node.trainer.remainders.Remainders` reckons with it. All methods are of this rank's
    parts alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers = each_of(optimizer)

    def master(self, parameter: Tensor) -> Tensor | None:
        """By reference; None where there is none, as beside a θ in fp32."""
        if parameter.dtype not in LOW:
            return None
        found = (part for name, part in self._all(parameter) if name in MASTERS)
        return next((part for part in found if part.dtype in WIDE), None)

    def of(self, parameter: Tensor, *, but: Collection[str] = ()) -> list[Tensor]:
        """All others, by reference; none of these names."""
        master = self.master(parameter)
        found = [part for name, part in self._all(parameter) if name not in but]
        return [p for p in found if master is None or p.data_ptr() != master.data_ptr()]

    @contextmanager
    def follow(self, *parameters: Tensor) -> Iterator[None]:
        """Around what moves θ: they move as far.

        As far as θ does once it is rounded, where it has 16 bits: what is too little to move it is
        too little for them, and together all that ever moves it is not.
        """
        before = [(each, local(each).clone()) for each in parameters if self.of(each)]
        yield
        for parameter, was in before:
            wide = torch.promote_types(was.dtype, torch.float32)
            moved = local(parameter).to(wide) - was.to(wide)
            moved.nan_to_num_(0.0, 0.0, 0.0)  # θ says that it is not finite, until it is set anew
            for part in self.of(parameter):
                part.add_(moved.to(part.device))

    def set(self, parameter: Tensor) -> None:
        """Begin again where θ is; but not from where a sum that stays has led it to θ."""
        for part in self.of(parameter, but=BEGINNINGS):
            part.copy_(local(parameter))

    def _all(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        here, seen = local(parameter), set[int]()  # two wrappers may share one state
        for one in self._optimizers:
            state = one.state.get(parameter)
            if not isinstance(state, Mapping):
                continue
            groups = one.param_groups
            names = SCHEDULE_FREE if any(OF_SCHEDULE_FREE in g for g in groups) else POINTS
            for name, value in state.items():
                if name in names and isinstance(value, Tensor) and value.is_floating_point():
                    part = local(value)
                    # a copy of an fp32 θ "in fp32" may be θ itself
                    if part.shape == here.shape and part.data_ptr() not in {here.data_ptr(), *seen}:
                        seen.add(part.data_ptr())
                        yield name, part
