"""Which models of transformers may be cut by their plan: found out by trying."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_kit import EXPERTS, QWEN
from ranks_kit import fake_ranks
from torch.distributed.device_mesh import init_device_mesh

from bootstrap.manifest import Data, Manifest
from node.trainer.computing import Computing
from node.trainer.dims import ParallelDims
from node.trainer.engine import Engine
from node.trainer.foreign import check_tp
from node.trainer.foreign_matrices import try_cut
from node.trainer.foreign_storage import build_unstored
from node.trainer.hf import ForeignDecoder, build_foreign, model_of
from node.trainer.parallel import Ranks

QWEN3 = QWEN | {"model_type": "qwen3", "head_dim": 8}  # norms of heads, of which a rank has some
APERTUS = QWEN | {"model_type": "apertus", "tie_word_embeddings": False}
DOGE = EXPERTS | {"model_type": "doge", "is_moe": False}
TAKEN = [QWEN, QWEN3, QWEN3 | {"model_type": "gemma2"}, QWEN | {"model_type": "llama"}]


@pytest.mark.parametrize("plain", TAKEN, ids=lambda plain: plain["model_type"])
def test_what_is_between_matrices_and_has_no_parameters_is_taken(plain: dict[str, Any]) -> None:
    config = model_of(plain)
    check_tp(config, 2)
    model = build_foreign(config, 0)
    before = model(torch.arange(8)[None])
    try_cut(model, 2)
    assert torch.equal(model(torch.arange(8)[None]), before)  # nothing of the trial is left
    unstored = build_unstored(config)
    assert unstored is not None
    try_cut(unstored, 2)


@pytest.mark.parametrize(
    ("plain", "name"),
    [(APERTUS, r"mlp\.act_fn\.alpha_p"), (DOGE, r"self_attn\.A")],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_what_would_drift_apart_is_refused(plain: dict[str, Any], name: str) -> None:
    """Each rank has it whole, and its gradient from a part of hidden states."""
    config = model_of(plain)
    check_tp(config, 2)
    model = build_unstored(config)
    assert model is not None
    with pytest.raises(ValueError, match=rf"^--tp 2: {plain['model_type']} .*{name} is whole on "):
        try_cut(model, 2)


def test_an_island_s_ranks_refuse_it_as_they_build() -> None:
    dims = ParallelDims(tp=2)
    manifest = Manifest(model=model_of(APERTUS), data=Data(seq_len=32))
    with fake_ranks(2):
        axes = dims.axes
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        ranks = Ranks(0, 2, torch.device("cpu"), mesh, dims)
        with pytest.raises(ValueError, match=r"^--tp 2: apertus cannot be cut by its plan"):
            Engine(manifest, ranks, Computing())


def used_elsewhere(model: ForeignDecoder) -> None:
    """As families do that look for the embedding of one token."""
    inner, embedding = model.lm.model, model.lm.model.embed_tokens

    def found(module: Any, args: Any) -> None:
        with torch.no_grad():
            embedding.weight[0].sum()

    inner.norm.register_forward_pre_hook(found)


def asked_for_its_type(model: ForeignDecoder) -> None:
    inner, embedding = model.lm.model, model.lm.model.embed_tokens
    inner.norm.register_forward_pre_hook(
        lambda module, args: (embedding.weight.dtype, embedding.weight.shape, None)[2]
    )


def test_what_is_cut_is_used_by_its_own_module_alone() -> None:
    model = build_foreign(model_of(QWEN), 0)
    asked_for_its_type(model)
    try_cut(model, 2)
    used_elsewhere(model)
    why = "embed_tokens.weight is cut, and used by other modules than its own"
    with pytest.raises(ValueError, match=f"^--tp 2: qwen2 cannot be cut by its plan: .*{why}"):
        try_cut(model, 2)


def test_whatever_a_family_makes_of_a_few_tokens_is_a_refusal() -> None:
    model = build_foreign(model_of(QWEN), 0)
    model.lm.model.norm.register_forward_pre_hook(lambda module, args: 1 // 0)
    with pytest.raises(ValueError, match=r"^--tp 2: qwen2 .*ZeroDivisionError.*lay it out by"):
        try_cut(model, 2)
