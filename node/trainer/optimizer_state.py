"""What an inner optimizer keeps of each parameter: of what kind it is, and whether it fits.

Moments belong to a place and to a rule. Those of another place are kept where that is near; those
of another rule never are: the optimizer would take its own and leave the others, or fail.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from node.trainer.weights import Pick, Weights, local

COUNT = "step"  # of what an optimizer keeps for a parameter; in the checkpoint once for all
# ‖θ − base‖ / ‖base‖ up to which moments are kept. Up to 0.56 they were better than none
# (docs/experiments.md); a model from another seed is further away than the norm itself.
NEAR = 0.5
# options that say what is kept. Numbers such as betas do not: schedules change them on the way
OPTIONS = ("amsgrad", "centered", "momentum", "muon")


def moments(state: Mapping[str, object]) -> list[str]:
    """What of an optimizer's state of one parameter is a tensor like it."""
    return [key for key, value in state.items() if key != COUNT and isinstance(value, Tensor)]


def moment_of(optimizer: torch.optim.Optimizer, name: str) -> Pick:
    """What picks a parameter's moment of this name."""
    return lambda parameter: optimizer.state[parameter][name]


def counted_beside(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    """Parameters whose count of steps lies on their device, where fused kernels look for it.

    Others read it in every step, and would wait for a GPU each time: theirs is on the CPU.
    """
    groups = [g for one in getattr(optimizer, "optimizers", (optimizer,)) for g in one.param_groups]
    return {p for g in groups if g.get("fused") or g.get("capturable") for p in g["params"]}


def new_moments(
    parameter: Tensor, moments: Iterable[str], steps: int, *, beside: bool
) -> dict[str, Tensor]:
    """What an optimizer keeps for a parameter after so many steps, with zeros to be filled.

    ``beside``: see :func:`counted_beside`.
    """
    device = local(parameter).device if beside else "cpu"
    count = torch.tensor(float(steps), dtype=torch.float32, device=device)  # bf16 ends at 256
    return {COUNT: count, **{moment: torch.zeros_like(parameter) for moment in moments}}


def optimizer_steps(optimizer: torch.optim.Optimizer) -> int:
    """Steps that the optimizer's moments have seen; 0 when it has none that can be kept.

    A script's optimizer may keep anything. What is no tensor of the parameter's shape (Adafactor's
    rows and columns) is left out of checkpoints, and the whole optimizer begins anew.
    """
    steps = 0
    for parameter, state in optimizer.state.items():
        kept = moments(state)
        rest = [key for key in state if key != COUNT and key not in kept]
        if any(state[m].shape != parameter.shape for m in kept) or any(
            state[key] is not None for key in rest
        ):
            return 0
        steps = max(steps, steps_of(state))
    return steps


def steps_of(state: Mapping[str, Any]) -> int:
    """Steps that the moments of one parameter have seen; 0 when it has none."""
    return int(state.get(COUNT, 1)) if moments(state) else 0  # who does not count: one at least


@torch.no_grad()
def sanitise(optimizer: torch.optim.Optimizer) -> None:
    """Replace moments that are not finite by zero: a NaN in them would never leave again."""
    for state in optimizer.state.values():
        for moment in moments(state):
            if state[moment].is_floating_point():
                local(state[moment]).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def bare(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What takes the steps, out of wrappers such as accelerate's."""
    while isinstance(inside := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inside
    return optimizer


def kinds(optimizer: torch.optim.Optimizer, weights: Weights) -> dict[str, str]:
    """The optimizer of every parameter that it has, as in ``AdamW`` or ``AdamW amsgrad``.

    By name, of all ranks' parameters; every rank must call it.
    """
    of: dict[Tensor, str] = {}
    for one in reversed(getattr(optimizer, "optimizers", (optimizer,))):
        for group in one.param_groups:
            options = [option for option in OPTIONS if group.get(option)]
            of |= dict.fromkeys(group["params"], " ".join([type(bare(one)).__name__, *options]))
    mine = {name: of[parts[0]] for name, parts in weights.parts.items() if parts[0] in of}
    return {name: kind for part in weights.everywhere(mine) for name, kind in part.items()}


def changed(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Which parameters have another kind of optimizer than they had, in words; empty: none."""
    pairs = Counter((kind, now.get(name)) for name, kind in was.items() if kind != now.get(name))
    return "; ".join(
        f"{count} parameters were trained by {before}, now by {after or 'no optimizer'}"
        for (before, after), count in pairs.items()
    )


@torch.no_grad()
def distance(weights: Weights, base: Mapping[str, Tensor]) -> float:
    """‖θ − base‖ / ‖base‖ on every rank, infinite where θ is not finite.

    ``base``: whole tensors by name, on rank 0 alone.
    Every rank must call it.
    """
    moved = norm = 0.0
    for name in weights.names:
        whole = weights.gather(name)
        if weights.ranks.leads:
            assert whole is not None
            there = base[name].to(whole.device)
            moved += float((whole.float() - there).square().sum())
            norm += float(there.square().sum())
    far = math.sqrt(moved / norm) if norm else math.inf if moved else 0.0
    far = far if math.isfinite(far) else math.inf
    return float(json.loads(weights.ranks.broadcast(json.dumps(far).encode())))
