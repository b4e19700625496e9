"""Tokens for inner steps: files of them, the windows of a batch, and what of a batch counts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bootstrap.manifest import Manifest
from node.data.ahead import Ahead, ReadPosition
from node.data.folder import is_folder
from node.data.remote import Folder, FolderTokens
from node.data.tokenizer import BYTES_VOCABULARY
from node.errors import operator_error
from node.trainer.sampler import Sampler
from protocols.errors import OperatorError, reason

Array = npt.NDArray[np.integer[Any]]

DOCUMENT_END = b"\0"  # a byte that text does not have
IGNORED = -100  # a target that does not count; torch's default


@runtime_checkable
class TokenSource(Protocol):
    """Tokens in several files, read as one sequence."""

    def __len__(self) -> int:
        """How many there are."""

    def window(self, start: int, length: int) -> Array:
        """Tokens ``[start, start + length)``."""


Tokens = Array | TokenSource


def encode(text: str) -> bytes:
    """The byte tokenizer: token ids are the bytes of the UTF-8 text."""
    return text.encode("utf-8", errors="replace")


def token_type(vocab_size: int) -> np.dtype[Any]:
    """How one token lies in a file: one byte up to a vocabulary of 256, else two or four."""
    if vocab_size <= BYTES_VOCABULARY:
        return np.dtype(np.uint8)
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def open_tokens(
    path: str | os.PathLike[str],
    vocab_size: int = BYTES_VOCABULARY,
    cache: Path | None = None,
    cache_bytes: int = 0,
) -> Tokens:
    """A token folder (see :mod:`node.data.folder`), or a file of raw ids, mapped.

    Raw ids are little endian in the width of :func:`token_type`. ``cache`` holds files of a folder
    at a URL, and its index as of when it was found to fit the run. Raises ValueError when the file
    is empty or has half a token, or the ids of a folder do not fit the vocabulary, and
    OperatorError E603 for a folder that cannot be read.
    """
    if is_folder(str(path)):
        folder = Folder(str(path), cache, cache_bytes, known=True)
        if folder.index.vocab_size > vocab_size:
            raise ValueError(
                f"{path} has a vocabulary of {folder.index.vocab_size}, the model {vocab_size}"
            )
        return FolderTokens(folder)
    kind = token_type(vocab_size)
    size = Path(path).stat().st_size
    if size == 0 or size % kind.itemsize:
        raise ValueError(f"{path}: {size} bytes are no whole, positive number of tokens")
    return np.memmap(path, dtype=kind, mode="r")


def unreadable(place: str, error: OSError) -> OperatorError:
    """E601 for tokens that were there when the island started, and cannot be read any more."""
    return operator_error(
        "E601",
        f"cannot read the training tokens {place}",
        why=reason(error),
        fix="start again with --data: tokens that a node has made are made anew where their file "
        "is gone; else let this user read it, and look at its disk",
    )


def gather(tokens: Tokens, starts: npt.NDArray[np.int64], length: int) -> Tensor:
    """Windows ``tokens[start : start + length]`` as int64 [len(starts), length]."""
    if isinstance(tokens, np.ndarray):
        places = starts[:, None] + np.arange(length, dtype=np.int64)
        return torch.from_numpy(tokens[places].astype(np.int64))
    out = np.empty((len(starts), length), dtype=np.int64)
    for row, start in enumerate(starts.tolist()):
        out[row] = tokens.window(start, length)
    return torch.from_numpy(out)


class Batches(Protocol):
    """What an island trains on, by its place in the run."""

    @property
    def numbered(self) -> bool:
        """Whether a batch's number, where the run has such, is its place: a step of round 0."""
        ...

    @property
    def headway(self) -> int:
        """Another number whenever this machine is further with what has to be fetched or made."""
        ...

    def expect(self, stretches: tuple[int, ...]) -> None:
        """These are the numbers that come next (:mod:`node.trainer.numbers`)."""

    def batch(
        self, round: int, slot: int, slots: int, step: int, rows: range | None = None
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [rows, seq_len] each."""


@dataclass(frozen=True)
class TrainingData:
    """A corpus and the rule by which it is read."""

    tokens: Tokens
    sampler: Sampler
    document_end: int | None = None  # where documents are apart: its token
    ahead: Ahead | None = None  # where files come from afar
    numbered = True

    @classmethod
    def of(cls, manifest: Manifest, tokens: Tokens) -> TrainingData:
        """As a run's manifest says.

        Raises ValueError when the corpus has fewer than two sequences of tokens.
        """
        sampler = sampler_of(manifest, len(tokens))
        apart = manifest.model.attention == "document"
        ahead = None
        if isinstance(tokens, FolderTokens) and tokens.cache_bytes:
            ahead = Ahead(tokens, sampler)
        return cls(tokens, sampler, manifest.model.document_end if apart else None, ahead)

    @property
    def headway(self) -> int:
        """See :class:`Batches`."""
        return self.tokens.headway if isinstance(self.tokens, FolderTokens) else 0

    def expect(self, stretches: tuple[int, ...]) -> None:
        """Have the files of these batches fetched."""
        if self.ahead is not None:
            self.ahead.expect(stretches)

    def batch(
        self, round: int, slot: int, slots: int, step: int, rows: range | None = None
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [rows, seq_len] each; see :meth:`Sampler.starts`.

        Where documents are apart, the first token of a document is no target (``IGNORED``):
        nothing before it says what it is.
        """
        if self.ahead is not None:
            self.ahead.reading(ReadPosition(round, slot, slots, step))
        starts = self.sampler.starts(round, slot, slots, step, rows)
        window = gather(self.tokens, starts, self.sampler.seq_len + 1)
        return window[:, :-1], targets(window, self.document_end)


def sampler_of(manifest: Manifest, tokens: int) -> Sampler:
    """The sampler for a corpus of ``tokens``; raises ValueError for fewer than two sequences.

    A round has as many windows as ``data.islands`` islands take in ``rounds.inner_steps``; none
    where batches are numbered through the run, which is then read like a single round.
    """
    data, rounds = manifest.data, manifest.rounds
    each = 0 if manifest.numbered else rounds.inner_steps + rounds.overlap_steps
    return Sampler(
        tokens,
        data.seq_len,
        data.batch_size,
        data.seed,
        reserved=data.islands * each * data.batch_size,
        pool=data.pool_windows,
    )


def targets(window: Tensor, document_end: int | None) -> Tensor:
    """What is to be predicted at each place of ``window`` [B, T + 1] but the last: [B, T]."""
    following = window[:, 1:]
    if document_end is None:
        return following
    return following.masked_fill(window[:, :-1] == document_end, IGNORED)
