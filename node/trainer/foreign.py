"""Models of transformers over tensor and pipeline ranks, by the plans that the library has.

The plan for tensor parallelism names modules by pattern and says in a word how each is cut. Its
words stand for torch's own styles here; between the modules every rank has whole sequences, unlike
with our own model. Logits stay cut by vocabulary, and with them the embedding where both are one
tensor.

The plan for pipelines names the parts of the inner model in order: what makes hidden states of
tokens, a list of layers, what follows. In a stage, the parts of others only pass on what comes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from bootstrap.manifest import Model
from node.trainer.foreign_storage import lent
from node.trainer.hf import ForeignDecoder, Passed, pp_plan, tp_plan
from protocols.errors import kind_and_reason

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
    return with_local(module, partial(type(module).forward, module, x), [Partial()])


def with_local(
    module: nn.Module, call: Callable[[], Any], gradients: list[Placement] | None = None
) -> Any:
    """What ``call`` returns while the module has this rank's parts as plain tensors.

    ``gradients``: how theirs are placed; like the parts, if not given.
    """
    whole: dict[str, Tensor | None] = dict(module._parameters)
    try:
        for name, parameter in whole.items():
            if isinstance(parameter, DTensor):
                del module._parameters[name]
                module.__dict__[name] = parameter.to_local(grad_placements=gradients)
        return call()
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
        if _style(how) is None and matching(model, pattern):
            raise ValueError(
                f"--tp {size}: the plan of {family} cuts {pattern.removeprefix('lm.')} as {how}, "
                "which is not known here; lay it out by --dp-shard and --dp-replicate"
            )
    text = model.lm.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        whole = getattr(text, name, None)
        for one in whole if isinstance(whole, list | tuple) else (whole,):  # one for each layer
            if one and one % size:
                raise ValueError(f"--tp {size} does not divide {name} {one}")


def cut_foreign(model: ForeignDecoder, mesh: DeviceMesh) -> None:
    """Cut a model over a mesh of one axis, in place; :func:`check_tp` has accepted it."""
    head, embedding = model.head, model.embedding
    plan = tp_plan(model.config)
    for pattern, how in plan.items():
        for module in matching(model, pattern):
            style = _style(how)
            if module is head:
                style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
            assert style is not None
            parallelize_module(module, mesh, style)
    if model.tied and any(expression(pattern).fullmatch(model.head_name) for pattern in plan):
        if embedding is not None and not isinstance(embedding.weight, DTensor):
            rows = _style("embedding_rowwise")
            assert rows is not None
            parallelize_module(embedding, mesh, rows)
        if head is not None and embedding is not None:
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


def matching(model: nn.Module, pattern: str) -> list[nn.Module]:
    """The modules of a model, or of a stage, that a pattern of a plan names."""
    wanted = expression(pattern)
    found = [(name, module) for name, module in model.named_modules() if wanted.fullmatch(name)]
    return [module for name, module in found if not isinstance(module, Passed)]


def expression(pattern: str) -> re.Pattern[str]:
    """A pattern of a plan, in which a star is one part of a name."""
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def check_pp(config: Model, flag: str) -> None:
    """Raises ValueError that begins with ``flag`` where the family has no plan to follow."""
    with torch.device("meta"):
        model = ForeignDecoder(config)
    parts, base = pp_plan(config), model.lm.base_model
    lists = [name for name in parts if isinstance(getattr(base, name, None), nn.ModuleList)]
    if len(lists) != 1 or any(getattr(base, name, None) is None for name in parts):
        raise ValueError(
            f"{flag}: transformers has no plan (base_model_pp_plan) for "
            f"{model.lm.config.model_type} that is known here; lay it out by --dp-shard, "
            "--dp-replicate and --tp"
        )


def cut_stage(model: ForeignDecoder, stage: int, stages: int) -> None:
    """Take from a whole model, in place, what is not of a stage; :func:`check_pp` has accepted it.

    Raises ValueError where the inner model does more to hidden states than its parts do, which
    every stage would do again; on all stages alike.
    """
    base, parts = model.lm.base_model, pp_plan(model.config)
    middle = next(
        n for n, name in enumerate(parts) if isinstance(getattr(base, name), nn.ModuleList)
    )
    layers = getattr(base, parts[middle])
    whole, count = list(layers), len(layers)
    for number in range(count):
        layers[number] = Passed()
    front = {name: getattr(base, name) for name in parts[:middle]}
    behind = {name: getattr(base, name) for name in parts[middle + 1 :]}
    for name in (*front, *behind):
        setattr(base, name, Passed())
    _try_passing(model)
    model.first, model.last = stage == 0, stage == stages - 1
    for number in range(count * stage // stages, count * (stage + 1) // stages):
        layers[number] = whole[number]
    for name, module in ((front if model.first else {}) | (behind if model.last else {})).items():
        setattr(base, name, module)
    if not model.last and model.head_name:
        model.set_submodule(model.head_name, Passed())


def _try_passing(model: ForeignDecoder) -> None:
    """Raises ValueError where a model whose parts only pass on does more to hidden states."""
    base, kind = model.lm.base_model, model.lm.config.model_type
    probe = torch.linspace(-1.0, 1.0, 2 * model.width).view(1, 2, -1)
    try:
        with lent(model), torch.no_grad():
            out = base(inputs_embeds=probe.clone(), use_cache=False, return_dict=True)
            through = torch.equal(out.last_hidden_state, probe)
    except Exception as error:  # whatever a family makes of hidden states in the place of tokens
        why = kind_and_reason(error, 300)
        raise ValueError(
            f"--pp: {kind} takes no hidden states in the place of tokens ({why})"
        ) from error
    if not through:
        raise ValueError(f"--pp: {kind} does more to hidden states than its layers do")
