"""Which parameters of a script's model take part, and under which names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parameter import UninitializedParameter

from node.errors import operator_error
from node.trainer.weights import local

T = TypeVar("T", bound=Tensor)
# their names of what is within; the last one is Lightning Fabric's
WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"}


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What takes part: :func:`training`, where all of it can be merged.

    Raises OperatorError E204 where it cannot.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise operator_error(
            "E204",
            "the model is wrapped in FullyShardedDataParallel",
            why="its ranks have flat pieces of parameters, which say nothing of the whole",
            fix="shard it with torch.distributed.fsdp.fully_shard (FSDP2)",
        )
    parameters = training(model)
    for name, parameter in parameters.items():
        if isinstance(parameter, UninitializedParameter):
            raise operator_error(
                "E204",
                f"the parameter {name} has no shape yet",
                why="lazy modules (nn.LazyLinear) get theirs with the first batch",
                fix="pass a batch through the model before node.join",
            )
        if parameter.is_complex():
            raise operator_error(
                "E204",
                f"the parameter {name} is complex",
                why="only real numbers are merged",
                fix="keep it as real numbers, and make torch.view_as_complex of them in forward()",
            )
    if not any(parameter.numel() for parameter in parameters.values()):
        raise operator_error(
            "E204",
            "the model has no parameters to train",
            why="none of them requires a gradient, or those that do have no elements",
            fix="give node.join the model that the optimizer trains",
        )
    refuse_shared(parameters)
    return parameters


@torch.no_grad()
def refuse_shared(parameters: Mapping[str, Tensor]) -> None:
    """Raise E204 where two of them have memory in common: each merge would come to it twice."""
    parts = [(name, local(parameter)) for name, parameter in parameters.items()]
    places = sorted((at, name, part) for name, part in parts if (at := address(part)))
    before: list[tuple[int, str, Tensor]] = []  # those that reach as far as the next one's place
    for at, name, part in places:
        before = [one for one in before if one[0] > at]
        for _, other, theirs in before:
            # views may lie between each other, as columns of one matrix do
            if np.shares_memory(_Seen(part), _Seen(theirs)):
                raise operator_error(
                    "E204",
                    f"the parameters {other} and {name} have memory in common",
                    why="they are two parameters to the swarm: each merge would be added to this "
                    "memory twice",
                    fix="tie them as one parameter, before the optimizer is made: head.weight = "
                    "emb.weight, not head.weight.data = emb.weight.data",
                )
        reach = sum((n - 1) * step for n, step in zip(part.shape, part.stride(), strict=True)) + 1
        before.append((at + reach * part.element_size(), name, part))


@torch.no_grad()
def addresses_of(parameters: Iterable[Tensor]) -> list[int]:
    """See :func:`address`; Ctrl-C at any line of the caller leaves gradients switched on."""
    return [address(local(parameter)) for parameter in parameters]


def address(tensor: Tensor) -> int:
    """Where its elements are; 0 if that is nowhere: it has none, or it is a wrapper of others.

    Also where it is not told: on Apple's GPUs a pointer is that of an object, not of memory.
    """
    if tensor.device.type not in ("cpu", "cuda"):
        return 0
    try:
        return tensor.data_ptr() if tensor.numel() else 0
    except RuntimeError:
        return 0


class _Seen:
    """A tensor as numpy is shown it, on whatever device it is: nothing of it is read."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": f"|V{size}",
        }


def training(model: nn.Module) -> dict[str, nn.Parameter]:
    """What requires a gradient, by the names that the bare model has, whatever wraps it.

    Raises OperatorError E204 where two would have one name.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return bare_names(model, named)


def bare_names(model: nn.Module, named: Mapping[str, T]) -> dict[str, T]:
    """The same tensors of a model by the names that they have where nothing wraps it.

    Raises OperatorError E204 where two would have one name.
    """
    found: dict[str, str] = {}
    wraps = cache(_wraps)
    for name in named:
        bare = _bare(model, name, wraps)
        if bare in found:
            raise operator_error(
                "E204",
                f"two tensors of the model would both be called {bare}",
                why=f"they are {found[bare]} and {name}; parts of names that stand for a wrapper "
                "are left out",
                fix="give what the wrapper has itself another name",
            )
        found[bare] = name
    return {bare: named[name] for bare, name in found.items()}


def _bare(model: nn.Module, name: str, wraps: Callable[[nn.Module, str], bool]) -> str:
    """A tensor's name without those parts where a wrapper stands."""
    parts = name.split(".")
    if WRAPPERS.isdisjoint(parts[:-1]):
        return name  # nearly always, and names are read in many a step
    module, kept = model, list[str]()
    for at, part in enumerate(parts[:-1]):
        within = getattr(module, part, None)  # CheckpointWrapper leaves its own part out by itself
        if not isinstance(within, nn.Module):
            return ".".join(kept + parts[at:])
        if not (part in WRAPPERS and wraps(module, part)):
            kept.append(part)
        module = within
    return ".".join([*kept, parts[-1]])


def _wraps(module: nn.Module, part: str) -> bool:
    """Whether it is nothing but a wrapper of this child: it has no other parameters.

    A model that has a child called "module" beside others keeps that in its names.
    """
    within = {id(parameter) for parameter in getattr(module, part).parameters()}
    return all(id(parameter) in within for parameter in module.parameters())
