"""Models of transformers without storage: the same buffers, and values where they are tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hf_kit import GPT2, MIXTRAL, QWEN
from torch import nn

from bootstrap.manifest import Data, Manifest
from node.trainer.engine import Engine
from node.trainer.foreign_balance import balance_of
from node.trainer.foreign_context import share_sequences
from node.trainer.foreign_documents import check_documents
from node.trainer.foreign_experts import try_experts
from node.trainer.foreign_storage import build_unstored, give_storage, lent
from node.trainer.hf import ForeignDecoder, build_foreign, model_of
from protocols.errors import OperatorError

YARN = QWEN | {
    "model_type": "llama",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 32,
    },
}
GPTJ = GPT2 | {"model_type": "gptj", "rotary_dim": 8}
LFM2 = QWEN | {  # its convolutions look at a few tokens, weakly
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
}
MESH = cast(Any, SimpleNamespace(size=lambda: 2))
TOKENS = torch.arange(12)[None]


def unstored(plain: dict[str, Any], **others: Any) -> ForeignDecoder:
    model = build_unstored(model_of(plain, **others))
    assert model is not None
    return model


@pytest.mark.parametrize(
    "plain", [GPT2, GPTJ, QWEN, MIXTRAL, YARN], ids=lambda plain: plain["model_type"]
)
def test_given_the_parameters_it_computes_what_one_built_on_the_cpu_does(plain):
    whole, model = build_foreign(model_of(plain), 0), unstored(plain)
    assert all(parameter.is_meta for parameter in model.parameters())
    buffers = dict(model.named_buffers())
    assert buffers.keys() == dict(whole.named_buffers()).keys()
    for name, buffer in whole.named_buffers():
        assert torch.equal(buffers[name], buffer)
    give_storage(model, torch.device("cpu"))
    given = dict(model.named_parameters())
    assert given.keys() == dict(whole.named_parameters()).keys()  # what is tied is there once
    assert model.tied == whole.tied
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            given[name].copy_(parameter)
        assert torch.equal(model(TOKENS), whole(TOKENS))


def test_a_rank_of_several_has_no_whole_model(capsys):
    manifest = Manifest(model=model_of(QWEN), data=Data(seq_len=64))
    alone, one_of_two = (cast(Any, SimpleNamespace(ranks=SimpleNamespace(size=n))) for n in (1, 2))
    assert all(
        parameter.is_meta for parameter in Engine._foreign(one_of_two, manifest).parameters()
    )
    assert not any(parameter.is_meta for parameter in Engine._foreign(alone, manifest).parameters())
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "made",
    [lambda linear: linear.weight.sum(), lambda linear: torch.randn(3)],
    ids=["of parameters", "at random"],
)
def test_buffers_that_are_made_of_values_take_the_whole_model(made, monkeypatch, capsys):
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    before = Qwen2MLP.__init__

    def init(self: nn.Module, *args: Any, **given: Any) -> None:
        before(self, *args, **given)
        self.register_buffer("made", made(self.gate_proj).detach(), persistent=False)

    monkeypatch.setattr(Qwen2MLP, "__init__", init)
    assert build_unstored(model_of(QWEN)) is None
    several = cast(Any, SimpleNamespace(ranks=SimpleNamespace(size=2)))
    model = Engine._foreign(several, Manifest(model=model_of(QWEN), data=Data(seq_len=64)))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert "qwen2 has buffers that are made of its values" in capsys.readouterr().err


def test_layers_share_the_values_that_are_lent():
    model = unstored(QWEN)
    before = list(model.parameters())
    with lent(model):
        values = list(model.parameters())
        assert not any(value.is_meta for value in values)
        one, two = (dict(block.named_parameters()) for block in model.blocks)
        assert all(one[name] is two[name] for name in one)
        assert one["self_attn.k_proj.weight"] is not one["self_attn.v_proj.weight"]
        assert model.lm.lm_head.weight is model.lm.model.embed_tokens.weight  # they are tied
        first = model(TOKENS).detach()
        assert first.isfinite().all()
        assert first.std() > 0
    assert all(one is two for one, two in zip(model.parameters(), before, strict=True))
    with lent(model):
        assert torch.equal(model(TOKENS), first)  # on all ranks


def test_what_is_tried_with_a_few_tokens_is_tried_without_storage_too(monkeypatch):
    assert balance_of(unstored(MIXTRAL)) == balance_of(build_foreign(model_of(MIXTRAL), 0))
    apart = {"attention": "document", "document_end": 1}
    check_documents(unstored(QWEN, **apart), 32)
    try_experts(unstored(MIXTRAL), 2)
    with pytest.raises(ValueError, match=r"^--cp 2: lfm2 "):
        share_sequences(unstored(LFM2), MESH, "ulysses", 32)
    monkeypatch.setattr("node.trainer.hf._added", lambda mask: torch.zeros(mask.shape))
    with pytest.raises(OperatorError, match="with one document it computes something else"):
        check_documents(unstored(GPTJ, **apart), 64)
