"""What an inner optimizer keeps of each parameter: of what kind it is, and whether it fits.

Moments belong to a θ and to an update rule. Those of another θ are kept where that is near; those
of another rule never are: the optimizer would use those it knows and ignore the others, or fail.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor

from node.trainer.copies import POINTS, each_of
from node.trainer.weights import Pick, Weights, local

COUNT = "step"  # key in an optimizer's state of a parameter; in a checkpoint once for all
# ‖θ − base‖ / ‖base‖ up to which moments are kept. Up to 0.56 they were better than none
# (docs/experiments.md); a model from another seed is further away than the norm itself.
NEAR = 0.5
# options that say what is kept. Numbers such as betas do not: schedules change them on the way
OPTIONS = ("amsgrad", "centered", "momentum", "muon")


class Number(BaseModel):
    """What an optimizer keeps for a parameter beside tensors like it, as NAdam's ``mu_product``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    value: bool | int | float
    dtype: str = ""  # of a tensor without dimensions; empty: a plain number
    beside: bool = False  # whether that tensor is on the parameter's device

    @classmethod
    def of(cls, parameter: Tensor, value: Any) -> Number:
        """Zero where it is not finite, as with moments (:func:`sanitise`)."""
        plain = local(value).item() if isinstance(value, Tensor) else value
        if isinstance(plain, float) and not math.isfinite(plain):
            plain = 0.0
        if not isinstance(value, Tensor):
            return cls(value=plain)
        beside = value.device.type == local(parameter).device.type
        return cls(value=plain, dtype=str(value.dtype).removeprefix("torch."), beside=beside)

    @model_validator(mode="after")
    def _there_is_such_a_tensor(self) -> Number:
        try:
            self.restored(torch.empty(0, device="cpu"))
        except (RuntimeError, TypeError, OverflowError) as error:
            raise ValueError(f"{self.value} is no {self.dtype}") from error
        return self

    def restored(self, parameter: Tensor) -> Any:
        """The number, or the tensor, for an optimizer of this parameter."""
        if not self.dtype:
            return self.value
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{self.dtype} is no type of a tensor")
        device = local(parameter).device if self.beside else torch.device("cpu")
        return torch.tensor(self.value, dtype=dtype, device=device)


@dataclass(frozen=True)
class Kept:
    """What an optimizer has of one parameter, by name."""

    moments: tuple[str, ...]  # tensors like the parameter
    numbers: tuple[str, ...]
    lost: tuple[str, ...]  # what no checkpoint can hold; then none of this state is saved

    @classmethod
    def of(cls, parameter: Tensor, state: Mapping[Any, Any]) -> Kept:
        """Sort out what a script's optimizer keeps, which may be anything."""
        moments, numbers, lost = [], [], []
        for name, value in state.items():
            tensor = isinstance(value, Tensor)
            scalar = value.numel() == 1 and not value.dim() if tensor else False
            if value is None or (name == COUNT and scalar):
                continue
            if not isinstance(name, str) or "/" in name:
                lost.append(str(name))
            elif tensor and value.shape == parameter.shape:
                moments.append(name)
            elif (scalar and not value.is_complex()) or isinstance(value, int | float):
                numbers.append(name)
            else:
                lost.append(name)
        if lost or not moments:
            return cls((), (), tuple(lost))
        return cls(tuple(moments), tuple(numbers), ())


def moments(parameter: Tensor, states: Mapping[Tensor, Any]) -> tuple[str, ...]:
    """Names of the tensors like a parameter that an optimizer keeps of it; none if not saved."""
    return Kept.of(parameter, states.get(parameter, {})).moments


def unkept(weights: Weights, states: Mapping[Tensor, Any]) -> str:
    """The parts of an optimizer's state that checkpoints cannot hold, in words; empty: none.

    Adafactor's rows and columns, say: for such parameters it begins anew after a resume. The answer
    is for all ranks together, and every rank must call it.
    """
    mine = {
        name: Kept.of(parts[0], states.get(parts[0], {})).lost
        for name, parts in weights.parts.items()
    }
    found = [lost for part in weights.everywhere(mine) for lost in part.values() if lost]
    names = ", ".join(sorted({name for lost in found for name in lost}))[:200]
    return f"checkpoints cannot hold {names}, of {len(found)} parameters" if found else ""


