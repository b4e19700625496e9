"""Models of transformers: built by configuration, refused if they ask for more, in and out."""

import json
from pathlib import Path

import pytest
import torch
from hf_kit import GPT2, MIXTRAL, OURS, QWEN, transformers
from safetensors.torch import load_file, save_file

from bootstrap.manifest import Data, Inner, Manifest
from node.data.supply import with_weights
from node.hf.export import export_hf
from node.hf.import_hf import FAMILIES, import_hf, read_config, tokenizer_in
from node.trainer.dims import ParallelDims
from node.trainer.foreign import cut_stage
from node.trainer.hf import ForeignDecoder, build_foreign, model_of, tp_plan
from node.trainer.layout import Layout, initial_vector
from node.trainer.model import build
from node.trainer.model_moe import balance_loss
from node.trainer.optim import by_muon, make_optimizer
from protocols.errors import OperatorError

families = pytest.mark.parametrize("plain", [GPT2, QWEN], ids=["gpt2", "qwen2"])
TOKENS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))


@families
def test_the_layout_is_that_of_the_model_and_values_follow_the_seed(plain):
    config = model_of(plain)
    assert (config.kind, config.vocab_size, config.n_layers, config.max_seq_len) == (
        "hf",
        300,
        2,
        64,
    )
    layout = Layout.of_config(config)
    model = build(config, 3)
    assert layout == Layout.of_module(model)
    vector = initial_vector(config, 3, torch.empty(layout.size))
    assert torch.equal(vector, layout.flatten_into(model, torch.empty(layout.size)))
    assert not torch.equal(vector, initial_vector(config, 4, torch.empty(layout.size)))
    state = torch.get_rng_state()
    build_foreign(config, 1)
    assert torch.equal(state, torch.get_rng_state())
    assert len(model.blocks) == 2
    logits = model(TOKENS)
    assert torch.equal(logits, model(TOKENS))  # no dropout, though GPT-2's configuration has it
    manifest = Manifest(model=config, data=Data(seq_len=64))
    assert Manifest.parse(manifest.canonical()) == manifest


