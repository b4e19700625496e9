"""The trainer's share of a checkpoint: θ, the optimizer's moments, and where the island stands.

Tensors are written whole, whatever the number of ranks, so that an island may come back with
another one. The learning rate and the windows to read follow from counters; there is no other
state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from node.checkpoint import read_tensors, write_tensors
from node.trainer.parallel import Ranks, gather, local, scatter
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


class Standing(BaseModel):
    """``trainer.json``: where the island stands besides its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    round: int = Field(ge=0)
    round_step: int = Field(ge=0)
    step: int = Field(ge=0)
    tokens: int = Field(ge=0)
    rewarm_from: int | None
    optimizer_steps: int = Field(ge=0)  # 0: there are no moments
    carried: Work  # was in a snapshot, but is not merged
    unsent: Work


@torch.no_grad()
def save(
    directory: Path,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    standing: Standing,
    ranks: Ranks,
) -> None:
    """Write tensors and standing; every rank must call it, rank 0 writes (and raises OSError)."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        named = {PARAMETER + name: parameter.detach()}
        if standing.optimizer_steps:
            state = optimizer.state[parameter]
            named |= {f"{moment}/{name}": state[moment] for moment in MOMENTS}
        for key, tensor in named.items():
            whole = gather(tensor)
            if ranks.leads:
                tensors[key] = whole.cpu().contiguous()
    if ranks.leads:
        write_tensors(directory / TENSORS, {key: t.numpy() for key, t in tensors.items()})
        (directory / STATE).write_text(standing.model_dump_json(indent=1), encoding="utf-8")


@torch.no_grad()
def load(
    directory: Path,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
) -> Standing:
    """Read what :func:`save` wrote into parameters and optimizer; every rank must call it.

    Raises E404 (on rank 0) when files are missing, damaged, or of another model.
    """
    tensors: dict[str, Tensor] = {}
    raw = b""
    if ranks.leads:
        try:
            raw = (directory / STATE).read_bytes()
            tensors = {k: torch.from_numpy(v) for k, v in read_tensors(directory / TENSORS).items()}
            _check(Standing.model_validate_json(raw), tensors, parameters)
        except (OSError, ValueError) as error:  # pydantic's ValidationError is a ValueError
            raise OperatorError(
                "E404", f"cannot resume from {directory}", str(error), "start without --resume"
            ) from error
    standing = Standing.model_validate_json(ranks.broadcast(raw))
    for name, parameter in parameters.items():
        local(parameter).copy_(scatter(tensors.get(PARAMETER + name), parameter))
        if not standing.optimizer_steps:
            continue
        state = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
        for moment, tensor in state.items():
            local(tensor).copy_(scatter(tensors.get(f"{moment}/{name}"), parameter))
        count = torch.tensor(float(standing.optimizer_steps), device=ranks.device)
        optimizer.state[parameter] = {"step": count, **state}
    return standing


def _check(
    standing: Standing, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> None:
    groups = [PARAMETER, *(f"{m}/" for m in MOMENTS)] if standing.optimizer_steps else [PARAMETER]
    for group in groups:
        for name, parameter in parameters.items():
            tensor = tensors.get(group + name)
            if tensor is None or tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
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
            local(state[moment]).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
