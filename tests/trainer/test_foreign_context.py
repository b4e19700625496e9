"""Which models of transformers may share sequences: found out by trying, and refused with words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bootstrap.manifest import Data
from node.trainer.foreign import cut_stage
from node.trainer.foreign_context import check_cp, share_sequences
from node.trainer.hf import build_foreign, model_of

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64,
}  # fmt: skip
DATA = Data(seq_len=32, batch_size=4)
MESH: Any = SimpleNamespace(size=lambda: 2, get_group=lambda: None)


def family(name: str, max_seq_len: int = 64, **more: Any) -> Any:
    return model_of({"model_type": name, **SIZES, **more}, max_seq_len=max_seq_len)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "mixtral", "olmo2"])
def test_attention_alone_mixes_tokens_and_is_replaced(name: str) -> None:
    config = family(name)
    check_cp(config, DATA, 2, "ulysses", 1)
    model, tokens = build_foreign(config, 0), torch.randint(128, (2, 32))
    before = model(tokens)
    share_sequences(model, MESH, "ulysses", 32)
    with pytest.raises(ValueError, match="process group"):  # it asks the others, who are not there
        model(tokens)
    model.lm.set_attn_implementation("sdpa")
    assert torch.equal(model(tokens), before)  # nothing of the trial is left


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_is_tried_by_itself(stage: int) -> None:
    model = build_foreign(family("llama"), 0)
    cut_stage(model, stage, 2)
    share_sequences(model, MESH, "ring", 32)


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LENGTHY: dict[str, dict[str, Any]] = {
    "longrope": {"rope_parameters": LONGROPE | FACTORS},
    "dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 16},
    "by layer type": {
        "model_type": "gemma3_text", "layer_types": ["full_attention", "sliding_attention"],
        "max_position_embeddings": 16, "sliding_window": 64,
        "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": DYNAMIC},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LENGTHY)
def test_frequencies_that_follow_from_the_length_are_those_of_the_whole_sequence(name: str) -> None:
    """Of a rank's own positions the library would take the last for the sequence's."""
    config = family("llama", **LENGTHY[name])
    x, here = torch.zeros(1, 32, 32), torch.arange(32)[None]
    of_layers = ["full_attention"] if name == "by layer type" else []
    whole = build_foreign(config, 0).lm.model.rotary_emb(x, here, *of_layers)
    model = build_foreign(config, 0)
    share_sequences(model, MESH, "ring", 32)
    for part in (slice(0, 8), slice(8, 24), slice(24, 32), slice(0, 8)):
        made = model.lm.model.rotary_emb(x[:, part], here[:, part], *of_layers)
        for ours, theirs in zip(made, whole, strict=True):
            assert torch.equal(ours, theirs[:, part])


@pytest.mark.parametrize("counted", ["the last position", "from zero"])
def test_a_family_that_makes_something_of_a_rank_s_own_length_is_refused(
    counted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_foreign(family("llama"), 0)
    rotary = type(model.lm.model.rotary_emb)
    tables = rotary.forward

    def changed(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        if counted == "from zero":
            return tables(self, x, torch.arange(x.shape[1])[None])
        return tables(self, x, position_ids * (2 if position_ids.max() >= 1000 else 1))

    monkeypatch.setattr(rotary, "forward", changed)
    with pytest.raises(ValueError, match=r"^--cp 2: llama .*not its attention alone"):
        share_sequences(model, MESH, "ulysses", 2048)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "mistral", **SIZES, "sliding_window": 8}, "not plainly causal"),
        ({"model_type": "gemma2", **SIZES, "sliding_window": 64}, "attention knows of softcap"),
        (  # what its scores have beside those of tokens is a tensor
            {"model_type": "gpt_oss", **SIZES, "num_local_experts": 4, "sliding_window": 64},
            "attention knows of s_aux",
        ),
        ({"model_type": "doge", **SIZES}, "TypeError: .*lay it out by --dp-shard"),  # its mask
        (  # a convolution over tokens
            {"model_type": "lfm2", **SIZES, "layer_types": ["conv", "full_attention"]},
            "attention",
        ),
        (  # distances are added to the scores
            {"model_type": "bloom", "vocab_size": 128, "hidden_size": 32, "n_layer": 2,
             "n_head": 4},
            "attention",
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_else_looks_at_other_tokens_is_refused(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"^--cp 2: {config['model_type']} .*{why}"):
        share_sequences(build_foreign(model_of(config), 0), MESH, "ulysses", 32)


@pytest.mark.parametrize(
    ("more", "arguments", "why"),
    [
        ({}, (DATA, 4, "ulysses", 1), "--cp 4 .* num_key_value_heads 2; use --attention ring"),
        ({}, (DATA, 2, "ulysses", 2), "--cp 2 .* num_key_value_heads 1; use --attention ring"),
        ({}, (DATA, 3, "ring", 1), "--cp 3 does not divide seq_len 32 into 6 equal parts"),
        ({"sliding_window": 31}, (DATA, 2, "ring", 1), "--cp 2: mistral .*.a window of 31 tokens"),
    ],
)
def test_numbers_that_do_not_fit(more: Any, arguments: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_cp(family("mistral", **{"sliding_window": None} | more), *arguments)
    check_cp(family("mistral", sliding_window=32), DATA, 2, "ulysses", 1)
