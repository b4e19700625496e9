"""Whether a model of transformers computes the same when its matrices are cut by its plan.

Between a matrix cut by columns and one cut by rows each rank has a part of every hidden state. What
else is computed with there, and is whole on every rank, gets a part of its gradient: its copies
would drift apart. And what is cut may be used by nothing but its own module, for the library's code
knows of no parts. No plan says either, so a few tokens are tried before a model is taken: who gets
a gradient from where, and what is called with which parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from node.trainer.foreign import SUMMED, matching
from node.trainer.foreign_storage import lent
from node.trainer.hf import PREFIX, ForeignDecoder, family, tp_plan
from protocols.errors import kind_and_reason

PROBED = 8  # tokens


def try_cut(model: ForeignDecoder, size: int) -> None:
    """Raises ValueError where a whole model of the CPU cannot be cut for ``--tp``.

    To be called before anything is cut, by every rank; :func:`node.trainer.foreign.check_tp` has
    accepted the family.
    """
    try:
        with lent(model), torch.enable_grad():
            why = _problem(model)
    except Exception as error:  # whatever a family makes of a few tokens
        raise _refused(model, size, kind_and_reason(error, 300)) from error
    if why:
        raise _refused(model, size, why)


def _problem(model: ForeignDecoder) -> str:
    """Why a model with values cannot be cut; empty if it can."""
    words = _words(model)
    uses = _Uses([module for module, how in words.items() if how != SUMMED])
    parts = _parts(model, words, uses)
    names: dict[nn.Parameter, str] = {}  # of those that several modules have, the first one
    for prefix, module in model.named_modules():
        own = module._parameters.items() if words.get(module) != SUMMED else ()
        for name, parameter in own:
            if parameter is not None:
                names.setdefault(parameter, f"{prefix}.{name}".removeprefix(PREFIX))
    if uses.found:
        return f"{names[uses.found[0]]} is cut, and used by other modules than its own"
    if not parts:
        return ""
    gradients = torch.autograd.grad(torch.stack(parts).sum(), list(names), allow_unused=True)
    for name, gradient in zip(names.values(), gradients, strict=True):
        if gradient is not None:
            return f"{name} is whole on every rank, and gets a part of its gradient on each"
    return ""


def _parts(model: ForeignDecoder, words: dict[nn.Module, str], uses: _Uses) -> list[Tensor]:
    """Sums of what would be cut where it goes from a rank to all, if they have gradients to give.

    No gradient goes to the matrices that are cut by columns, which give each rank its part.
    """
    parts: list[Tensor] = []
    hooks = [module.register_forward_pre_hook(uses.enter) for module in uses.modules]
    for module, how in words.items():
        if how == "colwise" or module is model.head:
            hooks.append(module.register_forward_hook(lambda module, args, out: out.detach()))
        elif how == "rowwise":
            hooks.append(module.register_forward_pre_hook(lambda module, args: parts.extend(args)))
    hooks += [module.register_forward_hook(uses.leave) for module in uses.modules]
    length = min(PROBED, model.config.max_seq_len)
    generator = torch.Generator().manual_seed(0)
    try:
        with uses:
            logits = model(torch.randint(model.config.vocab_size, (1, length), generator=generator))
    finally:
        for hook in hooks:
            hook.remove()
    if model.head in words:
        parts.append(logits)
    return [one.sum() for one in parts if one.requires_grad]


def _words(model: ForeignDecoder) -> dict[nn.Module, str]:
    """How each module is cut, by the plan's word; as :func:`node.trainer.foreign.cut_foreign`."""
    plan = tp_plan(model.config)
    words = {m: how for pattern, how in plan.items() for m in matching(model, pattern)}
    if model.tied and model.head in words and model.embedding is not None:
        words.setdefault(model.embedding, "embedding_rowwise")
    return words


class _Uses(TorchFunctionMode):
    """Notes what is called with parameters of some modules outside of these modules."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.modules = modules
        self.parameters = {one for module in modules for one in module.parameters(recurse=False)}
        self.found: list[nn.Parameter] = []
        self._inside = 0  # modules that are being called

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._inside and isinstance(out, Tensor):  # else only shape or type is asked for
            given = tree_leaves((args, kwargs))
            self.found += [x for x in given if isinstance(x, nn.Parameter) and x in self.parameters]
        return out

    def enter(self, *_: Any) -> None:
        self._inside += 1

    def leave(self, *_: Any) -> None:
        self._inside -= 1


def _refused(model: ForeignDecoder, size: int, why: str) -> ValueError:
    return ValueError(
        f"--tp {size}: {family(model.config)} cannot be cut by its plan: {why}; "
        "lay it out by --dp-shard and --dp-replicate"
    )