@families
def test_export_and_import_give_the_same_logits(plain, tmp_path):
    config = model_of(plain)
    vector = initial_vector(config, 0, torch.empty(Layout.of_config(config).size))
    vector += torch.randn(vector.shape, generator=torch.Generator().manual_seed(1)) * 0.1
    folder = export_hf(config, vector, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ours = build(config, 9)
    Layout.of_module(ours).load_from(vector, ours)
    with torch.no_grad():
        assert torch.equal(theirs(TOKENS).logits, ours(TOKENS))
    again = read_config(folder)
    back = import_hf(again, folder, torch.zeros(Layout.of_config(again).size))
    assert torch.equal(back, vector)


EXPERTS = MIXTRAL | {
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
QWEN3_MOE = EXPERTS | {"model_type": "qwen3_moe", "head_dim": 8}
DEEPSEEK = EXPERTS | {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip
GPT_NEOX = {key: value for key, value in QWEN.items() if key != "num_key_value_heads"} | {
    "model_type": "gpt_neox", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "plain",
    [
        EXPERTS | {"model_type": "qwen2_moe"},
        QWEN3_MOE,
        EXPERTS | {"model_type": "olmoe"},
        DEEPSEEK,
        GPT_NEOX,
    ],
    ids=lambda plain: plain["model_type"],
)
def test_files_as_the_library_writes_them_come_in_and_go_out(plain, tmp_path):
    """With an entry an expert, and in pieces or under names that are not the parameters'."""
    config = model_of(plain)
    theirs = build(config, 0).lm.eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    model = read_config(tmp_path / "in")
    vector = import_hf(model, tmp_path / "in", torch.zeros(Layout.of_config(model).size))
    ours = build(model, 1)
    Layout.of_module(ours).load_from(vector, ours)
    folder = export_hf(model, vector, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = theirs(TOKENS).logits
        torch.testing.assert_close(ours(TOKENS), logits, rtol=0, atol=1e-6)
        torch.testing.assert_close(again(TOKENS).logits, logits, rtol=0, atol=1e-6)
    assert torch.equal(import_hf(model, folder, torch.zeros_like(vector)), vector)


def test_values_that_training_would_lose_are_refused(tmp_path):
    """DeepSeek's bias of a router is a buffer, moved by hand where it is trained."""
    config = model_of(DEEPSEEK)
    theirs = build(config, 0).lm
    theirs.model.layers[1].mlp.gate.e_score_correction_bias[2] = 0.5
    theirs.save_pretrained(tmp_path / "in")
    with pytest.raises(OperatorError, match="e_score_correction_bias is no parameter") as caught:
        import_hf(config, tmp_path / "in", torch.zeros(Layout.of_config(config).size))
    assert caught.value.code == "E606"


@pytest.mark.parametrize("plain", [None, QWEN3_MOE], ids=["ours", "theirs"])
def test_an_index_that_names_what_its_file_lacks(plain, tmp_path):
    config = OURS if plain is None else model_of(plain)
    vector = initial_vector(config, 0, torch.empty(Layout.of_config(config).size))
    folder = export_hf(config, vector, tmp_path / "out")
    file = folder / "model.safetensors"
    weights = load_file(file)
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model-1.safetensors")}
    del weights["model.norm.weight"]
    save_file(weights, folder / "model-1.safetensors", metadata={"format": "pt"})
    file.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(OperatorError, match=r"the weight model.norm.weight is missing") as caught:
        import_hf(config, folder, torch.zeros_like(vector))
    assert caught.value.code == "E606"


def test_an_adapter_is_no_model(tmp_path):
    config = model_of(GPT2)
    vector = initial_vector(config, 0, torch.empty(Layout.of_config(config).size))
    folder = export_hf(config, vector, tmp_path / "out")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(OperatorError, match="adapter"):
        import_hf(config, folder, vector)


@pytest.mark.parametrize("ends", [7, [7, 9]], ids=["one end", "as in Llama 3"])
def test_a_llama_of_others_becomes_one_of_ours_with_the_same_logits(tmp_path, ends):
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        rope_theta=5000.0, rms_norm_eps=1e-6, eos_token_id=ends,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    model = read_config(tmp_path / "sharded")
    assert (model.kind, model.rope_theta, model.document_end) == ("llama", 5000.0, 7)
    vector = import_hf(model, tmp_path / "sharded", torch.zeros(Layout.of_config(model).size))
    ours = build(model, 1)
    Layout.of_module(ours).load_from(vector, ours)
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=0, atol=2e-6)


MIXTURE = OURS.model_copy(update={"experts": 4, "top_k": 2, "expert_balance": 0.25})


def test_a_mixture_of_experts_goes_out_as_mixtral_and_comes_back(tmp_path):
    vector = initial_vector(MIXTURE, 0, torch.empty(Layout.of_config(MIXTURE).size))
    vector += torch.randn(vector.shape, generator=torch.Generator().manual_seed(1)) * 0.1
    folder = export_hf(MIXTURE, vector, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(theirs).__name__ == "MixtralForCausalLM"
    ours = build(MIXTURE, 9)
    Layout.of_module(ours).load_from(vector, ours)
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS), rtol=0, atol=1e-5)
    assert read_config(folder) == MIXTURE
    assert torch.equal(import_hf(MIXTURE, folder, torch.zeros_like(vector)), vector)
    theirs.save_pretrained(tmp_path / "again", max_shard_size="40KB")  # as others write it
    assert torch.equal(import_hf(MIXTURE, tmp_path / "again", torch.zeros_like(vector)), vector)


@pytest.mark.parametrize("layers", [1, 2, 32])
def test_experts_of_mixtral_are_kept_as_busy_as_by_the_library(tmp_path, layers):
    """Its loss is a mean over layers, of one sequence the same as ours in each of them."""
    plain = MIXTRAL | {"num_hidden_layers": layers, "router_aux_loss_coef": 0.02}
    plain |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    found = read_config(tmp_path)
    logits = torch.randn(1, 16, 8, generator=torch.Generator().manual_seed(0)) * 3
    theirs = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func(
        (logits[0],) * layers, 8, 2
    )
    scores = logits.softmax(dim=-1)
    ours = balance_loss(scores, scores.topk(found.top_k, dim=-1).indices)
    assert layers * found.expert_balance * ours.item() == pytest.approx(0.02 * theirs.item())
    vector = torch.zeros(Layout.of_config(found).size)
    folder = export_hf(found, vector, tmp_path / "out")
    again = json.loads((folder / "config.json").read_text())
    assert again["router_aux_loss_coef"] == pytest.approx(0.02)
    assert read_config(folder) == found


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
    ],
)
def test_what_ours_would_compute_otherwise_stays_a_model_of_transformers(tmp_path, change):
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, **change,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "out")
    model = read_config(tmp_path / "out")
    assert model.kind == "hf"
    vector = import_hf(model, tmp_path / "out", torch.zeros(Layout.of_config(model).size))
    ours = build(model, 1)
    Layout.of_module(ours).load_from(vector, ours)
    with torch.no_grad():
        assert torch.equal(ours(TOKENS), theirs(TOKENS).logits)


