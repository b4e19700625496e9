"""Configurations of small models of transformers, and one of ours."""

import pytest

from bootstrap.manifest import Model

transformers = pytest.importorskip("transformers")

GPT2 = {
    "model_type": "gpt2", "vocab_size": 300, "n_positions": 64, "n_embd": 32, "n_layer": 2,
    "n_head": 2,
}  # fmt: skip
QWEN = {
    "model_type": "qwen2", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
MIXTRAL = QWEN | {"model_type": "mixtral", "tie_word_embeddings": False}
OURS = Model(
    vocab_size=300, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, max_seq_len=64
)
