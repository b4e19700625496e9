"""Muon (Jordan et al. 2024): a matrix's step is its momentum, made orthogonal.

Over matrices that are cut among ranks as well as whole ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from node.trainer.weights import local, part_like

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c of x ← a x + b x³ + c x⁵, by its author
ITERATIONS = 5
MOMENTUM = 0.95
ADAM_SIZE = 0.2  # root mean square of AdamW's steps, as found for Moonlight (2502.16982)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Each of [..., n, m] with singular values near one and its singular vectors kept.

    Newton and Schulz's iteration, five times: singular values end between 0.7 and 1.2.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon(torch.optim.AdamW):
    """Muon for the groups that say so, AdamW for the others, with one learning rate for both.

    Momentum with Nesterov's look ahead, made orthogonal, and scaled to the size of AdamW's steps.
    A matrix that is cut is put together for that on every rank; of stacked experts each rank takes
    those it has.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of all groups; ``closure`` is not called."""
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group["muon"]]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group["muon"]:
                self._step([p for p in group["params"] if p.grad is not None], group)

    def _step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        lr, alike = group["lr"], defaultdict[torch.Size, list[tuple[Tensor, Tensor]]](list)
        for parameter in parameters:
            ahead = self._ahead(parameter)
            local(parameter).mul_(1 - lr * group["weight_decay"])
            if isinstance(parameter, DTensor) and not _whole_matrices(parameter):
                whole = orthogonalised(_pieces(ahead, parameter).full_tensor())
                _move(parameter, part_like(whole, parameter), lr)
            else:
                alike[ahead.shape].append((parameter, ahead))
        # small matrices of one shape go through the iteration together: a sixth of the calls
        for pairs in alike.values():
            found = orthogonalised(torch.stack([ahead for _, ahead in pairs]))
            for (parameter, _), one in zip(pairs, found, strict=True):
                _move(parameter, one, lr)

    def _ahead(self, parameter: Tensor) -> Tensor:
        """Nesterov's look ahead of this rank's piece, with the new gradient in the momentum."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["step"] = torch.zeros((), device=local(parameter).device)
            state["exp_avg"] = torch.zeros_like(parameter)
        state["step"] += 1
        momentum = local(state["exp_avg"])
        momentum.lerp_(local(gradient), 1 - MOMENTUM)
        return local(gradient).lerp(momentum, MOMENTUM)


def _move(parameter: Tensor, direction: Tensor, lr: float) -> None:
    """Step by ``direction``, of this rank's piece; the scale follows from the whole matrix."""
    scale = ADAM_SIZE * math.sqrt(max(parameter.shape[-2:]))
    local(parameter).add_(direction, alpha=-lr * scale)


def _pieces(piece: Tensor, parameter: DTensor) -> DTensor:
    """A rank's piece as a tensor that is cut like the parameter."""
    return DTensor.from_local(
        piece,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _whole_matrices(parameter: DTensor) -> bool:
    """Whether no matrix of a stack is cut, so that each can be made orthogonal where it is."""
    places = parameter.placements
    return parameter.ndim == 3 and all(
        place.is_replicate() or getattr(place, "dim", None) == 0 for place in places
    )
