"""The corpus: documents from a recipe, the shared evaluation shard, and a file of training tokens.

``docstrings`` collects the English docstrings of Python's own library and of networkx (which torch
brings along), so that a run has real input with no download. ``text`` reads the operator's files.
Another Python patch release has slightly other docstrings, and everybody has other text: islands
may differ in what they train on, never in the evaluation shard, which the run's creator makes and
the others fetch by its hash.

Nothing that is evaluated may be trained on, anywhere. So whether a document may be in the shard
follows from the document's own hash: one in ``HELD_OUT_ONE_IN`` is never trained on by any island.
What a training document has of the shard all the same, since another island cut or edited the same
text differently, is left out as well: see :mod:`node.trainer.passages`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from bootstrap.manifest import MAX_SHARD_BYTES, Data
from node.data import plain_text
from node.data.batches import batches
from node.data.cached_file import cache_folder, cached
from node.data.plain_text import SET_PATH
from node.data.tokenizer import (
    BYTES,
    BYTES_VOCABULARY,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
)
from node.errors import operator_error
from node.headway import OnProgress, Tell, counted
from node.trainer.data import DOCUMENT_END, token_type
from node.trainer.passages import Passages

FORMAT = 1  # of the cached documents; part of their names
TOKENS_FORMAT = 3  # of the cached tokens, likewise
HELD_OUT_ONE_IN = 20
NOTABLE = 0.01  # of the training text; less than that may be left out without a word

MORE_TEXT = "give more text (a megabyte or more), or a smaller data.seq_len"


@dataclass(frozen=True)
class Corpus:
    """A cached file of documents, each ended by a NUL byte. See :func:`collect`."""

    path: Path
    digest: str  # BLAKE3 (hex) of the file
    size: int  # bytes
    documents: int
    source: str = "the text"  # what it was made of, for people
    left_out: int = 0  # of that: tokens, since they are evaluated

    def __iter__(self) -> Iterator[bytes]:
        """The documents without their final NUL, in order."""
        rest = b""
        with self.path.open("rb") as file:
            while block := file.read(1 << 20):
                *whole, rest = (rest + block).split(DOCUMENT_END)
                yield from whole

    def make_shard(
        self,
        sequences: int,
        seq_len: int,
        tokenizer: Tokenizer | None = None,
        vocab_size: int = BYTES_VOCABULARY,
    ) -> bytes:
        """The evaluation shard: up to ``sequences`` windows, spread over the held-out documents.

        It has n * (seq_len + 1) tokens for some 1 <= n <= sequences, little endian in the width
        of :func:`~node.trainer.data.token_type`; windows do not overlap. Raises OperatorError E601
        when the held-out documents fill no window, E204 when it is larger than others take.
        """
        tokenizer = tokenizer or ByteTokenizer()
        held_out = sorted((d for d in self if is_held_out(d)), key=_hash)
        joined = b"".join(_coded(held_out, tokenizer, token_type(vocab_size)))
        width = token_type(vocab_size).itemsize
        shard = spread(joined, width, sequences, seq_len)
        if not shard:
            raise operator_error(
                "E601",
                "the corpus is too small to set an evaluation shard apart",
                why=f"{self.source} has {self.size:,} bytes in "
                f"{counted(self.documents, 'document')}, which leave {len(joined) // width} tokens "
                f"for it, and one sequence needs {seq_len + 1}",
                fix=MORE_TEXT,
            )
        return shard

    def training_file(
        self,
        shard: bytes,
        seq_len: int,
        tokenizer: Tokenizer | None = None,
        vocab_size: int = BYTES_VOCABULARY,
        tell: Tell = lambda line: None,
    ) -> Path:
        """The cached file of training tokens: every document not held out, less what ``shard`` has.

        See :class:`Passages`; ``tell`` gets how much that is, where it is notable. Raises
        OperatorError E601 when fewer than two sequences are left.
        """
        tokenizer = tokenizer or ByteTokenizer()
        coded = tokenizer.digest
        if isinstance(tokenizer, FileTokenizer):
            coded += f"/{tokenizer.document_end}"
            if tokenizer.spells_end:  # else as by versions that left it in
                coded += "/taken out"
        key = blake3(shard + f"{seq_len}/{vocab_size}/{coded}".encode())
        name = f"tokens-{TOKENS_FORMAT}-{self.digest[:16]}-{key.hexdigest()[:16]}.bin"
        kind = token_type(vocab_size)
        passages = Passages(shard, seq_len, tokenizer, kind)
        kept = (document for document in self if not is_held_out(document))
        of_text = tokenizer.digest == BYTES
        tokens = _cached(
            self.path.with_name(name),
            lambda: passages.trainable(
                _coded(kept, tokenizer, kind), lambda part: of_text and is_held_out(part[:-1])
            ),
            b"",
            lambda: passages.left_out,
        )
        count, left_out = tokens.size // kind.itemsize, tokens.left_out
        unit = "bytes" if of_text else "tokens"
        if count < 2 * seq_len:
            dropped = f" and {left_out:,} {unit} with passages of these" if left_out else ""
            raise operator_error(
                "E601",
                "too little training text",
                why=f"{self.source} has {counted(self.documents, 'document')}; less those for "
                f"evaluation{dropped} they have {count} {unit}, and two sequences need "
                f"{2 * seq_len}",
                fix=MORE_TEXT,
            )
        if left_out > NOTABLE * (count + left_out):
            tell(
                f"leaves out {left_out:,} of {count + left_out:,} {unit} of {self.source}: they "
                "have passages that the run evaluates with"
            )
        return tokens.path


def spread(joined: bytes | memoryview, width: int, sequences: int, seq_len: int) -> bytes:
    """Up to ``sequences`` windows of ``seq_len + 1`` tokens, evenly out of ``joined`` ones.

    Raises OperatorError E204 where they are more than others take.
    """
    length, tokens = seq_len + 1, len(joined) // width
    count = min(sequences, tokens // length)
    if (size := count * length * width) > MAX_SHARD_BYTES:
        raise operator_error(
            "E204",
            f"the evaluation shard has {size:,} bytes",
            why=f"it is {count:,} sequences of {length:,} tokens, and every island fetches it: at "
            f"most {MAX_SHARD_BYTES:,} bytes are taken",
            fix=f"set evaluation.sequences to {MAX_SHARD_BYTES // (length * width):,} or fewer",
        )
    starts = [i * (tokens - length) // max(1, count - 1) for i in range(count)]
    return b"".join(joined[start * width : (start + length) * width] for start in starts)


def _coded(
    documents: Iterable[bytes], tokenizer: Tokenizer, kind: np.dtype[Any]
) -> Iterator[bytes]:
    """Each document's tokens and its end, as they stand in files."""
    end = np.array([tokenizer.document_end], dtype=kind).tobytes()
    for batch in batches(documents, len):
        for ids in tokenizer.encode(batch):
            yield ids.astype(kind).tobytes() + end


