"""Tensor parallelism of transformers' models, by the plan that the library has for the family.

A plan names modules by pattern and says in a word how each is cut. Its words stand for torch's own
styles here; between the modules every rank has whole sequences, unlike with our own model. Logits
stay cut by vocabulary, and with them the embedding where both are one tensor.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from bootstrap.manifest import Model
from node.trainer.hf import ForeignDecoder, tp_plan

GATHERED = ("colwise_gather_output", "colwise_rep")  # of the head: its logits stay cut with us
SUMMED = "replicated_with_grad_allreduce"  # norms of single heads, of which a rank has some


class _Shared(ParallelStyle):
    """A module that every rank has whole, and applies to its own heads alone."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter, device_mesh, [Replicate()], src_data_rank=None)
            setattr(module, name, nn.Parameter(part))
        module.forward = partial(_summed_later, module)
        return module


def _summed_later(module: nn.Module, x: Tensor) -> Any:
    """The module's forward, with a gradient of its parameters that is a part of the sum."""
    whole: dict[str, Tensor | None] = dict(module._parameters)
    try:
        for name, parameter in whole.items():
            if isinstance(parameter, DTensor):
                del module._parameters[name]
                module.__dict__[name] = parameter.to_local(grad_placements=[Partial()])
        return type(module).forward(module, x)
    finally:
        for name, parameter in whole.items():
            module.__dict__.pop(name, None)
            module._parameters[name] = parameter  # type: ignore[assignment]


def check_tp(config: Model, size: int) -> None:
    """Raises ValueError that names the flag where the family has no plan that we can follow."""
    with torch.device("meta"):
        model = ForeignDecoder(config)
    family = model.lm.config.model_type
    plan = tp_plan(config)
    if not plan:
        raise ValueError(
            f"--tp {size}: transformers has no plan (base_model_tp_plan) for {family}; "
            "lay it out by --dp-shard and --dp-replicate"
        )
    for pattern, how in plan.items():
        if _style(how) is None and _matching(model, pattern):
            raise ValueError(
                f"--tp {size}: the plan of {family} cuts {pattern.removeprefix('lm.')} as {how}, "
                "which is not known here; lay it out by --dp-shard and --dp-replicate"
            )
    text = model.lm.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if (whole := getattr(text, name, None)) and whole % size:
            raise ValueError(f"--tp {size} does not divide {name} {whole}")


def cut_foreign(model: ForeignDecoder, mesh: DeviceMesh) -> None:
    """Cut a model over a mesh of one axis, in place; :func:`check_tp` has accepted it."""
    head, embedding = model.lm.get_output_embeddings(), model.lm.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    for pattern, how in tp_plan(model.config).items():
        for module in _matching(model, pattern):
            style = _style(how)
            if module is head:
                style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
            assert style is not None
            parallelize_module(module, mesh, style)
    if tied and isinstance(head.weight, DTensor):
        if not isinstance(embedding.weight, DTensor):
            rows = _style("embedding_rowwise")
            assert rows is not None
            parallelize_module(embedding, mesh, rows)
        head.weight = embedding.weight


def _style(how: str) -> ParallelStyle | None:
    if how == "colwise":
        return ColwiseParallel()
    if how in GATHERED:
        return ColwiseParallel(output_layouts=Replicate())
    if how == "rowwise":
        return RowwiseParallel()
    if how == "embedding_rowwise":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    return _Shared() if how == SUMMED else None


def _matching(model: nn.Module, pattern: str) -> list[nn.Module]:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return [module for name, module in model.named_modules() if expression.fullmatch(name)]
