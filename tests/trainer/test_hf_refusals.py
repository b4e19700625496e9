"""Models of transformers that are refused: damaged, of another kind, or computed otherwise."""

import json

import pytest
import torch
from hf_kit import DEEPSEEK, EXPERTS, GPT2, OURS, QWEN, QWEN3_MOE
from safetensors.torch import load_file, save_file

from node.hf.export import export_hf
from node.hf.import_hf import import_hf, read_config
from node.trainer.hf import ForeignDecoder, model_of
from node.trainer.layout import Layout, initial_vector
from node.trainer.model import build
from protocols.errors import OperatorError


def test_values_that_training_would_lose_are_refused(tmp_path):
    """DeepSeek's bias of a router is a buffer, moved by hand where it is trained."""
    config = model_of(DEEPSEEK)
    theirs = build(config, 0).lm
    theirs.model.layers[1].mlp.gate.e_score_correction_bias[2] = 0.5
    theirs.save_pretrained(tmp_path / "in")
    with pytest.raises(OperatorError, match="e_score_correction_bias is no parameter") as caught:
        import_hf(config, tmp_path / "in", torch.zeros(Layout.of_config(config).size))
    assert caught.value.code == "E606"


@pytest.mark.parametrize("plain", [None, QWEN3_MOE], ids=["ours", "theirs"])
def test_an_index_that_names_what_its_file_lacks(plain, tmp_path):
    config = OURS if plain is None else model_of(plain)
    vector = initial_vector(config, 0, torch.empty(Layout.of_config(config).size))
    folder = export_hf(config, vector, tmp_path / "out")
    file = folder / "model.safetensors"
    weights = load_file(file)
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model-1.safetensors")}
    del weights["model.norm.weight"]
    save_file(weights, folder / "model-1.safetensors", metadata={"format": "pt"})
    file.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(OperatorError, match=r"the weight model.norm.weight is missing") as caught:
        import_hf(config, folder, torch.zeros_like(vector))
    assert caught.value.code == "E606"


def test_an_adapter_is_no_model(tmp_path):
    config = model_of(GPT2)
    vector = initial_vector(config, 0, torch.empty(Layout.of_config(config).size))
    folder = export_hf(config, vector, tmp_path / "out")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(OperatorError, match="adapter"):
        import_hf(config, folder, vector)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "nonesuch"}, "no causal language model"),
        ({"model_type": "t5"}, "no causal language model"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map"),
        ({"model_type": "phimoe"}, "phimoe chooses its experts at random"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"attn_implementation": "kernels/evil"}, "attn_implementation"),
        ({"nested": {"_attn_implementation_internal": "evil/kernel"}}, "attn_implementation"),
        ({"use_kernels": "evil/kernels"}, "use_kernels"),
        ({"kernel_config": {"RMSNorm": "evil/kernel:RMSNorm"}}, "kernel_config"),
        ({"nested": [{"conv_kernel": [4, "evil/kernel"]}]}, "conv_kernel"),
        ({"n_embd": 33}, "."),
        ({"vocab_size": "many"}, "."),
    ],
)
def test_a_configuration_that_asks_for_more_is_refused(change, why):
    with pytest.raises(OperatorError, match=why) as caught:
        ForeignDecoder(model_of(GPT2 | change))
    assert caught.value.code == "E606"


SMALL = QWEN | {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
CONVOLVES = [
    {"model_type": "mamba", "vocab_size": 300, "hidden_size": 32, "state_size": 4,
     "num_hidden_layers": 2, "conv_kernel": 4},
    EXPERTS | SMALL | {"model_type": "qwen3_next", "linear_conv_kernel_dim": 4,
     "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
     "linear_value_head_dim": 8, "tie_word_embeddings": False},
    EXPERTS | {"model_type": "jamba", "use_mamba_kernels": True, "use_kernels": True,
     "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
     "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
]  # fmt: skip


@pytest.mark.parametrize("plain", CONVOLVES, ids=lambda plain: plain["model_type"])
def test_sizes_of_kernels_are_taken_and_none_is_fetched(plain):
    """As published configurations have them; what would ask for the hub's is off."""
    config = build(model_of(plain), 0).lm.config.to_dict()
    found = {key: value for key, value in config.items() if "kernel" in key}
    assert found == {key: value if value is not True else False
                     for key, value in plain.items() if "kernel" in key}  # fmt: skip


def test_a_llama_with_quantized_weights_is_refused(tmp_path):
    """Those of fp8 have the shapes of whole ones, and scales that would be left behind."""
    config = {"quantization_config": {"quant_method": "compressed-tensors"}, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(QWEN | config))
    with pytest.raises(OperatorError, match="quantization_config") as caught:
        read_config(tmp_path)
    assert caught.value.code == "E606"


@pytest.mark.parametrize(
    "change", [{"hidden_size": "32"}, {"num_attention_heads": "4"}, {"rope_parameters": [1]}]
)
def test_values_of_another_kind_are_refused(tmp_path, change):
    config = QWEN | {"model_type": "llama"} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OperatorError, match="of another kind") as caught:
        read_config(tmp_path)
    assert caught.value.code == "E606"


def test_damaged_folders_are_refused(tmp_path):
    config = model_of(GPT2)
    out = torch.empty(Layout.of_config(config).size)
    tmp_path.joinpath("config.json").write_text(json.dumps(GPT2))
    with pytest.raises(OperatorError, match="there is no"):
        import_hf(config, tmp_path, out)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(OperatorError, match="cannot start"):
        import_hf(config, tmp_path, out)
    save_file({"transformer.wte.weight": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(OperatorError, match="shape"):
        import_hf(config, tmp_path, out)
    for named in ([], None, {"transformer.wte.weight": 3}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
        with pytest.raises(OperatorError, match="does not say which file"):
            import_hf(config, tmp_path, out)
    index = {"weight_map": {"transformer.wte.weight": "../x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(OperatorError, match="outside"):
        import_hf(config, tmp_path, out)
    with pytest.raises(OperatorError, match="cannot start"):
        read_config(tmp_path / "nothing")


def test_the_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(OperatorError, match="transformers is not installed") as caught:
        model_of(GPT2)
    assert caught.value.code == "E605"
    assert caught.value.fix.endswith("-m pip install -e '.[hf]', in the clone of Atoll")
