"""Import from Hugging Face's format: a run that starts from weights in a folder.

The folder has ``config.json``, weights as safetensors (one file, or several with their index) and
perhaps ``tokenizer.json``. A model like Llama or Mixtral becomes one of ours; any other that
``transformers`` has built in is trained as it is, and read by the library
(:mod:`node.trainer.hf`). Weights are read as safetensors alone: nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from bootstrap.manifest import Model
from bootstrap.validation import explain
from node.data.tokenizer import FILE, ByteTokenizer, Tokenizer, read_tokenizer
from node.errors import operator_error
from node.hf.export import INDEX, ONE_FILE, byte_tokenizer, hf_weights
from protocols.errors import OperatorError, reason

if TYPE_CHECKING:
    import torch

    from node.trainer.layout import Layout

CONFIG = "config.json"
MAX_JSON_BYTES = 64 * 1024 * 1024
# families that become ours, with what transformers takes where config.json does not say
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131_072}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
    "mistral": _MISTRAL | {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "sliding_window": 4096},
    "mixtral": _MISTRAL
    | {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
}
# buffers that older versions of the library wrote, and that follow from config.json
FOLLOWS = re.compile(r"(inv_freq|masked_bias|attn\.bias|attention\.bias|position_ids)$")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # as Hugging Face's hub has them
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# what our decoder cannot do: these have to be off, absent or empty
UNKNOWN_TO_OURS = (
    *("rope_scaling", "attention_bias", "mlp_bias", "sliding_window"),
    "quantization_config",  # such weights have scales beside them, which would be lost
)


def read_config(folder: Path) -> Model:
    """The model's table of a manifest; raises OperatorError E606 and E605."""
    from node.trainer.hf import model_of

    path = folder / CONFIG if os.path.isdir(folder) else folder
    if hub := _hub_name(path):
        raise operator_error(
            "E606",
            f"cannot start from {hub}",
            why=f"there is no such folder here, and nothing is downloaded by itself: {path}",
            fix=f"hf download {hub} --local-dir weights, then --init-from weights (or --hf-config "
            f"weights/{CONFIG}, to train it anew)",
        )
    config = _read_json(path)
    try:
        ours = _as_ours(config)
    except (TypeError, AttributeError) as error:  # a text or a list in the place of a number
        why = f"a value is of another kind than it should be: {error}"
        raise operator_error("E606", f"cannot use this {CONFIG}", why=why) from error
    return ours if ours is not None else model_of(config, **_document_end(config))


def tokenizer_in(folder: Path, eos: int | None = None) -> Tokenizer | None:
    """The tokenizer that the folder says; None where it says none. Raises E604, E605, E606.

    ``eos`` is the token that ends a text, as the folder's config.json says.
    """
    path = folder / FILE
    if not os.path.isfile(path):
        return None
    if _read_json(path).get("model") == byte_tokenizer():
        return ByteTokenizer()
    return read_tokenizer(path, eos=eos)


def import_hf(model: Model, folder: Path, out: torch.Tensor, fragments: int = 1) -> torch.Tensor:
    """Write the folder's weights into ``out`` (fp32 [N], in the order of the flat layout).

    Raises OperatorError E606 where one is missing, has another shape or is not finite, and where
    the folder has more than these: weights that config.json has no place for, and buffers that are
    no parameters, would be lost.
    """
    from diloco.pseudo_gradient import is_finite
    from node.trainer.layout import Layout

    where, layout = _weights(folder), Layout.of_config(model, fragments)
    if model.kind == "hf":
        _import_theirs(model, folder, out, layout)
    else:
        _import_ours(model, folder, where, layout.views(out))
    for name, view in layout.views(out).items():
        if not is_finite(view.view(-1)):
            raise _unfit(folder, f"{name} has values that are not finite (NaN or infinite)")
    return out


def _import_ours(
    model: Model, folder: Path, where: dict[str, Path], views: dict[str, torch.Tensor]
) -> None:
    files: dict[Path, Any] = {}

    def read(name: str) -> torch.Tensor:
        path = where.get(name)
        if path is None:
            raise _unfit(folder, f"the weight {name} is missing")
        if path not in files:
            files[path] = _open(path)
        return _read(files[path], path, name)

    more = set(where)
    for name, view in views.items():
        for wanted, part in hf_weights(model, name, view).items():
            tensor = read(wanted)
            if tensor.shape != part.shape:
                raise _unfit(
                    folder, f"{wanted} has the shape {tuple(tensor.shape)}, not {tuple(part.shape)}"
                )
            part.copy_(tensor)
            more.remove(wanted)
    if model.tied_embeddings and HEAD in more and read(HEAD).equal(read(EMBEDDING)):
        more.remove(HEAD)
    _refuse_more(folder, more)


def _refuse_more(folder: Path, names: Iterable[str]) -> None:
    """Raise E606 for weights that config.json has no place for."""
    if more := sorted(name for name in names if not FOLLOWS.search(name)):
        listed = ", ".join(more[:4])[:300]
        raise _unfit(folder, f"{CONFIG} has no place for {len(more)} of its weights: {listed}")


