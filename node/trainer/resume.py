"""The trainer's share of a checkpoint: θ, the optimizer's moments, and where the island stands.

Tensors are written whole, whatever the number of ranks, so that an island may come back with
another one. The learning rate and the windows to read follow from counters; there is no other
state.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from node.checkpoint import read_tensors, write_tensors
from node.trainer.weights import Pick, Weights, local
from protocols.errors import OperatorError

TENSORS = "trainer.safetensors"
STATE = "trainer.json"
PARAMETER = "parameter/"  # prefixes of the tensors' names
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclasses.dataclass(frozen=True)
class Work:
    """Inner steps and what they came to."""

    steps: int = 0
    tokens: int = 0
    finite_steps: int = 0
    loss_sum: float = 0.0  # over the finite steps
    seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Work(*(a + b for a, b in zip(mine, theirs, strict=True)))

    @property
    def loss(self) -> float | None:
        """Mean loss of the finite steps, None if there are none."""
        return self.loss_sum / self.finite_steps if self.finite_steps else None


class Share(BaseModel):
    """Where the island stands with one fragment."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    round: int = Field(ge=0)
    carried: Work = Work()  # was in a snapshot, but is not merged
    unsent: Work = Work()


class Standing(BaseModel):
    """``trainer.json``: where the island stands besides its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    fragments: tuple[Share, ...] = Field(min_length=1)
    round_step: int = Field(ge=0)
    step: int = Field(ge=0)
    tokens: int = Field(ge=0)
    rewarm_from: int | None
    optimizer_steps: int = Field(ge=0)  # 0: there are no moments


@torch.no_grad()
def save(
    directory: Path, weights: Weights, optimizer: torch.optim.Optimizer, standing: Standing
) -> None:
    """Write tensors and standing; every rank must call it, rank 0 writes (and raises OSError)."""
    tensors: dict[str, Tensor] = {}
    held = {
        name: [moment for moment in MOMENTS if moment in optimizer.state[parts[0]]]
        for name, parts in weights.parts.items()
        if standing.optimizer_steps
    }
    moments = {name: found for rank in weights.everywhere(held) for name, found in rank.items()}
    for name in weights.names:
        wholes = {PARAMETER + name: weights.gather(name)}
        for moment in moments.get(name, ()):
            wholes[f"{moment}/{name}"] = weights.gather(name, _of_state(optimizer, moment))
        if weights.ranks.leads:
            tensors |= {k: t.cpu().contiguous() for k, t in wholes.items() if t is not None}
    if weights.ranks.leads:
        write_tensors(directory / TENSORS, {key: t.numpy() for key, t in tensors.items()})
        (directory / STATE).write_text(standing.model_dump_json(indent=1), encoding="utf-8")


@torch.no_grad()
def load(directory: Path, weights: Weights, optimizer: torch.optim.Optimizer) -> Standing:
    """Read what :func:`save` wrote into parameters and optimizer; every rank must call it.

    Raises E404 (on rank 0) when files are missing, damaged, or of another model.
    """
    tensors: dict[str, Tensor] = {}
    raw = b""
    if weights.ranks.leads:
        try:
            raw = (directory / STATE).read_bytes()
            tensors = {k: torch.from_numpy(v) for k, v in read_tensors(directory / TENSORS).items()}
            _check(Standing.model_validate_json(raw), tensors, weights)
        except (OSError, ValueError) as error:  # pydantic's ValidationError is a ValueError
            raise OperatorError(
                "E404", f"cannot resume from {directory}", str(error), "start without --resume"
            ) from error
    standing = Standing.model_validate_json(weights.ranks.broadcast(raw))
    keys: set[str] = set(json.loads(weights.ranks.broadcast(json.dumps(list(tensors)).encode())))
    for name in weights.names:
        weights.set(name, tensors.get(PARAMETER + name))
        for parameter in weights.parts.get(name, ()) if standing.optimizer_steps else ():
            device = local(parameter).device
            count = torch.tensor(float(standing.optimizer_steps), device=device)
            optimizer.state[parameter] = {"step": count}
        for moment in MOMENTS:
            key = f"{moment}/{name}"
            if key not in keys:
                continue
            for parameter in weights.parts.get(name, ()):
                optimizer.state[parameter][moment] = torch.zeros_like(parameter)
            weights.set(name, tensors.get(key), _of_state(optimizer, moment))
    return standing


def _of_state(optimizer: torch.optim.Optimizer, moment: str) -> Pick:
    return lambda parameter: optimizer.state[parameter][moment]


def _check(standing: Standing, tensors: Mapping[str, Tensor], weights: Weights) -> None:
    for name, shape in weights.shapes.items():
        groups = [PARAMETER, f"{MOMENTS[0]}/"] if standing.optimizer_steps else [PARAMETER]
        for group in groups:
            tensor = tensors.get(group + name)
            if tensor is None or tensor.shape != shape or tensor.dtype != torch.float32:
                raise ValueError(f"{group}{name} is missing or has another shape")


def optimizer_steps(optimizer: torch.optim.Optimizer) -> int:
    """Steps that the optimizer's moments have seen; 0 when it has none."""
    state = next(iter(optimizer.state.values()), None)
    return int(state["step"]) if state else 0


@torch.no_grad()
def sanitise(optimizer: torch.optim.Optimizer) -> None:
    """Replace moments that are not finite by zero: a NaN in them would never leave again."""
    for state in optimizer.state.values():
        for moment in MOMENTS:
            if moment in state:  # Muon has one
                local(state[moment]).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
