"""Buffers of a script's model after steps that went astray: what NaN has come into stays NaN."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from node.trainer.weights import local


@torch.no_grad()
def mend(model: nn.Module) -> list[str]:
    """Begin running statistics anew that are not finite; names of all other buffers with NaN.

    Nobody merges buffers, so no other island has better ones. Infinities that are no running
    statistics are left: masks are made of them.
    """
    spoiled: list[str] = []
    for at, module in model.named_modules():
        own = {name: one for name, one in module.named_buffers(recurse=False) if _holds(one)}
        anew = getattr(module, "reset_running_stats", None)  # BatchNorm and its like
        if callable(anew) and not all(bool(local(one).isfinite().all()) for one in own.values()):
            anew()
        spoiled += [
            f"{at}.{name}".removeprefix(".")
            for name, one in own.items()
            if bool(local(one).isnan().any())
        ]
    return spoiled


def _holds(buffer: Tensor) -> bool:
    """Whether it can have NaN in it."""
    return buffer.is_floating_point() and not buffer.is_meta
