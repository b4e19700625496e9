"""Models of transformers in which a token would see those behind it."""

import pytest
import torch
from hf_kit import EXPERTS, GPT2, QWEN, QWEN3_MOE, TOKENS

from bootstrap.manifest import Data, Manifest
from node.trainer.computing import Computing
from node.trainer.engine import Engine
from node.trainer.foreign_causal import check_causal
from node.trainer.foreign_storage import build_unstored
from node.trainer.hf import build_foreign, model_of
from node.trainer.parallel import Ranks
from protocols.errors import OperatorError

XLM = {
    "model_type": "xlm", "emb_dim": 32, "n_layers": 2, "n_heads": 2, "n_words": 300,
    "max_position_embeddings": 64,
}  # fmt: skip
CPMANT = {
    "model_type": "cpmant", "vocab_size": 300, "hidden_size": 32, "num_attention_heads": 2,
    "dim_head": 16, "dim_ff": 48, "num_hidden_layers": 2,
}  # fmt: skip
# its experts are chosen across tokens
DOGE = EXPERTS | {
    "model_type": "doge", "is_moe": True, "num_experts": 16, "router_aux_loss_coef": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("plain", [GPT2, QWEN, QWEN3_MOE, XLM], ids=lambda one: one["model_type"])
def test_a_token_sees_none_behind_it(plain: dict[str, object]) -> None:
    """Not even in a family that looks ahead by default."""
    config = model_of(plain)
    model = build_foreign(config, 0)
    check_causal(model, 64)
    unstored = build_unstored(config)
    if unstored is not None:
        check_causal(unstored, 64)
    late = TOKENS.clone()
    late[:, -4:] = (late[:, -4:] + 1) % 300
    with torch.no_grad():
        torch.testing.assert_close(model(late)[:, :-4], model(TOKENS)[:, :-4])


# as those are set that make embeddings of texts
BOTH_WAYS = QWEN | {"model_type": "llama", "is_causal": False}


@pytest.mark.parametrize("plain", [CPMANT, DOGE, BOTH_WAYS], ids=lambda one: one["model_type"])
def test_a_family_that_looks_ahead_is_refused(plain: dict[str, object]) -> None:
    manifest = Manifest(model=model_of(plain), data=Data(seq_len=64))
    with pytest.raises(OperatorError, match="cannot be built") as refused:
        Engine(manifest, Ranks.alone(torch.device("cpu")), Computing())
    assert refused.value.code == "E606"
    assert f"{plain['model_type']} lets tokens see those behind them" in refused.value.why