def _import_theirs(model: Model, folder: Path, out: torch.Tensor, layout: Layout) -> None:
    from node.trainer.hf import PREFIX, pretrained

    try:
        lm, more = pretrained(model, folder)
    except OperatorError as error:
        raise _unfit(folder, error.why) from error
    named = {f"{PREFIX}{name}": parameter for name, parameter in lm.named_parameters()}
    # the library unties what differs, whatever config.json says
    untied = named.keys() - {entry.name for entry in layout.entries}
    _refuse_more(folder, more | {name.removeprefix(PREFIX) for name in untied})
    layout.flatten_into(named, out)


def _as_ours(config: dict[str, Any]) -> Model | None:
    """Our own table for a Llama-like configuration; None where ours would compute otherwise."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        return None
    config = FAMILIES[kind] | config
    heads, size = config.get("num_attention_heads", 0), config.get("hidden_size", 0)
    rope = config.get("rope_parameters") or {}
    if not heads or size % heads:
        return None
    if any(config.get(key) for key in UNKNOWN_TO_OURS) or rope.get("rope_type", "default") != (
        "default"
    ):
        return None
    if (config.get("head_dim") or size // heads) != size // heads:
        return None
    if config.get("hidden_act", "silu") != "silu" or config.get("is_causal") is False:
        return None
    experts: dict[str, Any] = {}
    try:
        if kind == "mixtral":
            experts = {
                "experts": config["num_local_experts"],
                "top_k": config["num_experts_per_tok"],
                "expert_balance": _balance_of(config),
            }
        return Model(
            vocab_size=config["vocab_size"],
            d_model=size,
            n_layers=config["num_hidden_layers"],
            n_heads=heads,
            n_kv_heads=config.get("num_key_value_heads") or heads,
            d_ff=config["intermediate_size"],
            max_seq_len=config["max_position_embeddings"],
            rope_theta=rope.get("rope_theta") or config["rope_theta"],
            norm_eps=config["rms_norm_eps"],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            **_document_end(config),
            **experts,
        )
    except KeyError as error:
        why = f"it does not say what {error} is"
        raise operator_error("E606", f"cannot use this {CONFIG}", why=why) from error
    except ValidationError as error:
        why = "; ".join(explain(error, Model))
        raise operator_error("E606", f"cannot use this {CONFIG}", why=why) from error


def _document_end(config: dict[str, Any]) -> dict[str, int]:
    """The manifest's ``document_end``, where config.json says which token ends a text."""
    end = config.get("eos_token_id")
    if end is None and isinstance(inner := config.get("text_config"), dict):
        end = inner.get("eos_token_id")
    if isinstance(end, list) and end:  # Llama 3: of a text, of a message, of a turn
        end = end[0]
    return {"document_end": end} if type(end) is int and 0 <= end < 2**32 else {}


def _balance_of(config: dict[str, Any]) -> float:
    """The weight of our balance loss, which is 1 in each layer whose experts are used alike.

    The library's is then as large as a token has experts, and a mean over the layers, where ours is
    a sum. It counts also where ``output_router_logits`` is off, as in all that we export: with that
    on, :mod:`transformers` returns more than a text is written with.
    """
    layers = max(1, config["num_hidden_layers"])
    weight = (config["router_aux_loss_coef"] or 0.0) * config["num_experts_per_tok"] / layers
    return float(round(weight, 12))  # what was exported comes back as it was


def _weights(folder: Path) -> dict[str, Path]:
    """Which file has which weight."""
    if os.path.isfile(folder / INDEX):
        named = _read_json(folder / INDEX).get("weight_map", {})
        if not isinstance(named, dict) or not all(isinstance(f, str) for f in named.values()):
            raise _unfit(folder, f"{INDEX} does not say which file has which weight")
        if any(Path(file).name != file for file in named.values()):
            raise _unfit(folder, f"{INDEX} names a file outside of the folder")
        return {name: folder / file for name, file in named.items()}
    if not os.path.isfile(folder / ONE_FILE):
        raise _unfit(folder, f"there is no {ONE_FILE} and no {INDEX}")
    return dict.fromkeys(_open(folder / ONE_FILE).keys(), folder / ONE_FILE)


def _read(file: Any, path: Path, name: str) -> torch.Tensor:
    from safetensors import SafetensorError

    try:
        tensor: torch.Tensor = file.get_tensor(name)
    except SafetensorError as error:
        raise _unfit(path, f"the weight {name} is missing or damaged: {error}") from error
    return tensor


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise _unfit(path, reason(error)) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_JSON_BYTES))
        if not isinstance(found, dict):
            raise ValueError("there is no object in it")
    except OSError as error:
        raise _unfit(path, reason(error)) from error
    except (ValueError, RecursionError) as error:
        raise operator_error(
            "E606",
            f"cannot start from {path}",
            why=f"it is not JSON as transformers writes it: {error}",
            fix=f"give a whole {path.name}, as save_pretrained and `hf download` leave it",
        ) from error
    return found


def _hub_name(path: Path) -> str:
    """``OWNER/NAME``, where nothing lies here that could be meant by it; else empty."""
    try:
        name = path.relative_to(Path.cwd()).as_posix()  # settings have made it absolute
    except (ValueError, OSError):
        return ""
    there = os.path.lexists(path) or os.path.lexists(path.parent)
    return name if HUB_NAME.fullmatch(name) and not there else ""


def _unfit(place: Path, why: str) -> Exception:
    return operator_error("E606", f"cannot start from {place}", why=why)
