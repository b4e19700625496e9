"""Infinite numbers in a config.json, which JSON does not have."""

import json
import math

import pytest
import torch
from hf_kit import ENDLESS, GPT2, MAMBA2, TOKENS, transformers

from bootstrap.manifest import Data, Manifest
from node.hf.export import export_hf
from node.hf.import_hf import import_hf, read_config
from node.trainer.hf import build_foreign, described, model_of
from node.trainer.json_floats import read, tagged
from node.trainer.layout import Layout
from node.trainer.model import build
from protocols.errors import OperatorError

INFINITE = {"__float__": "Infinity"}


def proper(text):
    """What it holds; fails where only Python reads it."""
    return json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize("plain", ENDLESS, ids=lambda plain: plain["model_type"])
def test_a_model_as_the_library_saves_it_comes_in_and_goes_out(plain, tmp_path):
    theirs = build(model_of(plain), 0).lm.eval()
    theirs.save_pretrained(tmp_path / "in")
    model = read_config(tmp_path / "in")
    assert list(json.loads(model.config)["time_step_limit"]) == [0.0, INFINITE]
    vector = import_hf(model, tmp_path / "in", torch.zeros(Layout.of_config(model).size))
    ours = build(model, 1)
    Layout.of_module(ours).load_from(vector, ours)
    folder = export_hf(model, vector, tmp_path / "out")
    assert proper((folder / "config.json").read_text())["time_step_limit"] == [0.0, INFINITE]
    again = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert list(again.config.time_step_limit) == [0.0, math.inf]
    with torch.no_grad():
        logits = theirs(TOKENS).logits
        assert torch.equal(ours(TOKENS), logits)
        assert torch.equal(again(TOKENS).logits, logits)


@pytest.mark.parametrize("written", ['{"__float__": "Infinity"}', "Infinity", "1e999"])
def test_a_manifest_and_an_export_are_json_however_it_is_written(written, tmp_path):
    """As release 5 of the library does it, or those before it, or in figures."""
    text = json.dumps(MAMBA2 | {"time_step_limit": [0.0, "HERE"]}).replace('"HERE"', written)
    (tmp_path / "config.json").write_text(text)
    model = read_config(tmp_path)
    assert proper(model.config)["time_step_limit"] == [0.0, INFINITE]
    assert list(build_foreign(model, 0).lm.config.time_step_limit) == [0.0, math.inf]
    manifest = Manifest(model=model, data=Data(seq_len=64))
    assert Manifest.parse(manifest.canonical()) == manifest
    by_hand = model.model_copy(update={"config": text})  # in a manifest of before
    assert list(build_foreign(by_hand, 0).lm.config.time_step_limit) == [0.0, math.inf]
    for one in (model, by_hand):
        assert described(one)["time_step_limit"] == [0.0, INFINITE]


def test_only_what_the_library_writes_is_a_number():
    tags = {"a": [{"b": INFINITE}, {"__float__": "-Infinity"}], "c": {"__float__": "NaN"}}
    found = read(json.dumps(tags))
    assert found["a"] == [{"b": math.inf}, -math.inf]
    assert math.isnan(found["c"])
    assert proper(json.dumps(tagged(found))) == tags
    for other in (
        {"__float__": "1.5"},
        {"__float__": "Infinity", "more": 1},
        {"__float__": 1.5},
        {"__float__": None},
        {"__float__": ["Infinity"]},
    ):
        assert read(json.dumps({"x": other})) == {"x": other}
        assert tagged({"x": other}) == {"x": other}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"auto_map": INFINITE}, "auto_map"),
        ({"conv_kernel": {"__float__": "evil/kernel"}}, "conv_kernel"),
        ({"n_embd": INFINITE}, "."),
        ({"vocab_size": INFINITE}, "."),
        ({"vocab_size": math.inf}, "."),
        ({"n_layer": {"__float__": "NaN"}}, "."),
        ({"n_positions": INFINITE}, "."),
    ],
)
def test_what_is_refused_is_refused_in_that_form_too(change, why):
    with pytest.raises(OperatorError, match=why) as caught:
        build_foreign(model_of(GPT2 | change), 0)
    assert caught.value.code == "E606"


def test_a_number_is_no_configuration():
    with pytest.raises(OperatorError, match="no JSON object") as caught:
        model_of(INFINITE)
    assert caught.value.code == "E606"
