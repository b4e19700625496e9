"""Configurations of small models of transformers, and one of ours."""

import pytest
import torch

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
TOKENS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
EXPERTS = MIXTRAL | {
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
QWEN3_MOE = EXPERTS | {"model_type": "qwen3_moe", "head_dim": 8}
DEEPSEEK = EXPERTS | {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip
MAMBA2 = {
    "model_type": "mamba2", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2,
    "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8,
}  # fmt: skip
FALCON_H1 = QWEN | {
    "model_type": "falcon_h1", "head_dim": 8, "mamba_d_ssm": 64, "mamba_n_heads": 8,
    "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8,
}  # fmt: skip
NEMOTRON_H = QWEN | {
    "model_type": "nemotron_h", "head_dim": 8, "layers_block_type": ["mamba", "attention"],
    "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8,
    "chunk_size": 8, "tie_word_embeddings": False,
}  # fmt: skip
ENDLESS = (MAMBA2, FALCON_H1, NEMOTRON_H)  # the library bounds their time steps by infinity
