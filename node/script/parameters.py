"""Which parameters of a script's model take part, and under which names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parameter import UninitializedParameter

from node.errors import operator_error

T = TypeVar("T", bound=Tensor)
WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}


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
    return parameters


def training(model: nn.Module) -> dict[str, nn.Parameter]:
    """What requires a gradient, by the names that the bare model has, whatever wraps it."""
    return bare_names({name: p for name, p in model.named_parameters() if p.requires_grad})


def bare_names(named: Mapping[str, T]) -> dict[str, T]:
    """The same tensors by the names that they have in a model which nothing wraps."""
    found: dict[str, T] = {}
    for name, tensor in named.items():
        bare = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        found[name if bare in found else bare] = tensor  # the model may call something "module"
    return found
