"""Ready manifests, from a demonstration on a laptop's processor to seventy billion parameters.

``tiny`` is the manifest's defaults: with four islands that share two processor cores the
validation loss falls from 6.0 to below 2.5 in 15 processor seconds of inner steps (3 rounds) and
to about 1.75 in 56 (12 rounds). The others are starting points: their sizes
follow published models of those sizes, moved from words to bytes by more layers instead of large
embeddings; their learning rates fall with size as is usual.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_origin

from bootstrap.manifest import Manifest
from bootstrap.manifest_modes import with_defaults
from bootstrap.manifest_rounds import MOST_COUNT, Rounds
from bootstrap.validation import fields, set_list

MOST_LIST, _SHOWN = 1000, 80  # characters of a list's text, and of a wrong one that is repeated
_LISTS = {key: field for key, field in fields(Manifest) if get_origin(field.annotation) is tuple}
_LARGE: dict[str, Any] = {
    "outer": {"warmup_rounds": 30},
    "rounds": {"inner_steps": 100, "overlap_steps": 5, "total_rounds": 500, "eval_every": 1},
    "evaluation": {"sequences": 128},
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "tiny-streaming": {  # 0.2 M, merged in four fragments that take turns
        "name": "tiny-streaming",
        "model": {"n_layers": 4},
        "rounds": {"fragments": 4},
    },
    "small": {  # 9.5 M
        "name": "small-docs",
        "model": {
            "d_model": 384,
            "n_layers": 6,
            "n_heads": 6,
            "n_kv_heads": 2,
            "d_ff": 1024,
            "max_seq_len": 512,
        },
        "data": {"seq_len": 512, "batch_size": 32},
        "inner": {"lr": 1e-3, "warmup_steps": 100, "total_steps": 5000},
        "outer": {"warmup_rounds": 30},
        "rounds": {"inner_steps": 50, "total_rounds": 100},
    },
    "125m": {  # 126 M
        "name": "text-125m",
        "model": {
            "d_model": 768,
            "n_layers": 20,
            "n_heads": 12,
            "n_kv_heads": 4,
            "d_ff": 2048,
            "max_seq_len": 1024,
        },
        "data": {"recipe": "text", "seq_len": 1024, "batch_size": 64},
        "inner": {"lr": 6e-4, "warmup_steps": 500, "total_steps": 50_000},
        **_LARGE,
    },
    "350m": {  # 331 M
        "name": "text-350m",
        "model": {
            "d_model": 1024,
            "n_layers": 28,
            "n_heads": 16,
            "n_kv_heads": 8,
            "d_ff": 2816,
            "max_seq_len": 2048,
        },
        "data": {"recipe": "text", "seq_len": 2048, "batch_size": 64},
        "inner": {"lr": 5e-4, "warmup_steps": 1000, "total_steps": 50_000},
        **_LARGE,
    },
    "1b": {  # 0.97 G
        "name": "text-1b",
        "model": {
            "d_model": 2048,
            "n_layers": 16,
            "n_heads": 32,
            "n_kv_heads": 8,
            "d_ff": 8192,
            "max_seq_len": 4096,
            "rope_theta": 500_000.0,
        },
        "data": {"recipe": "text", "seq_len": 4096, "batch_size": 128},
        "inner": {"lr": 4e-4, "warmup_steps": 1000, "total_steps": 50_000},
        **_LARGE,
    },
    "3b": {  # 2.8 G
        "name": "text-3b",
        "model": {
            "d_model": 3072,
            "n_layers": 28,
            "n_heads": 24,
            "n_kv_heads": 8,
            "d_ff": 8192,
            "max_seq_len": 4096,
            "rope_theta": 500_000.0,
        },
        "data": {"recipe": "text", "seq_len": 4096, "batch_size": 128},
        "inner": {"lr": 3e-4, "warmup_steps": 2000, "total_steps": 50_000},
        **_LARGE,
    },
    "8b": {  # 7.9 G
        "name": "text-8b",
        "model": {
            "d_model": 4096,
            "n_layers": 36,
            "n_heads": 32,
            "n_kv_heads": 8,
            "d_ff": 14_336,
            "max_seq_len": 8192,
            "rope_theta": 500_000.0,
            "tied_embeddings": False,
        },
        "data": {"recipe": "text", "seq_len": 8192, "batch_size": 128},
        "inner": {"lr": 3e-4, "warmup_steps": 2000, "total_steps": 50_000},
        **_LARGE,
    },
    "70b": {  # 70.6 G
        "name": "text-70b",
        "model": {
            "d_model": 8192,
            "n_layers": 80,
            "n_heads": 64,
            "n_kv_heads": 8,
            "d_ff": 28_672,
            "max_seq_len": 8192,
            "rope_theta": 500_000.0,
            "vocab_size": 128_256,
            "tied_embeddings": False,
        },
        "data": {"recipe": "text", "seq_len": 8192, "batch_size": 256},
        "inner": {"lr": 1.5e-4, "warmup_steps": 2000, "total_steps": 50_000},
        **_LARGE,
    },
    "moe-tiny": {  # 0.19 M, of which a token passes two of four experts
        "name": "moe-tiny",
        "model": {"experts": 4, "top_k": 2, "d_ff": 96},
    },
    "moe-1b": {  # 1.06 G
        "name": "moe-1b",
        "model": {
            "d_model": 1024,
            "n_layers": 16,
            "n_heads": 16,
            "n_kv_heads": 8,
            "d_ff": 2560,
            "max_seq_len": 4096,
            "experts": 8,
            "top_k": 2,
            "rope_theta": 500_000.0,
        },
        "data": {"recipe": "text", "seq_len": 4096, "batch_size": 128},
        "inner": {"lr": 4e-4, "warmup_steps": 1000, "total_steps": 50_000},
        **_LARGE,
    },
    "moe-8x7b": {  # 46.7 G
        "name": "moe-8x7b",
        "model": {
            "d_model": 4096,
            "n_layers": 32,
            "n_heads": 32,
            "n_kv_heads": 8,
            "d_ff": 14_336,
            "max_seq_len": 8192,
            "experts": 8,
            "top_k": 2,
            "vocab_size": 32_000,
            "rope_theta": 1_000_000.0,
            "tied_embeddings": False,
        },
        "data": {"recipe": "text", "seq_len": 8192, "batch_size": 128},
        "inner": {"lr": 3e-4, "warmup_steps": 2000, "total_steps": 50_000},
        **_LARGE,
    },
}


def preset(name: str, changes: Mapping[str, object] | None = None) -> Manifest:
    """The manifest called ``name`` with ``changes``, whose keys are dotted: ``"inner.lr": 1e-3``.

    Values may be text, as from a command line. Raises ValueError for an unknown preset, and
    pydantic's ValidationError (a ValueError too) for an unknown key or a value out of bounds.
    """
    return with_schedule(Manifest.model_validate(tables_of(name, changes)), name, changes)


def with_schedule(
    made: Manifest, name: str, changes: Mapping[str, object] | None = None
) -> Manifest:
    """A run ``made`` of a preset: where it is longer or shorter than that, its schedule is as well.

    The preset's learning rate falls until its last inner step. So it does with other rounds, unless
    ``inner.total_steps`` is among the changes, or differs from all rounds' steps by the preset and
    mode alone (btm). Where islands take more or fewer steps than ``rounds.inner_steps`` says, as in
    mode async, the schedule is as far from that as the preset's.
    """
    changes = changes or {}
    mode = {"mode": changes["mode"]} if "mode" in changes else {}
    before = with_defaults(tables_of(name, mode))
    rounds, fields = before.get("rounds", {}), Rounds.model_fields
    steps, count = (rounds.get(key, fields[key].default) for key in ("inner_steps", "total_rounds"))
    usual = Manifest().inner.model_copy(update=before.get("inner", {})).total_steps
    whole = made.rounds.inner_steps * made.rounds.total_rounds
    if "inner.total_steps" in changes or steps * count != usual or whole == usual:
        return made
    inner = {"total_steps": min(whole, MOST_COUNT)}
    if "inner.warmup_steps" not in changes:
        inner["warmup_steps"] = min(made.inner.warmup_steps, whole)
    return made.model_copy(update={"inner": made.inner.model_copy(update=inner)})


def tables_of(name: str, changes: Mapping[str, object] | None = None) -> dict[str, Any]:
    """What :func:`preset` makes a manifest of.

    Raises ValueError for an unknown preset, and for text that is no list where there is to be one.
    """
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}: choose one of {', '.join(PRESETS)}")
    tables: dict[str, Any] = {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in PRESETS[name].items()
    }
    for path, value in (changes or {}).items():
        table, _, key = path.rpartition(".")
        place = tables.get(table) if table else tables
        if not isinstance(place, dict):  # unknown, or no table: the validation below says so
            place = tables[table] = {}
        place[key] = _list_of(path, value) if path in _LISTS else value
    return tables


def _list_of(key: str, value: object) -> object:
    """The list that text is in TOML; nothing else is read of it."""
    if not isinstance(value, str):
        return value
    found: dict[str, Any] = {}
    if value.lstrip().startswith("[") and len(value) <= MOST_LIST:
        with suppress(ValueError, RecursionError):
            found = tomllib.loads(f"list = {value}")
    if found.keys() != {"list"} or not isinstance(found["list"], list):
        shown = value if len(value) <= _SHOWN else value[:_SHOWN] + "…"
        raise ValueError(f"{key} is a list, and {shown!r} is none: {set_list(key, _LISTS[key])}")
    return found["list"]
