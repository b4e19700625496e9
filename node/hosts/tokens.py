"""Whether two hosts of an island have the same training tokens.

Rank r of an island reads rows of windows that follow from counters and from the number of tokens.
Ranks with other tokens would read some windows twice and others never, and nobody would notice.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from blake3 import blake3

from node.data.cached_file import intact
from node.data.folder import is_folder
from node.data.remote import Folder
from node.data.stream_recipe import is_recipe, read_recipe
from node.trainer.data import token_type

SAMPLES = 64
SAMPLE_TOKENS = 4096


def fingerprint(place: str, vocab_size: int, cache: Path | None = None) -> bytes:
    """32 bytes that are equal for equal tokens. Blocks.

    A token folder has the hashes of its files in its index, and a stream is known by its name and
    how it is dealt. A raw file has its hash beside it, which is compared with what is there; of one
    without, its length counts, and samples all over it. Raises OSError, and OperatorError E603 for
    a folder that cannot be read.
    """
    if is_folder(place):
        return blake3(Folder(place, cache).index.model_dump_json().encode()).digest()
    if is_recipe(place):
        return bytes.fromhex(read_recipe(place).digest)
    if (record := intact(Path(place))) is not None:
        return bytes.fromhex(record.blake3)
    tokens = np.memmap(place, dtype=token_type(vocab_size), mode="r")
    found = blake3(len(tokens).to_bytes(8, "big"))
    for start in np.linspace(0, max(0, len(tokens) - SAMPLE_TOKENS), SAMPLES).astype(np.int64):
        found.update(tokens[start : start + SAMPLE_TOKENS].tobytes())
    return found.digest()
