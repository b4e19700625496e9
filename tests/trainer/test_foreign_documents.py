"""Packed documents kept apart in models of transformers, whatever mask a family wants."""

import pytest
import torch
from hf_kit import GPT2, QWEN

from bootstrap.manifest import Data, Manifest
from node.trainer.computing import Computing
from node.trainer.engine import Engine
from node.trainer.foreign_documents import check_documents
from node.trainer.hf import build_foreign, model_of
from node.trainer.parallel import Ranks
from protocols.errors import OperatorError

GPTJ = {"model_type": "gptj", "rotary_dim": 8} | {
    key: value for key, value in GPT2.items() if key != "model_type"
}
MPT = {
    "model_type": "mpt", "vocab_size": 300, "d_model": 32, "n_layers": 2, "n_heads": 2,
    "max_seq_len": 64,
}  # fmt: skip
GEMMA2 = QWEN | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 64}
GPT_OSS = QWEN | {
    "model_type": "gpt_oss", "head_dim": 8, "sliding_window": 64, "num_local_experts": 4,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
LFM2 = QWEN | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
LLAMA4 = QWEN | {
    "model_type": "llama4_text", "head_dim": 8, "intermediate_size_mlp": 48,
    "num_local_experts": 2, "attention_chunk_size": 16, "layer_types": ["chunked_attention"] * 2,
}  # fmt: skip
BLOOM = {"model_type": "bloom", "vocab_size": 300, "hidden_size": 32, "n_layer": 2, "n_head": 2}
OPT = QWEN | {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32}


def name(plain):
    return plain["model_type"]


@pytest.mark.parametrize(
    "plain",
    [GEMMA2, GPT_OSS, GPTJ, GPTJ | {"model_type": "codegen", "n_head": 4}, MPT, QWEN],
    ids=name,
)
def test_a_token_sees_its_own_document_up_to_itself(plain):
    config = model_of(plain, attention="document", document_end=5)
    model = build_foreign(config, 0)
    check_documents(model, 64)
    model.config = config.model_copy(update={"attention": "causal"})
    tokens = torch.randint(6, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    tokens[:, 9] = 5
    with torch.no_grad():
        first, whole = model(tokens[:, :10]), model(tokens)
        model.config = config
        packed, ahead, behind = model(tokens), tokens.clone(), tokens.clone()
        ahead[:, 20:], behind[:, :9] = 7, 8
        ahead, behind = model(ahead), model(behind)
    torch.testing.assert_close(packed[:, :10], first, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed[:, :20], ahead[:, :20], rtol=0, atol=1e-6)
    torch.testing.assert_close(packed[:, 10:], behind[:, 10:], rtol=0, atol=1e-6)
    assert not torch.allclose(packed[:, 10:], whole[:, 10:], atol=1e-5)


@pytest.mark.parametrize("kind", ["mistral", "phi3", "starcoder2", "gemma3_text", "cohere2"])
def test_a_window_shorter_than_the_sequence_is_refused(kind):
    plain = QWEN | {"model_type": kind, "head_dim": 8, "sliding_window": 48, "pad_token_id": 0}
    model = build_foreign(model_of(plain, attention="document"), 0)
    with pytest.raises(OperatorError, match=f"{kind} cannot .* a layer sees 48 tokens") as caught:
        check_documents(model, 64)
    assert caught.value.code == "E606"
    check_documents(model, 48)


@pytest.mark.parametrize(
    ("plain", "why"),
    [
        (BLOOM, "takes no mask of them .ValueError"),
        (OPT, "takes no mask of them .ValueError"),
        (LFM2, "tokens would see those of the document before theirs"),
        (LLAMA4, "a layer sees 16 tokens"),
    ],
    ids=["bloom", "opt", "lfm2", "llama4_text"],
)
def test_a_family_that_cannot_is_refused(plain, why):
    model = build_foreign(model_of(plain, attention="document"), 0)
    with pytest.raises(OperatorError, match=why) as caught:
        check_documents(model, 64)
    assert caught.value.code == "E606"
    assert model.config.attention == "document"


def test_a_mask_that_hides_nothing_is_found(monkeypatch):
    monkeypatch.setattr("node.trainer.hf._added", lambda mask: torch.zeros(mask.shape))
    model = build_foreign(model_of(GPTJ, attention="document"), 0)
    with pytest.raises(OperatorError, match="with one document it computes something else"):
        check_documents(model, 64)


def test_a_trainer_refuses_it_before_it_trains():
    plain = QWEN | {"model_type": "mistral", "sliding_window": 16}
    run = Manifest(model=model_of(plain, attention="document"), data=Data(seq_len=32, batch_size=2))
    with pytest.raises(OperatorError, match="mistral cannot keep documents apart"):
        Engine(run, Ranks.alone(torch.device("cpu")), Computing())
