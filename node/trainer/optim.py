"""The inner optimizers, how a joiner's learning rate rises, and clipping."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bootstrap.manifest import Inner
from node.errors import operator_error
from node.trainer.layout import layer_of
from node.trainer.muon import Muon
from node.trainer.parallel import Ranks
from node.trainer.weights import local

REENTRY_STEPS = 20
OF_STATES = ("A_log", "D")  # how fast each of Mamba's states decays, and what passes them by
TINY = 1e-6  # keeps the scale of a gradient of zeros finite


def reentry_factor(steps_since_join: int) -> float:
    """What a joiner multiplies its learning rate by: from 1/``REENTRY_STEPS`` up to 1, linearly.

    A joiner's AdamW moments are fresh, and fit its gradients after a few steps.
    """
    return min(1.0, (steps_since_join + 1) / REENTRY_STEPS)


def is_matrix(name: str, dims: int) -> bool:
    """Whether a parameter is a map from all of its inputs to all of its outputs.

    Biases of experts, stacked as [E, n], are not, nor are the parameters of Mamba's states, [n, s],
    which its authors exempt from weight decay. Names tell, as they are the same on shards, in all
    releases of the library, and where the daemon lays out moments.
    """
    own_name = name.rpartition(".")[2]
    return dims >= 2 and not name.endswith("bias") and own_name not in OF_STATES


def by_muon(inner: Inner, name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is trained by Muon, which keeps no second moment; else by AdamW.

    A filter for each channel, [D, 1, k], and a vector that was given more dims, [1, 1, D], are rows
    by themselves: Muon's steps for each would be of one length, whatever its gradient.
    """
    matrix = is_matrix(name, len(shape)) and min(shape[-2:]) > 1
    return inner.optimizer == "muon" and matrix and layer_of(name) is not None


def make_optimizer(
    model: nn.Module, inner: Inner, tables: Collection[str] = ()
) -> torch.optim.AdamW:
    """The run's optimizer over ``model``'s parameters; its learning rate is set before every step.

    Weight decay is for matrices, not for norms, biases and the decay of states. Parameters on
    different meshes are in different groups, since a group is one kernel's call. ``tables`` names
    matrices inside the layers that are not Muon's.

    Raises OperatorError E606 where Muon is asked for and no parameter's name tells of a layer.
    """
    names = [name for name, _ in model.named_parameters()]
    if inner.optimizer == "muon" and all(layer_of(name) is None for name in names):
        raise operator_error(
            "E606",
            "inner.optimizer = muon cannot train this model",
            why=f"its layers are not known by their names, as in {names[0]}",
            fix="make the run with inner.optimizer = adamw",
        )
    groups: dict[tuple[bool, bool, object], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        matrix = is_matrix(name, parameter.ndim)
        muon = by_muon(inner, name, parameter.shape) and name not in tables
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        decay = inner.weight_decay if matrix else 0.0
        group = {"params": [], "weight_decay": decay, "muon": muon}
        groups.setdefault((matrix, muon, mesh), group)["params"].append(parameter)
    kind = Muon if inner.optimizer == "muon" else torch.optim.AdamW
    return kind(list(groups.values()), lr=inner.lr, betas=inner.betas, eps=inner.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def _once(parameter: nn.Parameter) -> int:
    return 1


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    copies: Callable[[nn.Parameter], int] = _once,
    ranks: Ranks | None = None,
) -> Tensor:
    """Scale all gradients so that their joint norm is at most ``max_norm``.

    Parameters may lie on different meshes, or on other ranks: ``copies`` tells how many ranks
    have the very elements that this one has of a parameter. Every rank must call it.

    Returns the norm as it was, on every rank. If that is not finite the gradients are garbage:
    the caller must check, and skip the step.
    """
    gradients, squares = [], []
    for parameter in parameters:
        if parameter.grad is not None:
            gradients.append(local(parameter.grad))
            norm = torch.linalg.vector_norm(gradients[-1], dtype=torch.float32)
            squares.append(norm.square() / copies(parameter))
    device = ranks.device if ranks is not None else None
    square = torch.stack(squares).sum().to(device) if squares else torch.zeros((), device=device)
    total = (ranks.sum(square) if ranks is not None else square).sqrt()
    scale = (max_norm / (total + TINY)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.device))
    return total
