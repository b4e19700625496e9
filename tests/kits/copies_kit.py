"""Optimizers that keep points of parameter space, written small; ``lr=0`` learns nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Kept(torch.optim.Optimizer):
    """What they have in common."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, self.state[parameter], group)

    def move(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError

    def copies(self, p: Tensor) -> list[Tensor]:
        """Those that it keeps of a parameter."""
        names = ("z", "master_param", "slow_params")
        return [self.state[p][name] for name in names if name in self.state[p]]


class ScheduleFree(Kept):
    """Gradients at y between the average x and z, which moves; θ is y."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["weight_sum"] = 0.0

    def move(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "z" not in state:
            state["z"], state["step"] = p.clone(), 0
        state["step"] += 1
        group["weight_sum"] += 1.0
        nearer = 1.0 / state["step"]
        p.lerp_(state["z"], nearer)
        p.add_(p.grad, alpha=group["lr"] * (0.9 * (1.0 - nearer) - 1.0))  # type: ignore[arg-type]
        state["z"].sub_(p.grad, alpha=group["lr"])


class Masters(Kept):
    """SGD that steps in fp32 and rounds to θ."""

    def move(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "master_param" not in state:
            state["master_param"] = p.detach().float().clone()
        assert p.grad is not None
        state["master_param"].sub_(p.grad.float(), alpha=group["lr"])
        p.copy_(state["master_param"])


class EarlyMasters(Masters):
    """The same, made in the constructor."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["master_param"] = p.detach().float().clone()
                self.state[p]["step"] = torch.tensor(0.0)

    def move(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] += 1
        super().move(p, state, group)


class Lookahead(Kept):
    """SGD that every second step goes half of the way back to where it was."""

    def move(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "slow_params" not in state:
            state["slow_params"], state["seen"] = p.detach().clone(), 0
        state["seen"] += 1
        p.sub_(p.grad, alpha=group["lr"])  # type: ignore[arg-type]
        if state["seen"] % 2 == 0:
            state["slow_params"].lerp_(p, 0.5)
            p.copy_(state["slow_params"])


COPYING: dict[str, type[Kept]] = {
    "schedule-free": ScheduleFree,
    "masters": Masters,
    "masters from the constructor": EarlyMasters,
    "Lookahead": Lookahead,
}