def test_our_own_export_comes_back_with_bytes_as_its_tokenizer(tmp_path):
    vector = initial_vector(OURS, 0, torch.empty(Layout.of_config(OURS).size))
    folder = export_hf(OURS, vector, tmp_path / "out")
    model = read_config(folder)
    assert model == OURS
    stated = tokenizer_in(folder)
    assert stated is not None
    assert stated.digest == "bytes"
    assert torch.equal(import_hf(model, folder, torch.zeros_like(vector)), vector)
    run = Manifest(model=model, data=Data(seq_len=32))
    filled = with_weights(run, folder).model
    assert len(filled.initial) == 64
    other = export_hf(OURS, vector + 1, tmp_path / "other")
    assert with_weights(run, other).model.initial != filled.initial


def test_routers_are_noiseless() -> None:
    noisy = MIXTRAL | {"router_jitter_noise": 0.5, "num_local_experts": 4}
    model = build(model_of(noisy), 0)
    assert torch.equal(model(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "nonesuch"}, "no causal language model"),
        ({"model_type": "t5"}, "no causal language model"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map"),
        ({"model_type": "phimoe"}, "phimoe chooses its experts at random"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"attn_implementation": "kernels/evil"}, "attn_implementation"),
        ({"nested": {"_attn_implementation_internal": "evil/kernel"}}, "attn_implementation"),
        ({"n_embd": 33}, "."),
        ({"vocab_size": "many"}, "."),
    ],
)
def test_a_configuration_that_asks_for_more_is_refused(change, why):
    with pytest.raises(OperatorError, match=why) as caught:
        ForeignDecoder(model_of(GPT2 | change))
    assert caught.value.code == "E606"


SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 16,
}  # fmt: skip


@pytest.mark.parametrize("change", [{}, {"sliding_window": None}, {"rope_theta": 5e4}])
@pytest.mark.parametrize("family", [*FAMILIES, "qwen2", "qwen3", "gemma", "olmo2"])
def test_what_a_configuration_leaves_out_is_what_the_library_takes(tmp_path, family, change):
    said = SIZES | {"model_type": family} | change
    (tmp_path / "config.json").write_text(json.dumps(said))
    found = read_config(tmp_path)
    theirs = transformers.AutoConfig.for_model(**said)
    assert (found.vocab_size, found.n_layers) == (theirs.vocab_size, theirs.num_hidden_layers)
    assert found.max_seq_len == theirs.max_position_embeddings
    slides = getattr(theirs, "sliding_window", None)
    assert (found.kind == "hf") == (family not in FAMILIES or bool(slides))
    if found.kind == "hf":
        assert (
            ForeignDecoder(found).lm.config.to_dict()["rope_parameters"] == theirs.rope_parameters
        )
        assert getattr(ForeignDecoder(found).lm.config, "sliding_window", None) == slides
        return
    assert (found.d_model, found.d_ff) == (theirs.hidden_size, theirs.intermediate_size)
    assert found.n_heads == theirs.num_attention_heads
    assert found.n_kv_heads == theirs.num_key_value_heads
    assert found.rope_theta == theirs.rope_parameters["rope_theta"]
    assert theirs.rope_parameters["rope_type"] == "default"
    assert found.norm_eps == theirs.rms_norm_eps
    assert found.tied_embeddings == theirs.tie_word_embeddings
    assert theirs.hidden_act == "silu"
    assert (getattr(theirs, "head_dim", None) or 4) == 4
    if found.experts:
        assert found.experts == theirs.num_local_experts
        assert found.top_k == theirs.num_experts_per_tok
        assert found.expert_balance == pytest.approx(
            theirs.router_aux_loss_coef * found.top_k / found.n_layers
        )


