"""The inner optimizer: AdamW, its learning rate as a pure function of the step, and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bootstrap.manifest import Inner

REENTRY_STEPS = 20


def learning_rate(inner: Inner, step: int) -> float:
    """The learning rate of inner step ``step`` (0 is the first) of the run.

    Linear warm-up over ``warmup_steps``, then by ``schedule``: "constant"; "cosine" down to
    ``min_lr_ratio * lr`` at ``total_steps``; "wsd" (warm-up, stable, decay: 2404.06395), constant
    and then linear down to the same over the last ``decay_fraction`` of ``total_steps``. Beyond
    ``total_steps`` it stays there.
    """
    span: float
    if step < inner.warmup_steps:
        return inner.lr * (step + 1) / inner.warmup_steps
    floor = inner.min_lr_ratio
    if inner.schedule == "constant":
        share = 1.0
    elif inner.schedule == "cosine":
        span = max(1, inner.total_steps - inner.warmup_steps)
        done = min(1.0, (step - inner.warmup_steps) / span)
        share = floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2
    else:
        span = max(1.0, inner.decay_fraction * inner.total_steps)
        left = min(1.0, max(0.0, inner.total_steps - step) / span)
        share = floor + (1 - floor) * left
    return inner.lr * share


def reentry_factor(steps_since_join: int, steps: int = REENTRY_STEPS) -> float:
    """What a joiner multiplies its learning rate by: from 1/``steps`` up to 1, linearly.

    A joiner's AdamW moments are fresh or a donor's, and fit its own gradients after a few steps.
    """
    return min(1.0, (steps_since_join + 1) / steps)


def make_optimizer(model: nn.Module, inner: Inner) -> torch.optim.AdamW:
    """AdamW over ``model``'s parameters; the learning rate is set anew before every step.

    Weight decay is for tensors of two or more dims, not for norms and biases.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=inner.lr, betas=inner.betas, eps=inner.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most ``max_norm``.

    Returns the norm as it was. If that is not finite the gradients are garbage: the caller must
    check, and skip the step.
    """
    return nn.utils.clip_grad_norm_(parameters, max_norm)
