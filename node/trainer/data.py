"""Tokens: the byte tokenizer, memory-mapped token files, and batches for inner steps."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.trainer.sampler import Sampler

Tokens = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]

BYTES_VOCABULARY = 256
DOCUMENT_END = b"\0"  # a byte that text does not have


def encode(text: str) -> bytes:
    """The byte tokenizer: token ids are the bytes of the UTF-8 text."""
    return text.encode("utf-8", errors="replace")


def decode(tokens: bytes) -> str:
    """Text of byte tokens; what is no UTF-8 shows as U+FFFD."""
    return tokens.decode("utf-8", errors="replace")


def open_tokens(path: str | os.PathLike[str], vocab_size: int = BYTES_VOCABULARY) -> Tokens:
    """Map a file of raw little-endian token ids, one byte each, or two for vocabularies over 256.

    Raises ValueError when the file is empty, has half a token, or the vocabulary is too large.
    """
    if vocab_size > 2**16:
        raise ValueError(f"vocabulary of {vocab_size}: token files hold at most 16 bits a token")
    width = 1 if vocab_size <= BYTES_VOCABULARY else 2
    size = Path(path).stat().st_size
    if size == 0 or size % width:
        raise ValueError(f"{path}: {size} bytes are no whole, positive number of tokens")
    return np.memmap(path, dtype=np.uint8 if width == 1 else np.dtype("<u2"), mode="r")


def gather(tokens: Tokens, starts: npt.NDArray[np.int64], length: int) -> Tensor:
    """Windows ``tokens[start : start + length]`` as int64 [len(starts), length]."""
    places = starts[:, None] + np.arange(length, dtype=np.int64)
    return torch.from_numpy(tokens[places].astype(np.int64))


@dataclass(frozen=True)
class TrainingData:
    """A corpus and the rule by which it is read."""

    tokens: Tokens
    sampler: Sampler

    @classmethod
    def over(cls, tokens: Tokens, seq_len: int, batch_size: int, seed: int) -> TrainingData:
        """Raises ValueError when the corpus has fewer than two sequences of tokens."""
        return cls(tokens, Sampler(len(tokens), seq_len, batch_size, seed))

    def batch(
        self, round: int, slot: int, slots: int, step: int, rows: range | None = None
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [rows, seq_len] each; see :meth:`Sampler.starts`."""
        starts = self.sampler.starts(round, slot, slots, step, rows)
        window = gather(self.tokens, starts, self.sampler.seq_len + 1)
        return window[:, :-1], window[:, 1:]
