"""An optimizer as if it had taken no step yet.

Most make what they keep of a parameter in its first step, as all of torch's do, and do so again
where it is gone. Others make it in their constructor, and fail where it is gone. What they begin
with, which need not be zeros, their constructor tells of a parameter like it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from node.trainer.copies import POINTS, PULLED, each_of
from node.trainer.optimizer_state import bare
from node.trainer.weights import local


@torch.no_grad()
def begin_afresh(optimizer: torch.optim.Optimizer) -> None:
    """Drop what it has learnt, in place where it makes that in its constructor."""
    for one in each_of(optimizer):
        had = dict(one.state)
        one.state.clear()
        for group in one.param_groups:
            for parameter in group["params"]:
                kept = had.get(parameter)
                if kept is None:
                    continue
                if isinstance(kept, Mapping) and kept.keys() <= POINTS | PULLED:  # see copies
                    for name, value in kept.items():
                        if name in PULLED and isinstance(value, Tensor):
                            local(value).zero_()
                    one.state[parameter] = kept
                    continue
                made = _made(bare(one), group, parameter)
                if not made:
                    continue
                one.state[parameter] = _taken(kept, made)


def _made(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor
) -> Mapping[str, Any]:
    """What another one of its kind makes of such a parameter; empty: nothing, or nobody knows."""
    like = nn.Parameter(parameter.detach(), parameter.requires_grad)
    given = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    kind: Any = type(optimizer)
    try:
        known = inspect.signature(kind).parameters
        options = {key: value for key, value in optimizer.defaults.items() if key in known}
        state = kind([{**given, "params": [like]}], **options).state
    except Exception:  # noqa: BLE001 - anybody's constructor, which may ask for more
        return {}
    return dict(state[like]) if like in state else {}


def _taken(had: Any, made: Mapping[str, Any]) -> dict[str, Any]:
    """``made``, in the tensors that are there: the optimizer may have these elsewhere, too."""
    state = dict(made)
    for name, value in made.items():
        old = had.get(name) if isinstance(had, Mapping) else None
        if isinstance(value, Tensor) and _alike(old, value):
            state[name] = old
            local(state[name]).copy_(local(value))
    return state


def _alike(old: Any, new: Tensor) -> bool:
    """Whether the one may be taken for the other."""
    known = isinstance(old, Tensor) and (old.shape, old.dtype, old.device)
    return known == (new.shape, new.dtype, new.device)
