"""What an export takes over from the folder that its run started from.

A run has its tokenizer.json alone: special tokens by name, the chat template and how to generate
stand in small files beside it, which no island needs in order to train.
"""

from __future__ import annotations

import json
from pathlib import Path

from blake3 import blake3

from node.data.tokenizer import FILE, MAX_TOKENIZER_BYTES
from node.errors import operator_error
from node.hf.export import bytes_file
from protocols.errors import reason

TEMPLATE = "chat_template.jinja"
TAKEN = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE,
    "generation_config.json",
)
MAX_BYTES = 16 * 1024 * 1024  # those of 256,000 added tokens have about 10 MB
FIX = "give --like the folder that the run's tokenizer is from, or leave it out"


def files_like(folder: Path, tokenizer: bytes) -> dict[str, bytes]:
    """Those of the folder that complete a model with this tokenizer.json (empty: bytes), by name.

    Raises OperatorError E604 where the folder's tokenizer is another one, or a file is damaged.
    """
    try:
        if not folder.is_dir():
            raise _unfit(folder, "it is no folder" if folder.exists() else "it does not exist")
    except OSError as error:
        raise _unfit(folder, reason(error)) from error
    theirs = _read(folder, FILE, MAX_TOKENIZER_BYTES)
    if theirs is None:
        raise _unfit(folder, f"it has no {FILE}")
    found, wanted = (blake3(data).hexdigest() for data in (theirs, tokenizer or bytes_file()))
    if found != wanted:
        what = f"its {FILE} is not the run's: its hash is {found[:16]}…, the run's {wanted[:16]}…"
        raise _unfit(folder, what if tokenizer else f"its {FILE} is not that of the run, bytes")
    files = {name: _read(folder, name, MAX_BYTES) for name in TAKEN}
    return {name: data for name, data in files.items() if data is not None}


def _read(folder: Path, name: str, most: int) -> bytes | None:
    """A file of the folder; None where it has none."""
    path = folder / name
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise ValueError(f"it has more than {most:,} bytes")
        if name in TAKEN and name != TEMPLATE and not isinstance(json.loads(data), dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise _unfit(folder, f"{name}: {reason(error)}") from error
    return data


def _unfit(folder: Path, why: str) -> Exception:
    return operator_error("E604", f"cannot export like {folder}", why=why, fix=FIX)
