"""What has two dims and more and is no matrix: Muon leaves it to AdamW."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_kit import EXPERTS, QWEN
from test_resume import STANDING

from bootstrap.manifest import Inner
from node.trainer import optim
from node.trainer.hf import model_of
from node.trainer.layout import Layout, layer_of
from node.trainer.model import build
from node.trainer.moments import FIRST, SECOND, MomentLayout
from node.trainer.muon import orthogonalised
from node.trainer.optim import by_muon, is_matrix, make_optimizer
from node.trainer.parallel import Ranks
from node.trainer.resume import load, save
from node.trainer.trainer_state import FOLDER, STATE
from node.trainer.weights import Weights

MUON = Inner(optimizer="muon", weight_decay=0.3)
STATES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "tie_word_embeddings": False,
}  # fmt: skip
ROWS = (  # a family, and what of it is in rows
    (STATES | {"model_type": "mamba", "state_size": 4}, {"mixer.conv1d.weight"}),
    (QWEN | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
     {"conv.conv.weight"}),
    (EXPERTS | LINEAR | {"model_type": "qwen3_next"},
     {"linear_attn.conv1d.weight", "mlp.shared_expert_gate.weight"}),
    (STATES | {"model_type": "rwkv", "attention_hidden_size": 32, "context_length": 64},
     {"attention.time_mix_key", "attention.time_mix_value", "attention.time_mix_receptance",
      "feed_forward.time_mix_key", "feed_forward.time_mix_receptance"}),
)  # fmt: skip
rows = pytest.mark.parametrize(("plain", "expected"), ROWS, ids=[p["model_type"] for p, _ in ROWS])


def in_layer(name: str) -> str:
    """What a parameter is called within its layer."""
    return name.split(f".{layer_of(name)}.", 1)[1]


@rows
def test_filters_of_channels_and_mixing_vectors_are_adamws(plain, expected):
    """They decay as before; and a newcomer's moments are laid out alike."""
    model = build(model_of(plain), 0)
    groups = make_optimizer(model, MUON).param_groups
    found = {id(p): (g["weight_decay"], g["muon"]) for g in groups for p in g["params"]}
    named = dict(model.named_parameters())
    seconds = {p.entry.name for p in MomentLayout.of(Layout.of_module(model), MUON).ranges
               if p.moment == SECOND}  # fmt: skip
    apart = set()
    for name, parameter in named.items():
        matrix = layer_of(name) is not None and is_matrix(name, parameter.ndim)
        decay, muon = found[id(parameter)]
        assert (decay > 0) == is_matrix(name, parameter.ndim)
        assert muon == (name not in seconds)
        if matrix and not muon:
            apart.add(in_layer(name))
    assert apart == expected
    assert any(muon for _, muon in found.values())


def test_stacked_experts_are_matrices_each():
    name = "layers.0.mlp.experts.gate_up_proj"
    assert by_muon(MUON, name, (4, 8, 16))
    assert by_muon(MUON, name, (1, 8, 16))
    assert not by_muon(MUON, name, (8, 1, 4))
    assert not by_muon(MUON, name, (8, 4, 1))
    assert not by_muon(MUON, name, (1, 8))


def test_made_orthogonal_all_rows_would_get_one_step():
    """Why: a channel whose gradient is next to nothing would move as far as all others."""
    gradient = torch.ones(4, 1, 3) * torch.tensor([1e-6, 1e-3, 1.0, 1e3])[:, None, None]
    lengths = orthogonalised(gradient).flatten(1).norm(dim=1)
    assert lengths.max() < 1.3 * lengths.min()


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("one_disk", [True, False])
def test_a_checkpoint_with_rows_by_muon_gives_all_moments_but_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_disk: bool, said: bool
):
    """As earlier versions made them: with a first moment alone, which AdamW cannot go on from."""
    plain, expected = ROWS[0]

    def one():
        model = build(model_of(plain), 0)
        named = dict(model.named_parameters())
        weights = Weights.of(named, Layout.of_module(model), Ranks.alone(torch.device("cpu")))
        return named, weights, make_optimizer(model, MUON)

    def step(named, optimizer):
        for parameter in named.values():
            parameter.grad = torch.full_like(parameter, 0.01)
        optimizer.step()

    with monkeypatch.context() as before:
        before.setattr(
            optim,
            "by_muon",
            lambda inner, name, shape: is_matrix(name, len(shape)) and layer_of(name) is not None,
        )
        old, weights, optimizer = one()
    for _ in range(STANDING.optimizer_steps):
        step(old, optimizer)
    kept = {name: {k: v.clone() for k, v in optimizer.state[p].items()} for name, p in old.items()}
    save(tmp_path, weights, optimizer, STANDING, one_disk=one_disk).finish()
    if not said:  # which optimizer each was trained by
        (tmp_path / FOLDER / STATE).write_text(STANDING.model_dump_json())

    new, weights, optimizer = one()
    _, told = load(tmp_path, weights, optimizer, one_disk=one_disk)
    assert told == "2 parameters were trained by Muon muon, now by Muon"
    for name, parameter in new.items():
        assert torch.equal(parameter, old[name])
        state = optimizer.state.get(parameter, {})
        if layer_of(name) is not None and in_layer(name) in expected:
            assert FIRST in kept[name]
            assert not state
        else:
            assert state.keys() == kept[name].keys()
            assert all(torch.equal(state[key], kept[name][key]) for key in state)
    step(new, optimizer)
    steps = {in_layer(name) in expected if layer_of(name) is not None else False:
             float(optimizer.state[p]["step"]) for name, p in new.items()}  # fmt: skip
    assert steps == {True: 1.0, False: 6.0}