def stateless(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is plain SGD, which keeps nothing from step to step."""
    return all(
        isinstance(bare(one), torch.optim.SGD)
        and not any(group.get("momentum") for group in one.param_groups)
        for one in getattr(optimizer, "optimizers", (optimizer,))
    )


def moment_of(states: Mapping[Tensor, Any], name: str) -> Pick:
    """What picks a parameter's moment of this name out of an optimizer's state."""
    return lambda parameter: states[parameter][name]


def counted_beside(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    """Parameters whose count of steps lies on their device, where fused kernels look for it.

    Others read it in every step, and would wait for a GPU each time: theirs is on the CPU.
    """
    groups = [g for one in getattr(optimizer, "optimizers", (optimizer,)) for g in one.param_groups]
    return {p for g in groups if g.get("fused") or g.get("capturable") for p in g["params"]}


def new_moments(
    parameter: Tensor, moments: Mapping[str, torch.dtype | None], steps: int, *, beside: bool
) -> dict[str, Any]:
    """What an optimizer keeps for a parameter after ``steps``, with zeros to be filled.

    ``moments``: the type of each; None: the parameter's. ``beside``: see
    :func:`counted_beside`.
    """
    device = local(parameter).device if beside else "cpu"
    count = torch.tensor(float(steps), dtype=torch.float32, device=device)  # bf16 counts to 256
    zeros = {name: torch.zeros_like(parameter, dtype=dtype) for name, dtype in moments.items()}
    return {COUNT: count, **zeros}


def optimizer_steps(optimizer: torch.optim.Optimizer) -> int:
    """Steps that the optimizer's moments have seen; 0 when it has none that can be kept."""
    return max((steps_of(*each) for each in _by_parameter(optimizer).items()), default=0)


def steps_of(parameter: Tensor, state: Mapping[str, Any]) -> int:
    """Steps that the moments of one parameter have seen; 0 when it has none that are kept."""
    kept = Kept.of(parameter, state)
    if not kept.moments:
        return 0
    count = None if COUNT in kept.moments else state.get(COUNT)
    return 1 if count is None else int(count)  # without a count at least one was taken


def untaken(optimizer: torch.optim.Optimizer) -> bool:
    """Whether what it keeps is of no step: some make it before their first one."""
    return all(_untaken(state) for state in optimizer.state.values())


def _untaken(state: Any) -> bool:
    if not isinstance(state, Mapping):
        return False
    count = state.get(COUNT)
    if isinstance(count, int | float) or (isinstance(count, Tensor) and count.numel() == 1):
        return float(count) == 0
    return all(value is None or _is_zero(value) for value in state.values())


def _is_zero(value: Any) -> bool:
    """Of a number or a tensor; not where that cannot be told, as of a class of its own."""
    if not isinstance(value, Tensor):
        return isinstance(value, int | float) and value == 0
    try:
        return not bool(local(value).any())
    except RuntimeError:  # torch's, also where it has no such operation
        return False


class Unused:
    """What an optimizer keeps before its first step, to begin there again; nothing for most."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Zeros are not copied, and are most of it."""
        self._made = [
            {
                parameter: {
                    name: (value, None if _is_zero(value) else value.clone())
                    if isinstance(value, Tensor)
                    else (value, copy.deepcopy(value))
                    for name, value in state.items()
                }
                for parameter, state in _by_parameter(one).items()
            }
            for one in each_of(optimizer)
        ]

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """In place: the optimizer may have its tensors elsewhere, too.

        What goes with θ, which it does not begin again, is left where it is.
        """
        for one, all_made in zip(each_of(optimizer), self._made, strict=True):
            had = _by_parameter(one)
            one.state.clear()
            for parameter, made in all_made.items():
                state: dict[str, Any] = {}
                for name, (value, was) in made.items():
                    if name in POINTS:
                        state[name] = had.get(parameter, {}).get(name, value)
                        continue
                    if isinstance(value, Tensor):
                        local(value).zero_() if was is None else value.copy_(was)
                    state[name] = value if isinstance(value, Tensor) else copy.deepcopy(was)
                one.state[parameter] = state


def _by_parameter(optimizer: torch.optim.Optimizer) -> dict[Tensor, Mapping[str, Any]]:
    """Its state, but for what is no parameter's: MADGRAD has a count under ``"k"``."""
    return {key: state for key, state in optimizer.state.items() if isinstance(state, Mapping)}


@torch.no_grad()
def sanitise(optimizer: torch.optim.Optimizer) -> None:
    """Replace moments that are not finite by zero: a NaN in them would never leave again."""
    for state in (kept for one in each_of(optimizer) for kept in _by_parameter(one).values()):
        for name, value in state.items():
            if name != COUNT and isinstance(value, Tensor) and value.is_floating_point():
                local(value).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def bare(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that takes the steps, without wrappers such as accelerate's."""
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


def beside_moments(
    weights: Weights, optimizer: torch.optim.Optimizer, states: Mapping[Tensor, Any], most: int
) -> dict[str, Any]:
    """What a checkpoint has to say of all moments; every rank must call it.

    ``most``: the largest number of steps that any moments have seen.
    """
    without: list[str] = []
    numbers: dict[str, dict[str, Number]] = {}
    fewer: dict[str, int] = {}
    for name, (parameter, *_) in weights.parts.items():
        state = states.get(parameter, {})
        kept = Kept.of(parameter, state)
        if not kept.moments:
            without.append(name)
            continue
        if kept.numbers:
            numbers[name] = {key: Number.of(parameter, state[key]) for key in kept.numbers}
        if (steps := steps_of(parameter, state)) < most:
            fewer[name] = steps
    everywhere = {name: None for part in weights.everywhere(without) for name in part}
    of = {n: kind for n, kind in kinds(optimizer, weights).items() if n not in everywhere}
    return {
        "without": tuple(everywhere),
        "kinds": of,
        "fewer": {n: steps for part in weights.everywhere(fewer) for n, steps in part.items()},
        "numbers": {n: each for part in weights.everywhere(numbers) for n, each in part.items()},
    }


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
