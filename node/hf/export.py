"""Export to Hugging Face's format: what a run trained, as a folder that ``transformers`` loads.

The parameters are those of ``LlamaForCausalLM`` under a prefix, so nothing is computed; those of a
mixture of experts become ``MixtralForCausalLM``'s, whose routing is the same, one file entry an
expert. A model of ``transformers`` has the library's own names already. The byte tokenizer becomes
a byte-level BPE with no merges whose token ids are the bytes' values, any other is copied; what
``AutoTokenizer`` asks for stands beside it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from bootstrap.manifest import Model
from node.data.tokenizer import FILE, FileTokenizer
from node.errors import operator_error
from protocols.errors import reason

if TYPE_CHECKING:
    import torch

ONE_FILE = "model.safetensors"
INDEX = f"{ONE_FILE}.index.json"
MAX_SHARD_BYTES = 5e9  # transformers 4 had the same


def export_hf(
    config: Model,
    vector: torch.Tensor,
    folder: Path,
    fragments: int = 1,
    tokenizer: bytes = b"",
    max_shard: float = MAX_SHARD_BYTES,
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
    """Write ``vector`` (fp32 [N] on the CPU, in the order of the flat layout) as a model folder.

    ``tokenizer`` are the bytes of the run's tokenizer.json (empty: bytes), ``beside`` files by name
    that stand in place of ours (those of :func:`node.hf.likeness.files_like`). Weights of more than
    ``max_shard`` bytes are cut in several files with an index, and no more than one file's are in
    memory twice. The folder appears whole or not at all; one that is there already, which may be a
    disk of its own, is filled at the end. Raises OperatorError E602 when it exists and is not
    empty or cannot be written, and ValueError when the vector does not fit the model.
    """
    from node.trainer.layout import Layout

    views = Layout.of_config(config, fragments).views(vector)
    weights = {
        theirs: part
        for name, view in views.items()
        for theirs, part in hf_weights(config, name, view).items()
    }
    if config.kind == "hf":
        from node.trainer.foreign_storage import fixed_buffers

        weights |= fixed_buffers(config)
    with _appearing(folder) as temporary:
        files = _write_weights(temporary, weights, max_shard)
        files |= _descriptions(config, tokenizer)
        for name, content in files.items():
            (temporary / name).write_text(_text(content), encoding="utf-8")
        for name, data in {**({FILE: tokenizer} if tokenizer else {}), **beside}.items():
            (temporary / name).write_bytes(data)
    return folder


def export_weights(weights: Mapping[str, torch.Tensor], folder: Path, max_shard: float) -> Path:
    """Write tensors alone, by these names, as :func:`export_hf` writes a model's."""
    with _appearing(folder) as temporary:
        for name, content in _write_weights(temporary, weights, max_shard).items():
            (temporary / name).write_text(_text(content), encoding="utf-8")
    return folder


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A place to write what then appears whole as ``folder``, or not at all. Raises E602."""
    from safetensors import SafetensorError

    temporary = None
    try:
        check_empty(folder)
        there = folder.is_dir()
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(
            tempfile.mkdtemp(dir=folder if there else folder.parent, prefix=f".{folder.name}.")
        )
        yield temporary
        # safetensors keeps its files from other users; whoever may read the rest may read them
        usual = temporary / ".usual"
        usual.touch()
        for shard in temporary.glob("*.safetensors"):
            shutil.copymode(usual, shard)
        usual.unlink()
        if there:
            for file in sorted(temporary.iterdir()):
                os.rename(file, folder / file.name)
        else:
            temporary.chmod(0o755)
            os.rename(temporary, folder)
    except (OSError, SafetensorError) as error:  # the latter where the disk is full, too
        raise operator_error("E602", f"cannot export to {folder}", why=reason(error)) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)  # gone already if all went well


def check_empty(folder: Path) -> None:
    """Raise E602 where a folder to write exists and is not empty, or cannot be looked into."""
    try:
        names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else {""}
    except OSError as error:
        raise operator_error("E602", f"cannot export to {folder}", why=reason(error)) from error
    if os.path.lexists(folder) and names - {"lost+found"}:  # which each ext4 disk has
        raise operator_error(
            "E602", f"cannot export to {folder}", why="it exists and is not an empty folder"
        )


def _write_weights(
    folder: Path, weights: Mapping[str, torch.Tensor], max_shard: float
) -> dict[str, dict[str, Any]]:
    """One file after the other; the index beside them, by name, where there are several."""
    from safetensors.torch import save_file

    sizes = {name: part.nbytes for name, part in weights.items()}
    shards = split(sizes, max_shard)
    files = dict(zip(shard_names(len(shards)), shards, strict=True))
    for file, names in files.items():
        save_file({name: weights[name] for name in names}, folder / file, metadata={"format": "pt"})
    if len(files) == 1:
        return {}
    where = {name: file for file, names in files.items() for name in names}
    return {INDEX: {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}}


def split(sizes: Mapping[str, int], most: float) -> list[list[str]]:
    """Names in order, in shards of at most so many bytes each, or of a tensor that is larger."""
    shards: list[list[str]] = [[]]
    room = most
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= size
    return shards


def shard_names(count: int) -> list[str]:
    """As Hugging Face calls the files of one model."""
    if count == 1:
        return [ONE_FILE]
    stem, _, suffix = ONE_FILE.partition(".")
    return [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]


MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def hf_weights(config: Model, name: str, view: torch.Tensor) -> dict[str, torch.Tensor]:
    """One of our parameters as the library's files have it: views of ``view`` by name."""
    if config.kind == "hf":
        return {name.removeprefix("lm."): view}
    if name.startswith("lm_head."):
        return {name: view}
    name = f"model.{name}"
    if not config.experts or ".mlp." not in name:
        return {name: view}
    layer, _, inner = name.partition(".mlp.")
    place = f"{layer}.block_sparse_moe."
    if inner == "gate.weight":
        return {place + inner: view}
    matrix = MIXTRAL[inner.removeprefix("experts.")]
    return {f"{place}experts.{i}.{matrix}.weight": view[i] for i in range(config.experts)}


