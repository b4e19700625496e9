"""An optimizer as if it had taken no step yet.

Most make what they keep of a parameter in its first step, as all of torch's do, and do so again
where it is gone. Others make it in their constructor, and fail where it is gone. What they begin
with, which need not be zeros, their constructor tells of a parameter like it. Where that cannot be
asked nobody knows which of the two they are, but of those that keep flags (Muon's, that a parameter
is none of its own): these stay, with zeros beside them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from node.trainer.copies import POINTS, each_of
from node.trainer.optimizer_state import bare, is_flag
from node.trainer.weights import local

logger = logging.getLogger(__name__)
PLAIN = (bool, int, float, str)


@torch.no_grad()
def begin_afresh(optimizer: torch.optim.Optimizer) -> None:
    """Drop what it has learnt, in place where it makes that in its constructor."""
    unknown = set[str]()
    for one in each_of(optimizer):
        had = dict(one.state)
        one.state.clear()
        for group in one.param_groups:
            for parameter in group["params"]:
                kept = had.get(parameter)
                if kept is None:
                    continue
                if isinstance(kept, Mapping) and kept.keys() <= POINTS:  # no moments: see copies
                    one.state[parameter] = kept
                    continue
                made = _made(bare(one), group, parameter)
                if made is None and not (made := _emptied(kept)):
                    unknown.add(type(bare(one)).__name__)
                if made:
                    one.state[parameter] = _taken(kept, made)
    if unknown:
        logger.warning(
            "the moments of %s are dropped, and its constructor cannot be asked what it begins "
            "with: if its next step fails (KeyError), have it keep its constructor's arguments as "
            "attributes of the same names, or give node.join one that has taken no step",
            ", ".join(sorted(unknown)),
        )


def _made(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor
) -> Mapping[str, Any] | None:
    """What another one of its kind makes of such a parameter, maybe nothing; None: nobody knows."""
    like = nn.Parameter(parameter.detach(), parameter.requires_grad)
    given = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    kind: Any = type(optimizer)
    try:
        known = inspect.signature(kind).parameters
        options = {key: value for key, value in optimizer.defaults.items() if key in known}
        asks = [n for n, each in known.items() if each.default is each.empty and n not in options]
        for name in asks[1:]:  # plain values alone: it might change what else it is given, a model
            if isinstance(value := getattr(optimizer, name, None), PLAIN):
                options[name] = value
        state = kind([{**given, "params": [like]}], **options).state
    except Exception:  # noqa: BLE001 - anybody's constructor, which may ask for more
        return None
    return dict(state[like]) if like in state else {}


def _emptied(kept: Any) -> dict[str, Any]:
    """The flags in it, which are of no step, with zeros for all else; nothing where it has none."""
    if not isinstance(kept, Mapping) or all(v is None or not is_flag(v) for v in kept.values()):
        return {}
    state = {}
    for name, value in kept.items():
        if is_flag(value) or name in POINTS:
            state[name] = value
        elif isinstance(value, Tensor):
            local(value).zero_()
            state[name] = value
        elif isinstance(value, int | float):
            state[name] = type(value)(0)
    return state


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
