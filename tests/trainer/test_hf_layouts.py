"""How models of transformers are cut: tensor parallelism, stages, documents, matrices of Muon."""

import pytest
import torch
from hf_kit import DEEPSEEK, GPT2, MIXTRAL, OURS, QWEN, TOKENS

from bootstrap.manifest import Data, Inner
from node.trainer.dims import ParallelDims
from node.trainer.foreign import cut_stage
from node.trainer.foreign_storage import build_unstored
from node.trainer.hf import build_foreign, model_of, tp_plan
from node.trainer.layout import Layout
from node.trainer.model import build
from node.trainer.optim import by_muon, make_optimizer
from protocols.errors import OperatorError

GEMMA3N = {  # which has a width for each layer, also where one is given for all
    "model_type": "gemma3n_text", "vocab_size": 256, "vocab_size_per_layer_input": 256,
    "hidden_size": 32, "hidden_size_per_layer_input": 8, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "num_kv_shared_layers": 0, "laurel_rank": 4,
    "altup_num_inputs": 2, "layer_types": ["full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 2,
}  # fmt: skip


def test_the_plan_for_tensor_parallelism():
    plan = tp_plan(model_of(QWEN))
    assert plan["lm.model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["lm.model.layers.*.mlp.down_proj"] == "rowwise"
    assert "lm.lm_head" in plan
    assert tp_plan(model_of(GPT2)) == {}


@pytest.mark.parametrize(
    ("plain", "sizes", "message"),
    [
        (GPT2, {"tp": 2}, "--tp 2: transformers has no plan .* for gpt2; lay it out by --dp-shard"),
        (QWEN, {"tp": 4}, "--tp 4 does not divide num_key_value_heads 2"),
        (QWEN, {"dp_shard": 2, "ep": 2}, "--ep 2: the experts of qwen2 .*; lay it out by --dp-"),
        (QWEN, {"cp": 4}, "--cp 4 with --attention ulysses does not divide num_key_value_heads 2"),
        (QWEN, {"cp": 3, "attention": "ring"}, "--cp 3 does not divide seq_len 64 into 6 equal"),
        (GPT2, {"pp": 2}, "--pp 2: transformers has no plan .base_model_pp_plan. for gpt2"),
        (MIXTRAL, {"tp": 2}, "--tp 2: the plan of mixtral cuts .* as moe_tp_experts, which is not"),
    ],
)
def test_what_a_family_cannot_be_cut_into_is_named_by_its_flag(plain, sizes, message):
    data = Data(seq_len=64, batch_size=8)
    with pytest.raises(ValueError, match=message):
        ParallelDims(**sizes).check(model_of(plain), data)
    ParallelDims(dp_shard=2).check(model_of(plain), data)
    ParallelDims(tp=2, dp_shard=2).check(model_of(QWEN), data)


def test_layers_of_several_widths_are_all_to_be_cut():
    data, plain = Data(seq_len=64, batch_size=8), GEMMA3N
    ParallelDims(tp=2).check(model_of(plain), data)
    plain = plain | {"intermediate_size": [64, 66]}
    ParallelDims(tp=2).check(model_of(plain), data)
    plain = plain | {"num_key_value_heads": 4}
    with pytest.raises(ValueError, match=r"^--tp 4 does not divide intermediate_size 66"):
        ParallelDims(tp=4).check(model_of(plain), data)


@pytest.mark.parametrize("plain", [QWEN, MIXTRAL], ids=lambda plain: plain["model_type"])
def test_stages_compute_together_what_the_model_does(plain):
    config = model_of(plain)
    whole = build_foreign(config, 0)
    hidden = TOKENS
    for stage in range(2):
        part = build_foreign(config, 0)
        cut_stage(part, stage, 2)
        assert len(part.blocks) == len(whole.blocks) // 2
        hidden = part(hidden)
    torch.testing.assert_close(hidden, whole(TOKENS), rtol=0, atol=0)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_family_that_does_more_between_its_layers_has_no_stages(stage, monkeypatch):
    model = build_foreign(model_of(QWEN), 0)
    rotary = model.lm.model.rotary_emb
    monkeypatch.setattr(  # as families do that scale what comes in
        type(rotary), "forward", lambda self, x, position_ids: x.mul_(2)
    )
    with pytest.raises(ValueError, match="--pp: qwen2 does more to hidden states"):
        cut_stage(model, stage, 2)


GEMMA4 = QWEN | {
    "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 16,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300,
}  # fmt: skip
DEEPSEEK4 = DEEPSEEK | {"model_type": "deepseek_v4", "num_hidden_layers": 2}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("plain", [GEMMA4, DEEPSEEK4], ids=lambda plain: plain["model_type"])
def test_families_that_want_tokens_in_each_stage_are_refused_by_all_stages(plain, stage):
    """Whatever they make of hidden states; or one rank would crash and others wait for it."""
    config = model_of(plain)
    ParallelDims(pp=2).check(config, Data(seq_len=32, batch_size=4))
    model = build_unstored(config)
    assert model is not None
    with pytest.raises(ValueError, match=f"^--pp: {plain['model_type']} "):
        cut_stage(model, stage, 2)


@pytest.mark.parametrize("config", [OURS, model_of(GPT2), model_of(QWEN)], ids=str)
def test_documents_apart_are_computed_as_if_each_stood_alone(config):
    """GPT-2's positions are absolute, so there the first document alone is compared."""
    config = config.model_copy(update={"attention": "document", "document_end": 5})
    model = build(config, 0)
    tokens = TOKENS.clone()
    tokens[tokens == 5] = 6
    tokens[:, 9] = 5
    alone = build(config.model_copy(update={"attention": "causal"}), 0)
    with torch.no_grad():
        packed, first, second = model(tokens), alone(tokens[:, :10]), alone(tokens[:, 10:])
        whole = alone(tokens)
    torch.testing.assert_close(packed[:, :10], first, rtol=0, atol=1e-5)
    if "gpt2" not in config.config:
        torch.testing.assert_close(packed[:, 10:], second, rtol=0, atol=1e-5)
    assert not torch.allclose(packed[:, 10:], whole[:, 10:], atol=1e-5)


XLM = {
    "model_type": "xlm", "vocab_size": 300, "emb_dim": 32, "n_layers": 2, "n_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "plain",
    [
        GPT2,
        QWEN,
        {"model_type": "mpt", "vocab_size": 300, "d_model": 32, "n_layers": 2, "n_heads": 2},
        QWEN | {"model_type": "bert"},
    ],
    ids=lambda plain: plain["model_type"],
)
def test_matrices_of_layers_are_muons_and_layers_make_fragments(plain):
    model = build(model_of(plain), 0)
    optimizer = make_optimizer(model, Inner(optimizer="muon"))
    muons = {id(p) for group in optimizer.param_groups if group["muon"] for p in group["params"]}
    matrices = {id(p) for block in model.blocks for p in block.parameters() if p.ndim >= 2}
    assert len(matrices) >= 8
    assert muons == matrices
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layout = Layout.of_module(model, fragments=2)
    for fragment, block in enumerate(model.blocks):
        assert {names[id(p)] for p in block.parameters()} <= layout.names(fragment)


MAMBA = {
    "model_type": "mamba", "vocab_size": 300, "hidden_size": 32, "state_size": 4,
    "num_hidden_layers": 2,
}  # fmt: skip
ZAMBA = QWEN | {
    "model_type": "zamba", "num_key_value_heads": 4, "attention_hidden_size": 64,
    "attention_head_dim": 16, "mamba_d_state": 4, "n_mamba_heads": 2, "mamba_dt_rank": 4,
    "num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1,
}  # fmt: skip


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("plain", [MAMBA, ZAMBA], ids=lambda plain: plain["model_type"])
def test_how_fast_states_decay_is_no_matrix(plain, optimizer):
    """It has two dimensions and more; weight decay would draw all states to one pace."""
    model, inner = build(model_of(plain), 0), Inner(optimizer=optimizer, weight_decay=0.3)
    groups = make_optimizer(model, inner).param_groups
    found = {id(p): (g["weight_decay"], g["muon"]) for g in groups for p in g["params"]}
    named = dict(model.named_parameters())
    states = {name for name, one in named.items() if name.endswith(("A_log", ".D"))}
    assert any(named[name].ndim >= 2 for name in states)
    for name in states:
        assert found[id(named[name])] == (0.0, False)
        assert by_muon(inner, name, named[name].shape) is False
    maps = [one for name, one in named.items() if name.endswith("out_proj.weight")]
    assert maps
    assert all(found[id(one)] == (0.3, optimizer == "muon") for one in maps)


def test_layers_that_are_not_known_by_name_are_refused_by_muon():
    model = build(model_of(XLM), 0)
    make_optimizer(model, Inner())
    with pytest.raises(OperatorError, match="layers are not known by their names") as caught:
        make_optimizer(model, Inner(optimizer="muon"))
    assert caught.value.code == "E606"


def test_a_family_that_may_look_ahead_does_not():
    plain = {
        "model_type": "bert",
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    model = build(model_of(plain), 0)
    changed = TOKENS.clone()
    changed[:, 12:] = 7
    with torch.no_grad():
        before, after = model(TOKENS), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12], rtol=0, atol=1e-6)
