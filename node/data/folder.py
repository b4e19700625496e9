"""Token folders: what ``node data prepare`` writes and islands train on.

::

    data.json         what is in it: tokenizer, vocabulary, files with their sha256
    train-00000.bin   token ids, little endian: uint16, or uint32 for vocabularies over
                      65,536, or uint8 for bytes
    train-00000.ends  where its documents end: uint64, each one behind a document's last token
    held-out.bin      documents of the share that no island trains on, for evaluation
    tokenizer.json    the tokenizer, unless it is bytes

A document's last token is the tokenizer's document end. Files hold whole documents.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bootstrap.validation import explain
from node.data.streamed import is_stream
from node.data.tokenizer import MAX_VOCABULARY, MIN_VOCABULARY
from node.errors import operator_error
from node.setting_values import is_url

INDEX = "data.json"
PARTIAL = ".partial.json"  # in the place of the index until all is made
HELD_OUT = "held-out.bin"
MAX_INDEX_BYTES = 64 * 1024 * 1024
ENDS = ".ends"

Sha256 = Field(pattern=r"^[0-9a-f]{64}$")
Name = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")  # never a path


class Shard(BaseModel):
    """One file of tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Name
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    sha256: str = Sha256
    ends_sha256: str = Sha256  # of the file of document ends beside it


class Index(BaseModel):
    """``data.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: Literal[1] = 1
    tokenizer: str = Field(pattern=r"^(bytes|[0-9a-f]{64})$")
    vocab_size: int = Field(ge=MIN_VOCABULARY, le=MAX_VOCABULARY)
    document_end: int = Field(ge=0)
    dtype: Literal["uint8", "uint16", "uint32"]
    shards: tuple[Shard, ...]
    held_out: Shard

    @property
    def tokens(self) -> int:
        """Tokens to train on."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Documents to train on."""
        return sum(shard.documents for shard in self.shards)

    @property
    def width(self) -> int:
        """Bytes a token."""
        return np.dtype(self.dtype).itemsize


def parse_index(data: bytes, where: str) -> Index:
    """``data.json`` from its bytes; raises OperatorError E603."""
    try:
        if len(data) > MAX_INDEX_BYTES:
            raise ValueError(f"{INDEX} has more than {MAX_INDEX_BYTES} bytes")
        index = Index.model_validate_json(data)
        if not index.tokens:
            raise ValueError("it has no tokens")
    except ValidationError as error:
        why = "; ".join(explain(error, Index)[:4])
        raise operator_error("E603", f"{where} is no token folder", why=why) from error
    except ValueError as error:
        raise operator_error("E603", f"{where} is no token folder", why=str(error)) from error
    return index


def ends(name: str) -> str:
    """The file of document ends beside a file of tokens."""
    return name.removesuffix(".bin") + ENDS


def is_folder(place: str) -> bool:
    """Whether a place on this machine, or a URL, is meant as a token folder."""
    if is_stream(place):
        return False
    # Path.is_file raises where a parent folder cannot be entered; reading it tells of that
    return is_url(place) or os.path.isfile(os.path.join(place, INDEX))


def check_finished(folder: Path) -> None:
    """E603 for a token folder of which only a part is made."""
    if os.path.isfile(folder / PARTIAL) and not os.path.isfile(folder / INDEX):
        raise operator_error(
            "E603",
            f"{folder} is not finished",
            why="`node data prepare` was stopped, or is at work there",
            fix="give that command again: it goes on where it was",
        )
