"""Laying a model out over the mesh: the model file knows nothing of this.

In this order, block by block, so that no rank ever holds a whole large model: matrices cut for
``tp`` with the sequence split between them (2205.05198), attention across ``cp``, experts over
``ep``, activation checkpointing, compilation, and at last parameters sharded over ``dp_shard`` and
``cp`` and replicated over ``dp_replicate`` (FSDP2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from bootstrap.manifest import Model
from node.trainer.computing import Computing
from node.trainer.context import attention_over, positions
from node.trainer.experts import share_mixture
from node.trainer.foreign import cut_foreign
from node.trainer.foreign_context import share_sequences
from node.trainer.foreign_experts import (
    deal_out,
    experts_of,
    route_in_fp32,
    routers_of,
    try_experts,
)
from node.trainer.foreign_storage import give_storage
from node.trainer.hf import ForeignDecoder
from node.trainer.model import Block, Decoder
from node.trainer.model_moe import MixtureOfExperts
from node.trainer.parallel import Ranks


def lay_out(model: Decoder, ranks: Ranks, computing: Computing, seq_len: int) -> None:
    """Make a model, or a stage of one, this rank's part of it, in place.

    Parameters may be on ``meta``: their values are undefined then. They stay fp32 in their
    shards; they travel and compute as ``dtype``, and gradients are reduced in fp32.
    """
    dims = ranks.dims
    fsdp = _Fsdp.over(ranks, computing) if ranks.mesh is not None else None
    if isinstance(model, ForeignDecoder):
        _lay_out_foreign(model, ranks, computing, fsdp, seq_len)
        return
    for block in model.layers.values():
        assert isinstance(block, Block)
        _materialise(block)
        _divide_block(block, model.config, ranks)
        computing.prepare(block)
        if fsdp is not None:
            _shard_block(block, ranks, fsdp)
        else:
            block.to(ranks.device)
    _divide_ends(model, ranks)
    if model.embed_tokens is not None:
        model.embed_tokens.register_forward_hook(partial(_rounded, computing.dtype))
    model.tie()
    if fsdp is not None:
        fsdp.shard(model, fsdp.dense, kept=True)
    _settle(model, ranks, computing)
    if dims.cp > 1 and dims.attention == "ring":
        model.mask_of = _as_they_are
    if dims.cp > 1 or dims.tp > 1:
        _tell_positions(model, ranks, seq_len)


def _divide_block(block: Block, config: Model, ranks: Ranks) -> None:
    """Cut it for ``tp``, and share its attention over ``cp`` and its experts over ``ep``."""
    dims = ranks.dims
    if dims.tp > 1:
        parallelize_module(block, ranks.axis("tp"), _block_plan(config))
    if dims.cp > 1:
        block.self_attn.attend = attention_over(ranks.axis("cp"), dims.attention)
    if isinstance(block.mlp, MixtureOfExperts):
        share_mixture(block.mlp, ranks)


def _shard_block(block: Block, ranks: Ranks, fsdp: _Fsdp) -> None:
    """Shard it; by themselves what chooses among experts, and those that are dealt out."""
    apart: set[nn.Parameter] = set()  # the experts' own, on a mesh of theirs or on none
    if isinstance(block.mlp, MixtureOfExperts):
        if ranks.dims.ep > 1:
            fsdp.shard(block.mlp.experts, fsdp.experts)
            apart = set(block.mlp.experts.parameters())
        fsdp.shard_router(block.mlp.gate)
    fsdp.shard(block, fsdp.dense, apart)


def _divide_ends(model: Decoder, ranks: Ranks) -> None:
    """Make what this stage has before and after its blocks, and cut it for ``tp``."""
    for outer in (model.embed_tokens, model.norm, model.lm_head):
        if outer is not None:
            _materialise(outer)
    if ranks.dims.tp > 1:
        plan = {name: style for name, style in _outer_plan().items() if getattr(model, name)}
        parallelize_module(model, ranks.axis("tp"), plan)


def _lay_out_foreign(
    model: ForeignDecoder, ranks: Ranks, computing: Computing, fsdp: _Fsdp | None, seq_len: int
) -> None:
    """Cut by the family's own plan; the rest by layers."""
    dims = ranks.dims
    if dims.ep > 1:
        try_experts(model, dims.ep)
    if dims.cp > 1:
        share_sequences(model, ranks.axis("cp"), dims.attention, seq_len)
    if dims.tp > 1:
        cut_foreign(model, ranks.axis("tp"))
    dealt: list[nn.Module] = []
    if dims.ep > 1:
        deal_out(model, ranks.axis("ep"))
        dealt = experts_of(model)
    routers: list[nn.Module] = []
    if computing.dtype != torch.float32:
        routers = routers_of(model)
        for router in routers:
            route_in_fp32(router, ranks.device)
    for block in model.blocks:
        computing.prepare(block, [*dealt, *routers])
        if fsdp is not None:
            _shard_foreign_block(block, dealt, routers, fsdp)
    if fsdp is not None:
        fsdp.shard(model, fsdp.dense, kept=True)
    give_storage(model, torch.device("cpu") if computing.offload else ranks.device)
    _settle(model, ranks, computing)
    if dims.cp > 1:
        _tell_positions(model, ranks, seq_len)


