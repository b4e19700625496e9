"""The layouts that are compared with one process, and those that are refused, with the reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bootstrap.manifest import Data, Inner, Manifest, Model, Rounds
from node.island.settings import IslandSettings
from node.trainer.dims import ParallelDims

STEPS = 10

# large enough that a rank that counts this loss wrongly is noticed
BALANCED = {"router_aux_loss_coef": 0.1}
# models of transformers: what their configurations have beside FOREIGN
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "gemma": {},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 8},
    "mixtral": {"num_local_experts": 4, **BALANCED},
    "qwen2_moe": {
        **BALANCED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_moe": {
        **BALANCED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, **BALANCED},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **BALANCED},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
}
FOREIGN = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
FOREIGN_EP = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")
FOREIGN_TP = tuple(name for name in FAMILIES if name not in ("gpt2", *FOREIGN_EP))
FOREIGN_PP = (*FOREIGN_TP, "mixtral")


@dataclass(frozen=True)
class Case:
    """One layout, what goes with it, and what it is called in the table."""

    name: str
    dims: ParallelDims = field(default_factory=ParallelDims)
    model: str = "dense"
    settings: dict[str, Any] = field(default_factory=dict)
    inner: dict[str, Any] = field(default_factory=dict)


def _dims(**sizes: Any) -> ParallelDims:
    return ParallelDims(**sizes)


# packed documents are kept apart; the text's spaces end them, some three in a sequence
APART = {"attention": "document", "document_end": ord(" ")}
MUON = {"optimizer": "muon"}
BF16 = {"bf16": True}
OFFLOAD, ACCUMULATED = {"offload": True}, {"micro_batch": 1}
AGAIN, SOME = {"recompute": "full"}, {"recompute": "selective"}

CASES = (
    Case("DDP", _dims(dp_replicate=2)),
    Case("FSDP, ZeRO 3", _dims(dp_shard=2)),
    Case("FSDP, ZeRO 2", _dims(dp_shard=2, zero=2)),
    Case("FSDP, ZeRO 1, accumulated", _dims(dp_shard=2, zero=1), settings=ACCUMULATED),
    Case("FSDP, three uneven ranks", _dims(dp_shard=3)),
    Case("FSDP, three uneven ranks, accumulated", _dims(dp_shard=3), settings=ACCUMULATED),
    Case("HSDP", _dims(dp_replicate=2, dp_shard=2)),
    Case("TP, sequence parallel", _dims(tp=2)),
    Case("FSDP x TP", _dims(dp_shard=2, tp=2)),
    Case("HSDP x TP", _dims(dp_replicate=2, dp_shard=2, tp=2)),
    Case("CP, Ulysses", _dims(cp=2)),
    Case("CP, ring", _dims(cp=2, attention="ring")),
    Case("CP, ring of four", _dims(cp=4, attention="ring")),
    Case("FSDP x CP", _dims(dp_shard=2, cp=2)),
    Case("CP (ring) x TP", _dims(cp=2, tp=2, attention="ring")),
    Case("FSDP x CP x TP", _dims(dp_shard=2, cp=2, tp=2, attention="ring")),
    Case("PP, GPipe", _dims(pp=2, schedule="gpipe")),
    Case("PP, 1F1B", _dims(pp=2)),
    Case("PP, interleaved 1F1B", _dims(pp=2, schedule="interleaved")),
    Case("PP, ZBV", _dims(pp=2, schedule="zbv")),
    Case("PP, four stages", _dims(pp=4)),
    Case("PP, head not tied", _dims(pp=2), model="untied"),
    Case("PP x FSDP", _dims(pp=2, dp_shard=2)),
    Case("PP (interleaved) x FSDP", _dims(pp=2, dp_shard=2, schedule="interleaved")),
    Case("PP (ZBV) x TP", _dims(pp=2, tp=2, schedule="zbv")),
    Case("PP x TP", _dims(pp=2, tp=2)),
    Case("PP x FSDP x TP", _dims(pp=2, dp_shard=2, tp=2)),
    Case("PP x CP", _dims(pp=2, cp=2)),
    Case("PP x HSDP", _dims(pp=2, dp_replicate=2, dp_shard=2)),
    Case("MoE, FSDP", _dims(dp_shard=2), model="moe"),
    Case("MoE, EP", _dims(dp_shard=2, ep=2), model="moe"),
    Case("MoE, FSDP x EP", _dims(dp_shard=4, ep=2), model="moe"),
    Case("MoE, HSDP x EP", _dims(dp_replicate=2, dp_shard=2, ep=2), model="moe"),
    Case("MoE, PP x EP", _dims(pp=2, dp_shard=2, ep=2), model="moe"),
    Case("MoE, TP", _dims(tp=2), model="moe"),
    Case("MoE, CP (ring)", _dims(cp=2, attention="ring"), model="moe"),
    Case("MoE, CP (Ulysses)", _dims(cp=2), model="moe"),
    Case("MoE, PP", _dims(pp=2), model="moe"),
    Case("MoE, PP (interleaved)", _dims(pp=2, schedule="interleaved"), model="moe"),
    Case("MoE, PP (ZBV)", _dims(pp=2, schedule="zbv"), model="moe"),
    Case("MoE, FSDP x TP", _dims(dp_shard=2, tp=2), model="moe"),
    Case("MoE, three uneven ranks x TP", _dims(dp_shard=3, tp=2), "moe", ACCUMULATED),
    Case("MoE, EP x TP", _dims(dp_shard=2, ep=2, tp=2), model="moe"),
    Case("MoE, EP x CP", _dims(dp_shard=2, ep=2, cp=2), model="moe"),
    Case("MoE, CP x TP", _dims(cp=2, tp=2), model="moe"),
    Case("MoE, PP x TP", _dims(pp=2, tp=2), model="moe"),
    Case("MoE, PP x CP", _dims(pp=2, cp=2), model="moe"),
    Case("MoE, FSDP x EP x TP", _dims(dp_shard=4, ep=2, tp=2), model="moe"),
    Case("MoE, EP x CP x TP", _dims(dp_shard=2, ep=2, cp=2, tp=2), model="moe"),
    Case("MoE, PP x EP x TP", _dims(pp=2, dp_shard=2, ep=2, tp=2), model="moe"),
    Case("MoE, EP, ZeRO 1, accumulated", _dims(dp_shard=2, ep=2, zero=1), "moe", ACCUMULATED),
    Case("MoE, FSDP x EP, ZeRO 1", _dims(dp_shard=4, ep=2, zero=1), "moe", ACCUMULATED),
    Case("HSDP x CP", _dims(dp_replicate=2, dp_shard=2, cp=2)),
    Case("documents apart, FSDP x TP", _dims(dp_shard=2, tp=2), "documents"),
    Case("documents apart, CP (Ulysses)", _dims(cp=2), "documents"),
    Case("documents apart, CP (ring)", _dims(cp=2, attention="ring"), "documents"),
    Case("documents apart, CP (ring of four)", _dims(cp=4, attention="ring"), "documents"),
    Case("documents apart, CP (ring) x TP", _dims(cp=2, tp=2, attention="ring"), "documents"),
    Case("documents apart, FSDP x CP x TP", _dims(dp_shard=2, cp=2, tp=2), "four documents"),
    Case("documents apart, PP", _dims(pp=2), "documents"),
    Case("documents apart, PP (interleaved)", _dims(pp=2, schedule="interleaved"), "documents"),
    Case("documents apart, PP (ZBV)", _dims(pp=2, schedule="zbv"), "documents"),
    Case("documents apart, PP x FSDP x TP", _dims(pp=2, dp_shard=2, tp=2), "documents"),
    Case("documents apart, PP x CP (ring)", _dims(pp=2, cp=2, attention="ring"), "documents"),
    Case("FSDP, bf16", _dims(dp_shard=2), settings=BF16),
    Case("TP, bf16", _dims(tp=2), settings=BF16),
    Case("FSDP x TP, bf16", _dims(dp_shard=2, tp=2), settings=BF16),
    Case("PP, bf16", _dims(pp=2), settings=BF16),
    Case("CP (Ulysses), bf16", _dims(cp=2), settings=BF16),
    Case("CP (ring), bf16", _dims(cp=2, attention="ring"), settings=BF16),
    Case("MoE, FSDP, bf16", _dims(dp_shard=2), "moe", BF16),
    Case("MoE, EP, bf16", _dims(dp_shard=2, ep=2), "moe", BF16),
    Case("MoE, EP x TP, bf16", _dims(dp_shard=2, ep=2, tp=2), "moe", BF16),
    Case("MoE, PP, bf16", _dims(pp=2), "moe", BF16),
    Case("PP x FSDP x TP, bf16", _dims(pp=2, dp_shard=2, tp=2), settings=BF16),
    Case("FSDP, recompute full", _dims(dp_shard=2), settings=AGAIN),
    Case("FSDP, recompute selective", _dims(dp_shard=2), settings={"recompute": "selective"}),
    Case("TP, recompute full", _dims(tp=2), settings=AGAIN),
    Case("one rank, offload", _dims(), settings=OFFLOAD),
    Case("FSDP, offload", _dims(dp_shard=2), settings=OFFLOAD),
    Case("TP, offload", _dims(tp=2), settings=OFFLOAD),
    Case("FSDP x TP, offload", _dims(dp_shard=2, tp=2), settings=OFFLOAD),
    Case("PP, offload", _dims(pp=2), settings=OFFLOAD),
    Case("CP, offload", _dims(cp=2), settings=OFFLOAD),
    Case("MoE, EP, offload", _dims(dp_shard=2, ep=2), "moe", OFFLOAD),
    Case(
        "MoE, one rank, offload, bf16, recompute selective", _dims(), "moe", OFFLOAD | SOME | BF16
    ),
    Case(
        "MoE, HSDP x EP, recompute selective",
        _dims(dp_replicate=2, dp_shard=2, ep=2),
        "moe",
        SOME,
    ),
    Case("MoE, EP, offload, recompute selective", _dims(dp_shard=2, ep=2), "moe", OFFLOAD | SOME),
    Case(
        "MoE, PP x EP, offload, recompute selective",
        _dims(pp=2, dp_shard=2, ep=2),
        "moe",
        OFFLOAD | SOME | ACCUMULATED,
    ),
    Case("FSDP, accumulation", _dims(dp_shard=2), settings=ACCUMULATED),
    Case("FSDP x TP, Muon", _dims(dp_shard=2, tp=2), inner=MUON),
    Case("MoE, FSDP x EP, Muon", _dims(dp_shard=4, ep=2), "moe", inner=MUON),
    Case("FSDP, Muon", _dims(dp_shard=2), inner=MUON),
    Case("TP, Muon", _dims(tp=2), inner=MUON),
    Case("CP (Ulysses), Muon", _dims(cp=2), inner=MUON),
    Case("CP (ring), Muon", _dims(cp=2, attention="ring"), inner=MUON),
    Case("PP, Muon", _dims(pp=2), inner=MUON),
    Case("PP (ZBV), Muon", _dims(pp=2, schedule="zbv"), inner=MUON),
    Case("PP x TP, Muon", _dims(pp=2, tp=2), inner=MUON),
    Case("PP x FSDP x TP, Muon", _dims(pp=2, dp_shard=2, tp=2), inner=MUON),
    Case("MoE, EP x TP, Muon", _dims(dp_shard=2, ep=2, tp=2), "moe", inner=MUON),
    *(Case(f"{name}, TP", _dims(tp=2), name) for name in FOREIGN_TP),
    Case("qwen3, FSDP x TP", _dims(dp_shard=2, tp=2), "qwen3"),
    Case("llama, HSDP", _dims(dp_replicate=2, dp_shard=2), "llama"),
    Case("gpt2, FSDP", _dims(dp_shard=2), "gpt2"),
    *(Case(f"{name}, PP", _dims(pp=2), name) for name in FOREIGN_PP),
    Case("llama, PP (interleaved)", _dims(pp=2, schedule="interleaved"), "llama of four"),
    Case("qwen3, PP (ZBV)", _dims(pp=2, schedule="zbv"), "qwen3 of four"),
    Case("llama, PP x FSDP", _dims(pp=2, dp_shard=2), "llama"),
    Case("qwen3, PP x TP", _dims(pp=2, tp=2), "qwen3"),
    Case("llama, PP x FSDP x TP", _dims(pp=2, dp_shard=2, tp=2), "llama"),
    Case("llama, PP, documents apart", _dims(pp=2), "llama with documents"),
    Case("llama, PP, bf16", _dims(pp=2), "llama", BF16),
    *(Case(f"{name}, EP", _dims(dp_shard=2, ep=2), name) for name in FOREIGN_EP),
    Case("mixtral, FSDP", _dims(dp_shard=2), "mixtral"),
    Case("mixtral, FSDP x EP", _dims(dp_shard=4, ep=2), "mixtral"),
    Case("mixtral, FSDP x EP, ZeRO 1", _dims(dp_shard=4, ep=2, zero=1), "mixtral", ACCUMULATED),
    Case("qwen3_moe, three uneven ranks", _dims(dp_shard=3), "qwen3_moe"),
    Case("qwen3_moe, uneven, accumulated", _dims(dp_shard=3), "qwen3_moe", ACCUMULATED),
    Case("qwen3_moe, HSDP x EP", _dims(dp_replicate=2, dp_shard=2, ep=2), "qwen3_moe"),
    Case("qwen3_moe, PP x EP", _dims(pp=2, dp_shard=2, ep=2), "qwen3_moe"),
    Case("mixtral, EP x CP", _dims(dp_shard=2, ep=2, cp=2), "mixtral"),
    Case("olmoe, EP, ZeRO 2", _dims(dp_shard=4, ep=2, zero=2), "olmoe"),
    Case("mixtral, EP, accumulation", _dims(dp_shard=2, ep=2), "mixtral", ACCUMULATED),
    Case("qwen3_moe, EP, recompute full", _dims(dp_shard=2, ep=2), "qwen3_moe", AGAIN),
    Case("qwen2_moe, EP, recompute selective", _dims(dp_shard=2, ep=2), "qwen2_moe", SOME),
    Case("mixtral, EP, offload", _dims(dp_shard=2, ep=2), "mixtral", OFFLOAD),
    Case("mixtral, EP, Muon", _dims(dp_shard=2, ep=2), "mixtral", inner=MUON),
    Case("mixtral, EP, compile", _dims(dp_shard=2, ep=2), "mixtral", {"compile": True}),
    Case("llama, CP (Ulysses)", _dims(cp=2), "llama"),
    Case("qwen3, CP (ring)", _dims(cp=2, attention="ring"), "qwen3"),
    Case("mixtral, CP (ring of four)", _dims(cp=4, attention="ring"), "mixtral"),
    Case("gpt2, CP (Ulysses of four)", _dims(cp=4), "gpt2"),
    Case("gemma, FSDP x CP", _dims(dp_shard=2, cp=2), "gemma"),
    Case("qwen3, CP (ring) x TP", _dims(cp=2, tp=2, attention="ring"), "qwen3"),
    Case("llama, PP x CP", _dims(pp=2, cp=2), "llama"),
    Case("llama, CP (Ulysses), documents apart", _dims(cp=2), "llama with documents"),
    Case(
        "llama, CP (ring), documents apart", _dims(cp=2, attention="ring"), "llama with documents"
    ),
    Case("llama, CP (ring), recompute full", _dims(cp=2, attention="ring"), "llama", AGAIN),
    Case("llama, FSDP, recompute full", _dims(dp_shard=2), "llama", AGAIN),
    Case("qwen3, TP, recompute selective", _dims(tp=2), "qwen3", {"recompute": "selective"}),
    Case("gpt2, FSDP, recompute full", _dims(dp_shard=2), "gpt2", AGAIN),
    Case("llama, FSDP, compile", _dims(dp_shard=2), "llama", {"compile": True}),
    Case("qwen3, TP, compile", _dims(tp=2), "qwen3", {"compile": True}),
    Case("llama, PP, compile", _dims(pp=2), "llama", {"compile": True}),
    Case("FSDP, compile", _dims(dp_shard=2), settings={"compile": True}),
    Case("TP, compile", _dims(tp=2), settings={"compile": True}),
    Case("TP, compile, recompute full", _dims(tp=2), settings=AGAIN | {"compile": True}),
    Case("TP, compile, recompute selective", _dims(tp=2), settings=SOME | {"compile": True}),
    Case("FSDP x TP, compile", _dims(dp_shard=2, tp=2), settings={"compile": True}),
    Case("PP, compile", _dims(pp=2), settings={"compile": True}),
    Case("CP (ring), compile", _dims(cp=2, attention="ring"), settings={"compile": True}),
    Case("MoE, EP, compile", _dims(dp_shard=2, ep=2), "moe", {"compile": True}),
    Case(
        "MoE, EP, compile, recompute full",
        _dims(dp_shard=2, ep=2),
        "moe",
        AGAIN | {"compile": True},
    ),
    Case(
        "FSDP, compile, recompute selective",
        _dims(dp_shard=2),
        settings={"compile": True, "recompute": "selective"},
    ),
)


def _model(name: str) -> Model:
    family, _, kind = name.partition(" ")
    if family in FAMILIES:
        from node.trainer.hf import model_of

        shared = FOREIGN if family != "gpt2" else {"vocab_size": 256}
        more = {"num_hidden_layers": 4} if kind == "of four" else {}
        found = model_of({"model_type": family, **shared, **FAMILIES[family], **more})
        return found.model_copy(update=APART if kind == "with documents" else {})
    model: dict[str, Any] = {
        "d_model": 32,
        "n_layers": 4,
        "n_heads": 4,
        "n_kv_heads": 2 if name != "moe" else 4,
        "d_ff": 64,
        "max_seq_len": 32,
        "tied_embeddings": name != "untied",
    }
    if "documents" in name:
        model |= APART
    if name == "four documents":
        model["n_kv_heads"] = 4
    if name == "moe":
        model |= {"experts": 4, "top_k": 2, "d_ff": 32}
    return Model(**model)


def manifest_of(case: Case) -> Manifest:
    """The run of a case: four layers, four heads, 8 sequences of 32 tokens a step."""
    return Manifest(
        model=_model(case.model),
        data=Data(seq_len=32, batch_size=8),
        # eps: Adam divides by a gradient's size, which makes noise of elements with almost none
        inner=Inner(warmup_steps=2, total_steps=100, eps=1e-5, **case.inner),
        rounds=Rounds(inner_steps=STEPS, eval_every=1),
    )


# cases that an island's settings refuse, with the reason
REFUSED = (
    Case("PP (ZBV) x FSDP", _dims(pp=2, dp_shard=2, schedule="zbv")),
    Case("PP (ZBV), offload", _dims(pp=2, schedule="zbv"), settings=OFFLOAD),
    Case("PP (ZBV) x TP, offload", _dims(pp=2, tp=2, schedule="zbv"), settings=OFFLOAD),
    Case("CP (Ulysses) of more ranks than key heads", _dims(cp=4)),
    Case("gpt2, TP", _dims(tp=2), "gpt2"),
    Case("mixtral, TP", _dims(tp=2), "mixtral"),
    Case("gpt2, PP", _dims(pp=2), "gpt2"),
    Case("mistral, CP", _dims(cp=2), "mistral"),
    Case("llama, EP", _dims(dp_shard=2, ep=2), "llama"),
    Case("gpt_oss, EP x TP", _dims(dp_shard=2, ep=2, tp=2), "gpt_oss"),
)


def reason(case: Case) -> str:
    """Why a case is refused; raises AssertionError if it is not."""
    run, dims = manifest_of(case), case.dims
    try:
        given = IslandSettings.model_validate(dims.model_dump() | case.settings)
        given.dims(dims.size, 1, 0, 0, run.model, run.data)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{case.name} is not refused")
