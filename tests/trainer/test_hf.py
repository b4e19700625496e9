"""Models of transformers: built by configuration, in and out."""

import json
from pathlib import Path

import pytest
import torch
from hf_kit import DEEPSEEK, EXPERTS, GPT2, MIXTRAL, OURS, QWEN, QWEN3_MOE, TOKENS, transformers

from bootstrap.manifest import Data, Manifest
from node.data.supply import with_weights
from node.hf.export import export_hf
from node.hf.import_hf import FAMILIES, import_hf, read_config, tokenizer_in
from node.trainer.hf import ForeignDecoder, build_foreign, model_of
from node.trainer.layout import Layout, initial_vector
from node.trainer.model import build
from node.trainer.model_moe import balance_loss
from protocols.errors import OperatorError

families = pytest.mark.parametrize("plain", [GPT2, QWEN], ids=["gpt2", "qwen2"])


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


TEXT = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
NOISY = [
    {"model_type": "emu3", "text_config": TEXT},  # by default
    {"model_type": "qwen3_5", "text_config": TEXT | {
        "attention_dropout": 0.5, "layer_types": ["full_attention"] * 2}},
    {"model_type": "cpmant", "vocab_size": 300, "hidden_size": 32, "num_attention_heads": 2,
     "dim_head": 16, "dim_ff": 48, "num_hidden_layers": 2, "dropout_p": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("plain", NOISY, ids=lambda plain: plain["model_type"])
def test_dropout_is_off_wherever_a_configuration_has_it(plain):
    """Or layers that are computed again in the backward pass would drop others."""
    model = build_foreign(model_of(plain), 0)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    ("plain", "why"),
    [
        ({"model_type": "xlnet"}, "max_seq_len"),
        ({"model_type": "musicgen"}, "text configs"),
        (QWEN | {"vocab_size": 2_000_000}, "vocab_size"),
        (QWEN | {"max_position_embeddings": 4}, "max_seq_len"),
    ],
)
def test_a_configuration_that_fits_no_run_is_refused(plain, why):
    with pytest.raises(OperatorError, match="cannot be built") as refused:
        model_of(plain)
    assert refused.value.code == "E606"
    assert why in refused.value.why


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


BERT = {key: value for key, value in QWEN.items() if key != "num_key_value_heads"} | {
    "model_type": "bert",
}  # fmt: skip
XLM = {
    "model_type": "xlm", "emb_dim": 32, "n_layers": 2, "n_heads": 2, "n_words": 300,
    "max_position_embeddings": 64, "pad_index": 1,
}  # fmt: skip


@pytest.mark.parametrize("plain", [BERT, XLM], ids=lambda plain: plain["model_type"])
def test_what_was_trained_not_to_look_ahead_does_not_where_it_is_loaded(plain, tmp_path):
    config = model_of(plain)
    vector = initial_vector(config, 0, torch.empty(Layout.of_config(config).size))
    folder = export_hf(config, vector, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = TOKENS.clone()
    tokens[tokens == 1] = 2  # XLM's padding
    late = tokens.clone()
    late[:, -8:] = 7
    with torch.no_grad():
        logits = theirs(tokens, use_cache=False).logits
        torch.testing.assert_close(logits, build_of(config, vector)(tokens))
        torch.testing.assert_close(theirs(late, use_cache=False).logits[:, :-8], logits[:, :-8])
    again = read_config(folder)
    assert torch.equal(import_hf(again, folder, torch.zeros_like(vector)), vector)


def build_of(config, vector):
    """A model with these values."""
    model = build(config, 9)
    Layout.of_module(model).load_from(vector, model)
    return model


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
        {"is_causal": False},
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


def test_a_folder_is_found_by_its_config(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == model_of(QWEN)
