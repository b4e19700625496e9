"""What of a folder of weights is refused, since a run would not start from what is in it."""

import pytest
import torch
from hf_kit import OURS, QWEN
from safetensors.torch import load_file, save_file

from node.hf.export import export_hf
from node.hf.import_hf import import_hf
from node.trainer.hf import model_of
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