def _shard_foreign_block(
    block: nn.Module, dealt: list[nn.Module], routers: list[nn.Module], fsdp: _Fsdp
) -> None:
    """``dealt`` are the model's experts that are dealt out, on a mesh of theirs or on none."""
    apart = {parameter for experts in dealt for parameter in experts.parameters()}
    for experts in dealt:
        if experts in block.modules():
            fsdp.shard(experts, fsdp.experts)
    for router in routers:
        if router in block.modules():
            fsdp.shard_router(router)
    fsdp.shard(block, fsdp.dense, apart)


def _settle(model: Decoder, ranks: Ranks, computing: Computing) -> None:
    """Bring a model to the device.

    Under offload FSDP has done it: shards are in the host's memory, and buffers on the device.
    """
    if ranks.mesh is None or not computing.offload:
        model.to(ranks.device)


def _rounded(dtype: torch.dtype, embedding: nn.Module, args: Any, out: Tensor) -> Tensor:
    """Hidden states are of the computing type from here on, in every layout.

    Those of a rounded embedding (FSDP) and those that come from another stage are so anyhow; where
    parameters are fp32, autocast would leave what is added up between layers in fp32.
    """
    return out.to(dtype)


def _as_they_are(documents: Tensor) -> Tensor:
    return documents


def _tell_positions(model: Decoder, ranks: Ranks, seq_len: int) -> None:
    """Say with every call which tokens of a sequence are here."""
    dims, here = ranks.dims, torch.arange(seq_len)
    if dims.cp > 1:
        here = positions(seq_len, ranks.at("cp"), dims.cp, dims.attention)
    model.register_forward_pre_hook(
        partial(_with_positions, here.to(ranks.device)), with_kwargs=True
    )


def _with_positions(here: Tensor, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, {**kwargs, "positions": here}


def _materialise(module: nn.Module) -> None:
    if any(parameter.is_meta for parameter in module.parameters()):
        module.to_empty(device="cpu")


def _block_plan(config: Model) -> dict[str, Any]:
    """Heads and hidden units are cut; between them each rank has its part of the tokens.

    (Those of experts by :mod:`node.trainer.experts`.)
    """
    # the rotary tables, and a mask of documents
    others = (None, None) if config.attention == "document" else (None,)
    plan: dict[str, Any] = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others)
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
    }
    if config.experts:
        return plan
    return plan | {
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }


def _outer_plan() -> dict[str, Any]:
    return {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        # logits stay cut by vocabulary; the loss is taken over them as they are
        "lm_head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }


@dataclass(frozen=True)
class _Fsdp:
    """How parameters are sharded; a mesh of None: they are not."""

    dense: DeviceMesh | None
    experts: DeviceMesh | None
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshard: bool

    @classmethod
    def over(cls, ranks: Ranks, computing: Computing) -> _Fsdp:
        mesh, dims = ranks.mesh, ranks.dims
        assert mesh is not None
        dense = experts = None
        if dims.reduced > 1 or computing.offload:
            flat = mesh["dp_shard", "ep", "cp"]._flatten("fsdp")
            dense = flat
            if dims.dp_replicate > 1:
                dense = DeviceMesh._concatenate([mesh["dp_replicate"], flat])
        if dims.reduced > dims.ep or computing.offload:
            rest = mesh["dp_shard", "cp"]._flatten("fsdp_experts")
            experts = rest
            if dims.dp_replicate > 1:
                experts = DeviceMesh._concatenate([mesh["dp_replicate"], rest])
        half = computing.dtype if computing.dtype != torch.float32 else None
        return cls(
            dense,
            experts,
            MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False),
            CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
            if computing.offload
            else OffloadPolicy(),
            dims.zero == 3,
        )

    def shard(
        self,
        module: nn.Module,
        mesh: DeviceMesh | None,
        apart: set[nn.Parameter] | None = None,
        *,
        kept: bool = False,
    ) -> None:
        """Shard the parameters of a module that are not sharded yet, but for those ``apart``.

        ``kept``: they stay gathered from forward to backward whatever ZeRO says, as backward begins
        with them (embedding, last norm and head, of a whole model).
        """
        if mesh is not None:
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=self.precision,
                offload_policy=self.offload,
                reshard_after_forward=self.reshard and not kept,
                ignored_params=apart,
            )

    def shard_router(self, router: nn.Module) -> None:
        """Shard what chooses among experts by itself, where that is needed to keep it fp32."""
        if self.dense is not None and self.precision.param_dtype is not None:
            exact = MixedPrecisionPolicy(None, torch.float32, cast_forward_inputs=False)
            fully_shard(
                router,
                mesh=self.dense,
                mp_policy=exact,
                offload_policy=self.offload,
                reshard_after_forward=False,  # it is small
            )