def test_a_llama_with_quantized_weights_is_refused(tmp_path):
    """Those of fp8 have the shapes of whole ones, and scales that would be left behind."""
    config = {"quantization_config": {"quant_method": "compressed-tensors"}, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(QWEN | config))
    with pytest.raises(OperatorError, match="quantization_config") as caught:
        read_config(tmp_path)
    assert caught.value.code == "E606"


@pytest.mark.parametrize(
    "change", [{"hidden_size": "32"}, {"num_attention_heads": "4"}, {"rope_parameters": [1]}]
)
def test_values_of_another_kind_are_refused(tmp_path, change):
    config = QWEN | {"model_type": "llama"} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OperatorError, match="of another kind") as caught:
        read_config(tmp_path)
    assert caught.value.code == "E606"


def test_damaged_folders_are_refused(tmp_path):
    config = model_of(GPT2)
    out = torch.empty(Layout.of_config(config).size)
    tmp_path.joinpath("config.json").write_text(json.dumps(GPT2))
    with pytest.raises(OperatorError, match="there is no"):
        import_hf(config, tmp_path, out)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(OperatorError, match="cannot start"):
        import_hf(config, tmp_path, out)
    save_file({"transformer.wte.weight": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(OperatorError, match="shape"):
        import_hf(config, tmp_path, out)
    for named in ([], None, {"transformer.wte.weight": 3}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
        with pytest.raises(OperatorError, match="does not say which file"):
            import_hf(config, tmp_path, out)
    index = {"weight_map": {"transformer.wte.weight": "../x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(OperatorError, match="outside"):
        import_hf(config, tmp_path, out)
    with pytest.raises(OperatorError, match="cannot start"):
        read_config(tmp_path / "nothing")


def test_the_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(OperatorError, match="transformers is not installed") as caught:
        model_of(GPT2)
    assert (caught.value.code, caught.value.fix) == ("E605", "pip install 'atoll[hf]'")


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


def test_a_family_that_does_more_between_its_layers_has_no_stages(monkeypatch):
    model = build_foreign(model_of(QWEN), 0)
    rotary = model.lm.model.rotary_emb
    monkeypatch.setattr(  # as families do that scale what comes in
        type(rotary), "forward", lambda self, x, position_ids: x.mul_(2)
    )
    with pytest.raises(ValueError, match="--pp: qwen2 does more to hidden states"):
        cut_stage(model, 1, 2)


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
        assert by_muon(inner, name, named[name].ndim) is False
    maps = [one for name, one in named.items() if name.endswith("out_proj.weight")]
    assert maps
    assert all(found[id(one)] == (0.3, optimizer == "muon") for one in maps)


def test_layers_that_are_not_known_by_name_are_refused_by_muon():
    model = build(model_of(XLM), 0)
    make_optimizer(model, Inner())
    with pytest.raises(OperatorError, match="layers are not known by their names") as caught:
        make_optimizer(model, Inner(optimizer="muon"))
    assert caught.value.code == "E606"


def test_a_folder_is_found_by_its_config(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == model_of(QWEN)


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
