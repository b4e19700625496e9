"""Models of transformers over ranks that share a sequence (:mod:`node.trainer.context`).

The library asks for attention by name, so one name is registered that asks the other ranks. That is
all that may look at other tokens, and it must be plain causal attention: both are tried with a few
tokens before a model is taken, since no plan of the library says so. Rotary frequencies may follow
from a sequence's last position, which most ranks do not have: it is told to all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bootstrap.manifest import Data, Model
from node.trainer.context import attention_over
from node.trainer.dims import Attention
from node.trainer.foreign_storage import lent
from node.trainer.hf import ForeignDecoder, family
from node.trainer.model import Attend, causal_attention
from protocols.errors import kind_and_reason

NAME = "atoll"  # of the attention, in the library's register
PROBED = 32  # tokens, at most
CLOSE = 1e-4  # of the largest element: what another order of additions may change
FULL = ("full_attention", "sliding_attention")  # of a layer, by the configuration
# arguments of the library that change nothing, or that are checked in the configuration
IDLE = ("position_ids", "cache_position", "return_dict", "is_causal", "sliding_window")
OFF = (None, False, 0.0)


def check_cp(config: Model, data: Data, size: int, kind: Attention, tp: int) -> None:
    """Raises ValueError that names the flag where numbers do not fit."""
    with torch.device("meta"):
        text = ForeignDecoder(config).lm.config.get_text_config()
    shares = size * (2 if kind == "ring" else 1)
    if data.seq_len % shares:
        raise ValueError(
            f"--cp {size} does not divide seq_len {data.seq_len} into {shares} equal parts"
        )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if kind == "ulysses" and heads % (tp * size):
        raise ValueError(
            f"--cp {size} with --attention ulysses does not divide num_key_value_heads "
            f"{heads // tp}; use --attention ring"
        )
    window = short_window(text, data.seq_len)
    others = set(getattr(text, "layer_types", None) or ()) - set(FULL)
    if others or window is not None:
        how = ", ".join(sorted(others)) or f"a window of {window} tokens"
        raise _refused(config, size, f"not every layer sees all tokens before its own ({how})")


def share_sequences(model: ForeignDecoder, mesh: DeviceMesh, kind: Attention, seq_len: int) -> None:
    """Let a model of the CPU, whole or a stage, attend across a mesh of one axis, in place.

    Raises ValueError where more or other things than causal attention mix its tokens.
    """
    try:
        why = _problem(model, seq_len)
    except Exception as error:  # whatever a family makes of an attention that is not its own
        why = kind_and_reason(error, 300)
        raise _refused(model.config, mesh.size(), why) from error
    if why:
        raise _refused(model.config, mesh.size(), why)
    if kind == "ring":
        model.mask_of = _numbers
    attend = attention_over(mesh, kind)
    _use(model, lambda q, k, v, mask: attend(q, k, v, mask if kind == "ulysses" else _of(mask)))


def _problem(model: ForeignDecoder, seq_len: int) -> str:
    """Why a model cannot share sequences; empty if it can."""
    length = min(seq_len, PROBED)
    half, seen = length // 2, dict[str, Any]()
    generator = torch.Generator().manual_seed(0)
    if model.first:
        x = torch.randint(model.config.vocab_size, (1, length), generator=generator)
    else:
        x = torch.randn(1, length, model.width, generator=generator)
    here, one = torch.arange(length), torch.zeros(1, length, dtype=torch.int64)  # document
    spread = here * (seq_len - 1) // max(1, length - 1)  # to the last position of all
    before = model.lm.config._attn_implementation
    with lent(model), torch.no_grad():
        library = model(x, documents=one)
        _use(model, causal_attention, seen)
        ours = model(x, here, one)
        if seen:
            return f"its attention knows of {', '.join(sorted(seen))}"
        if not close(ours, library):
            return "its attention is not plainly causal"
        _tell_length(model, seq_len)
        _use(model, _itself)
        # the first part first, as a rank that has it knows of no other
        early, late = (model(x[:, i], spread[i], one[:, i]) for i in (here < half, here >= half))
        whole = model(x, spread, one)
    model.lm.set_attn_implementation(before)
    if not (close(early, whole[:, :half]) and close(late, whole[:, half:])):
        return "not its attention alone looks at other tokens"
    return ""


def _itself(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """In the place of attention: of each token, what it would be seen by and see with."""
    seen = (k + v).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return q + seen


def _tell_length(model: ForeignDecoder, seq_len: int) -> None:
    """Have rotary tables that depend on a sequence's length made as for the whole one, in place."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)  # one, or one for each type of layers
        found = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any(kind == "longrope" or "dynamic" in str(kind) for kind in found):
            module.forward = partial(_as_of, module.forward, seq_len - 1)


def _as_of(
    forward: Callable[..., Any],
    last: int,
    x: Tensor,
    position_ids: Tensor,
    *more: Any,
    **given: Any,
) -> Any:
    """The tables of these positions, in a sequence that ends with ``last``."""
    ends = position_ids.new_full((*position_ids.shape[:-1], 1), last)
    tables = forward(x, torch.cat((position_ids, ends), dim=-1), *more, **given)
    if isinstance(tables, Tensor):
        return tables[..., :-1, :]
    return tuple(table[..., :-1, :] for table in tables)


def _use(model: ForeignDecoder, attend: Attend, seen: dict[str, Any] | None = None) -> None:
    """Have a model use ``attend``; ``seen`` gets the other arguments the library passes to it."""
    import transformers

    transformers.AttentionInterface.register(NAME, partial(_attention, attend, seen))
    model.lm.set_attn_implementation(NAME)


def _attention(
    attend: Attend,
    seen: dict[str, Any] | None,
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """In the library's form: [B, H, S, E] each, and out comes [B, S, H, E]."""
    if seen is not None:
        asked = {name: value for name, value in given.items() if name not in IDLE}
        seen |= {n: v for n, v in asked.items() if isinstance(v, Tensor) or v not in OFF}
        if v.shape[-1] != q.shape[-1]:
            seen["values of another width than keys"] = True
    if scaling is not None:  # attention divides by the root of the head's size
        q = q * (scaling * q.shape[-1] ** 0.5)
    return attend(q, k, v, mask).transpose(1, 2).contiguous(), None


def _numbers(documents: Tensor) -> Tensor:
    """Numbers of documents [B, T] in a shape that the library passes on as a mask."""
    return documents[:, None, None, :]


def _of(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[:, 0, 0]


def short_window(text: Any, seq_len: int) -> int | None:
    """Tokens that a layer sees at a time, where these are fewer than a sequence's; else None.

    ``text``: the library's configuration. Some families have a window there that they do not use.
    """
    types = getattr(text, "layer_types", None)
    slides = (
        getattr(text, "use_sliding_window", True)
        if types is None
        else ("sliding_attention" in types)
    )
    used = {"sliding_window": slides, "attention_chunk_size": "chunked_attention" in (types or ())}
    sizes = [getattr(text, name, None) for name, is_used in used.items() if is_used]
    return min((size for size in sizes if size is not None and size < seq_len), default=None)


def close(one: Tensor, other: Tensor, limit: float = CLOSE) -> bool:
    """Whether no element differs by more than ``limit`` times the largest of ``other``."""
    return bool((one - other).abs().max() <= limit * other.abs().max())


def _refused(config: Model, ranks: int, why: str) -> ValueError:
    return ValueError(
        f"--cp {ranks}: {family(config)} cannot share sequences: {why}; "
        "lay it out by --dp-shard, --dp-replicate, --tp and --pp"
    )