def is_held_out(document: bytes) -> bool:
    """Whether a document is for evaluation only; the same answer on every island."""
    return int.from_bytes(_hash(document)[:8], "little") % HELD_OUT_ONE_IN == 0


def collect(
    data: Data,
    folder: Path | None = None,
    progress: OnProgress = lambda done, total: None,
    tell: Tell = lambda line: None,
) -> Corpus:
    """The documents of ``data.recipe``, from the cache in ``folder`` or built there (about 4 s).

    Blocks, and takes a processor for itself meanwhile; several processes may call it at once, one
    builds and the others wait. ``tell``: see :func:`~node.data.plain_text.text_files`. Raises
    OperatorError E601 (no readable or no text at all, or the folder cannot be written), E402 (disk
    full).
    """
    if data.recipe == "text":
        files = plain_text.text_files(data.path, tell)
        key = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        produce = lambda: plain_text.text_documents(files, progress)  # noqa: E731
        source = data.path
    else:
        roots = plain_text.source_roots()
        files = [file for root in roots for file in plain_text.python_files(root)]
        key = [(str(f), f.stat().st_size, 0) for f in files]
        produce = lambda: plain_text.docstrings(files, progress)  # noqa: E731
        source = "Python's own documentation"
    name = blake3(json.dumps([data.recipe, key]).encode()).hexdigest()[:16]
    path = (folder or cache_folder()) / f"documents-{FORMAT}-{name}.bin"
    corpus = _cached(path, lambda: _distinct(produce()))
    if not corpus.documents:
        raise operator_error(
            "E601",
            "the corpus is empty",
            why=f"no file of {source} has usable text ({len(files)} read)",
            fix=SET_PATH if data.recipe == "text" else "use the recipe `text` with files of yours",
        )
    return replace(corpus, source=source)


def _hash(document: bytes) -> bytes:
    return blake3(document).digest()


def _distinct(documents: Iterable[bytes]) -> Iterator[bytes]:
    """Non-empty documents, each once, at its first place."""
    seen: set[bytes] = set()
    for document in documents:
        key = _hash(document)[:16]
        if document and key not in seen:
            seen.add(key)
            yield document


def _cached(
    path: Path,
    produce: Callable[[], Iterable[bytes]],
    end: bytes = DOCUMENT_END,
    left_out: Callable[[], int] = lambda: 0,
) -> Corpus:
    record = cached(path, produce, end, left_out)
    return Corpus(path, record.blake3, record.size, record.documents, left_out=record.left_out)
