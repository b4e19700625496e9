"""Export to Hugging Face's format: what a run trained, as a folder that ``transformers`` loads.

The parameters are those of ``LlamaForCausalLM`` under a prefix, so nothing is computed. The byte
tokenizer becomes a byte-level BPE with no merges whose token ids are the bytes' values.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bootstrap.manifest import Model
from node.errors import operator_error

if TYPE_CHECKING:
    import torch

END_OF_DOCUMENT = 0  # the byte that ends every training document


def export_hf(
    config: Model, vector: torch.Tensor, folder: Path, dtype: torch.dtype | None = None
) -> Path:
    """Write ``vector`` (fp32 [N] on the CPU, in the order of the flat layout) as a model folder.

    ``dtype`` (default fp32) is that of the weights written. The folder appears whole or not at
    all. Raises OperatorError E602 when it exists and is not empty or cannot be written, and
    ValueError when the vector does not fit the model.
    """
    import torch
    from safetensors.torch import save_file

    from node.trainer.layout import Layout

    dtype = dtype or torch.float32
    views = Layout.of_config(config).views(vector)
    weights = {hf_name(name): view.to(dtype) for name, view in views.items()}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise operator_error(
            "E602", f"cannot export to {folder}", why="it exists and is not an empty folder"
        )
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        for name, content in _descriptions(config, str(dtype).removeprefix("torch.")).items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (temporary / name).write_text(text, encoding="utf-8")
        temporary.chmod(0o755)
        os.rename(temporary, folder)
    except OSError as error:
        raise operator_error(
            "E602", f"cannot export to {folder}", why=error.strerror or str(error)
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)  # gone already if all went well
    return folder


def hf_name(name: str) -> str:
    """The name of one of our parameters in ``LlamaForCausalLM``."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def _descriptions(config: Model, dtype: str) -> dict[str, dict[str, Any]]:
    """The JSON files beside the weights, by name."""
    head_size = config.d_model // config.n_heads
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": END_OF_DOCUMENT,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }
    files: dict[str, dict[str, Any]] = {
        "config.json": llama,
        "generation_config.json": {
            "eos_token_id": END_OF_DOCUMENT,
            "do_sample": True,
            "max_length": config.max_seq_len,
        },
    }
    if config.vocab_size >= 256:
        names = byte_names()
        files["tokenizer.json"] = {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": _BYTE_LEVEL,
            "post_processor": None,
            "decoder": _BYTE_LEVEL,
            "model": {
                "type": "BPE",
                "vocab": {name: byte for byte, name in enumerate(names)},
                "merges": [],
            },
        }
        files["tokenizer_config.json"] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": names[END_OF_DOCUMENT],
            "model_max_length": config.max_seq_len,
            "clean_up_tokenization_spaces": False,
        }
    return files


_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def byte_names() -> list[str]:
    """The printable character that byte-level BPE (GPT-2's) writes for each byte.

    Printable bytes of Latin-1 stand for themselves, the others for U+0100 onwards, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