def _descriptions(config: Model, tokenizer: bytes) -> dict[str, dict[str, Any]]:
    """The JSON files beside the weights, by name."""
    files = {"config.json": _llama(config)}
    if config.kind == "hf":
        from node.trainer.hf import described

        files["config.json"] = described(config) | {"dtype": "float32"}
    files["generation_config.json"] = {
        "eos_token_id": config.document_end,
        "do_sample": True,
        "max_length": config.max_seq_len,
    }
    if tokenizer:
        coder = FileTokenizer(tokenizer, document_end=config.document_end)
        end = coder.token(config.document_end)
        files["tokenizer_config.json"] = _tokenizer_config(config, end)
    elif config.vocab_size >= 256:
        files |= _bytes_tokenizer(config)
    return files


def _llama(config: Model) -> dict[str, Any]:
    head_size = config.d_model // config.n_heads
    kind: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
    }
    if config.experts:
        kind = {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": config.experts,
            "num_experts_per_tok": config.top_k,
            # of a mean over layers, in which a token counts once for each of its experts
            "router_aux_loss_coef": config.expert_balance * config.n_layers / config.top_k,
            "sliding_window": None,
        }
    return {
        **kind,
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
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": config.document_end,
        "pad_token_id": None,
        "torch_dtype": "float32",
    }


def _bytes_tokenizer(config: Model) -> dict[str, dict[str, Any]]:
    return {
        FILE: _bytes_file(),
        "tokenizer_config.json": _tokenizer_config(config, byte_names()[0]),
    }


def _bytes_file() -> dict[str, Any]:
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": _BYTE_LEVEL,
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": byte_tokenizer(),
    }


def bytes_file() -> bytes:
    """The tokenizer.json that goes out with a run over bytes."""
    return _text(_bytes_file()).encode()


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _tokenizer_config(config: Model, document_end: str | None) -> dict[str, Any]:
    """The class that takes tokenizer.json as it is: a family's own has rules of its own."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": document_end,
        "model_max_length": config.max_seq_len,
        "clean_up_tokenization_spaces": False,
    }


def byte_tokenizer() -> dict[str, Any]:
    """The model of a tokenizer whose tokens are the bytes."""
    return {
        "type": "BPE",
        "vocab": {name: byte for byte, name in enumerate(byte_names())},
        "merges": [],
    }


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
