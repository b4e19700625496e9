"""What of a folder of weights is refused, since a run would not start from what is in it."""

import pytest
import torch
from hf_kit import DEEPSEEK, OURS, QWEN, TOKENS, transformers
from safetensors.torch import load_file, save_file

from node.hf.export import export_hf
from node.hf.import_hf import import_hf, read_config
from node.trainer.hf import build_foreign, kept_buffers, model_of
from node.trainer.layout import Layout, initial_vector
from protocols.errors import OperatorError


def written(folder, plain, **more):
    """A folder of a model, with other weights in it as well."""
    config = OURS if plain is None else model_of(plain)
    vector = initial_vector(config, 0, torch.empty(Layout.of_config(config).size))
    file = export_hf(config, vector, folder) / "model.safetensors"
    weights = load_file(file)
    weights |= {name: change(weights) for name, change in more.items()}
    save_file(weights, file, metadata={"format": "pt"})
    return config, vector


UP = "model.layers.{}.mlp.up_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
both = pytest.mark.parametrize("plain", [None, QWEN], ids=["ours", "theirs"])


@both
@pytest.mark.parametrize(
    ("name", "change"),
    [
        (UP.format(2), lambda weights: weights[UP.format(1)].clone()),  # of a third layer
        ("lm_head.weight", lambda weights: weights["model.embed_tokens.weight"] * 2),  # it is tied
    ],
)
def test_weights_that_the_configuration_has_no_place_for_are_refused(plain, name, change, tmp_path):
    config, vector = written(tmp_path / "in", plain, **{name: change})
    with pytest.raises(OperatorError, match=f"no place for 1 of its weights: {name}") as caught:
        import_hf(config, tmp_path / "in", torch.zeros_like(vector))
    assert caught.value.code == "E606"


@both
def test_what_follows_from_the_configuration_may_stand_beside_the_weights(plain, tmp_path):
    more = {
        "lm_head.weight": lambda weights: weights["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": lambda weights: torch.ones(4),
    }
    config, vector = written(tmp_path / "in", plain, **more)
    assert torch.equal(import_hf(config, tmp_path / "in", torch.zeros_like(vector)), vector)


@both
def test_weights_that_are_not_finite_are_refused(plain, tmp_path):
    def one_is_nan(weights):
        return weights[GATE].clone().index_put_((torch.tensor(1),), torch.tensor(torch.nan))

    config, vector = written(tmp_path / "in", plain, **{GATE: one_is_nan})
    with pytest.raises(OperatorError, match=r"0\.mlp\.gate_proj\.weight .* not finite") as caught:
        import_hf(config, tmp_path / "in", torch.zeros_like(vector))
    assert caught.value.code == "E606"


APERTUS = QWEN | {"model_type": "apertus", "tie_word_embeddings": False}  # numbers of its xIELU
families = pytest.mark.parametrize("plain", [APERTUS, DEEPSEEK], ids=lambda one: one["model_type"])


@families
def test_buffers_go_out_with_the_weights_and_come_back(plain, tmp_path):
    """The library has files with them, and undefined values where they are missing."""
    config, vector = written(tmp_path / "out", plain)
    theirs, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not said["missing_keys"]
    assert dict(kept_buffers(theirs)).keys() <= load_file(tmp_path / "out/model.safetensors").keys()
    ours = build_foreign(config, 9)
    Layout.of_module(ours).load_from(vector, ours)
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(TOKENS).logits, ours(TOKENS))
    assert torch.equal(import_hf(config, tmp_path / "out", torch.zeros_like(vector)), vector)


@families
def test_weights_without_buffers_are_taken(plain, tmp_path):
    """As Atoll wrote them once; a model is built with their values."""
    config, vector = written(tmp_path / "in", plain)
    file = tmp_path / "in/model.safetensors"
    buffers = dict(kept_buffers(build_foreign(config, 0).lm))
    assert buffers
    weights = {name: one for name, one in load_file(file).items() if name not in buffers}
    save_file(weights, file, metadata={"format": "pt"})
    assert torch.equal(import_hf(config, tmp_path / "in", torch.zeros_like(vector)), vector)


@families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_buffers_that_a_file_has_rounded_are_taken(plain, dtype, tmp_path):
    theirs = build_foreign(model_of(plain), 0).lm.to(dtype)
    theirs.save_pretrained(tmp_path / "in")
    config = read_config(tmp_path / "in")
    vector = import_hf(config, tmp_path / "in", torch.zeros(Layout.of_config(config).size))
    assert vector.any()
