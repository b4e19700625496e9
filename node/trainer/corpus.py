"""The corpus: documents from a recipe, the shared evaluation shard, and a file of training tokens.

``docstrings`` collects the English docstrings of Python's own library and of networkx (which torch
brings along), so that a run has real input with no download. ``text`` reads the operator's files.
Another Python patch release has slightly other docstrings, and everybody has other text: islands
may differ in what they train on, never in the evaluation shard, which the run's creator makes and
the others fetch by its hash.

Nothing that is evaluated may be trained on, anywhere. So whether a document may be in the shard
follows from the document's own hash: one in ``HELD_OUT_ONE_IN`` is never trained on by any island.
A training document that has a passage of the shard all the same, since another island cut the
same text differently, is dropped as well.

Files are cached, and written whole or not at all; a sidecar records count and hash.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import errno
import fcntl
import importlib.util
import itertools
import json
import os
import re
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from blake3 import blake3

from bootstrap.manifest import Data
from node.data.tokenizer import BYTES, BYTES_VOCABULARY, ByteTokenizer, Tokenizer
from node.errors import operator_error
from node.trainer.data import DOCUMENT_END, encode, token_type

FORMAT = 1  # of the cached files; part of their names
HELD_OUT_ONE_IN = 20
MIN_PASSAGE = 64  # bytes; shorter ones are common phrases
MIN_PASSAGE_TOKENS = 16  # likewise, of larger vocabularies
EDGE_TOKENS = 4
ENCODED_AT_ONCE = 256  # documents
MIN_DOCSTRING = 200  # characters
PACKAGES = ("networkx",)
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
PARAGRAPH_LIMIT = 4096  # characters
CHUNK_LIMIT = 65_536
CHUNK_ONE_IN = 4  # a chunk ends after one in so many paragraphs, chosen by their hash
PROBE = 65_536  # bytes looked at to tell text from other files

SET_PATH = "set data.path to files or folders of UTF-8 text on this machine"
MORE_TEXT = "give more text (a megabyte or more), or a smaller data.seq_len"

Progress = Callable[[int, int], None]  # files done, files in all

_WORD = re.compile(r"[a-z]+")
_ENGLISH = {"the", "of", "to", "a", "is", "and", "in", "for", "be", "are", "that", "with", "if"}


@dataclass(frozen=True)
class Corpus:
    """A cached file of documents, each ended by a NUL byte. See :func:`collect`."""

    path: Path
    digest: str  # BLAKE3 (hex) of the file
    size: int  # bytes
    documents: int

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
        when the held-out documents fill no window.
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
                why=f"{self.size:,} bytes in {self.documents} documents leave "
                f"{len(joined) // width} tokens for it, and one sequence needs {seq_len + 1} "
                f"({self.path})",
                fix=MORE_TEXT,
            )
        return shard

    def training_file(
        self,
        shard: bytes,
        seq_len: int,
        tokenizer: Tokenizer | None = None,
        vocab_size: int = BYTES_VOCABULARY,
    ) -> Path:
        """The cached file of training tokens: every document not held out and not in ``shard``.

        Raises OperatorError E601 when that is fewer than two sequences.
        """
        tokenizer = tokenizer or ByteTokenizer()
        key = blake3(shard + f"{seq_len}/{vocab_size}/{tokenizer.digest}".encode())
        name = f"tokens-{FORMAT}-{self.digest[:16]}-{key.hexdigest()[:16]}.bin"
        kind = token_type(vocab_size)
        passages, width = Passages(shard, seq_len, tokenizer, kind), kind.itemsize
        kept = (document for document in self if not is_held_out(document))
        tokens = _cached(
            self.path.with_name(name),
            lambda: (coded for coded in _coded(kept, tokenizer, kind) if not passages.in_(coded)),
            b"",
        )
        count = tokens.size // width
        if count < 2 * seq_len:
            unit = "bytes" if tokenizer.digest == BYTES else "tokens"
            raise operator_error(
                "E601",
                "too little training text",
                why=f"{self.documents} documents, less those for evaluation, have {count} {unit}; "
                f"two sequences need {2 * seq_len} ({self.path})",
                fix=MORE_TEXT,
            )
        return tokens.path


def spread(joined: bytes | memoryview, width: int, sequences: int, seq_len: int) -> bytes:
    """Up to ``sequences`` windows of ``seq_len + 1`` tokens, evenly out of ``joined`` ones."""
    length, tokens = seq_len + 1, len(joined) // width
    count = min(sequences, tokens // length)
    starts = [i * (tokens - length) // max(1, count - 1) for i in range(count)]
    return b"".join(joined[start * width : (start + length) * width] for start in starts)


def _coded(
    documents: Iterable[bytes], tokenizer: Tokenizer, kind: np.dtype[Any]
) -> Iterator[bytes]:
    """Each document's tokens and its end, as they stand in files."""
    end = np.array([tokenizer.document_end], dtype=kind).tobytes()
    documents = iter(documents)
    while batch := list(itertools.islice(documents, ENCODED_AT_ONCE)):
        for ids in tokenizer.encode(batch):
            yield ids.astype(kind).tobytes() + end


class Passages:
    """The pieces of a shard's windows that lie in one document; what has one is not trained on.

    Pieces of a few tokens are common phrases, and left out. What stands before and behind a
    passage may change the tokens at its edges, so these do not count with larger vocabularies.
    """

    def __init__(
        self, shard: bytes, seq_len: int, tokenizer: Tokenizer, kind: np.dtype[Any]
    ) -> None:
        self._width = kind.itemsize
        least, edge = (
            (MIN_PASSAGE, 0) if tokenizer.digest == BYTES else (MIN_PASSAGE_TOKENS, EDGE_TOKENS)
        )
        least = min(seq_len - 2 * edge, least)
        self._pieces: list[bytes] = []
        for window in np.frombuffer(shard, dtype=kind).reshape(-1, seq_len + 1):
            ends = np.flatnonzero(window == tokenizer.document_end)
            for piece in np.split(window, ends):
                inner = piece[piece != tokenizer.document_end]
                inner = inner[edge : len(inner) - edge]
                if len(inner) >= max(1, least):
                    self._pieces.append(inner.tobytes())

    def in_(self, coded: bytes) -> bool:
        """Whether one of them is in a document's tokens."""
        return any(self._has(coded, piece) for piece in self._pieces)

    def _has(self, coded: bytes, piece: bytes) -> bool:
        at = coded.find(piece)
        while at >= 0 and at % self._width:  # found across the tokens' bytes: look on
            at = coded.find(piece, at + 1)
        return at >= 0


def is_held_out(document: bytes) -> bool:
    """Whether a document is for evaluation only; the same answer on every island."""
    return int.from_bytes(_hash(document)[:8], "little") % HELD_OUT_ONE_IN == 0


def cache_folder() -> Path:
    """Where corpora are kept: ``$XDG_CACHE_HOME/atoll``, by default ``~/.cache/atoll``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # the specification says to ignore a relative path
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "atoll"


def collect(data: Data, folder: Path | None = None, progress: Progress | None = None) -> Corpus:
    """The documents of ``data.recipe``, from the cache in ``folder`` or built there (about 4 s).

    Blocks, and takes a processor for itself meanwhile; several processes may call it at once, one
    builds and the others wait. Raises OperatorError E601 (no readable or no text at all, or the
    folder cannot be written), E402 (disk full).
    """
    progress = progress or (lambda done, total: None)
    if data.recipe == "text":
        files = _text_files(data.path)
        key = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        produce = lambda: _text_documents(files, progress)  # noqa: E731
    else:
        roots = _source_roots()
        files = [file for root in roots for file in _python_files(root)]
        key = [(str(f), f.stat().st_size, 0) for f in files]
        produce = lambda: _docstrings(files, progress)  # noqa: E731
    name = blake3(json.dumps([data.recipe, key]).encode()).hexdigest()[:16]
    path = (folder or cache_folder()) / f"documents-{FORMAT}-{name}.bin"
    corpus = _cached(path, lambda: _distinct(produce()))
    if not corpus.documents:
        raise operator_error(
            "E601",
            "the corpus is empty",
            why=f"{len(files)} files were read and none has usable text",
            fix=SET_PATH if data.recipe == "text" else "use the recipe `text` with files of yours",
        )
    return corpus


# -- docstrings ------------------------------------------------------------------------------


def _source_roots() -> list[Path]:
    roots = [Path(sysconfig.get_path("stdlib"))]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        roots += [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    return roots


def _python_files(root: Path) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return found


def _docstrings(files: list[Path], progress: Progress) -> Iterator[bytes]:
    for done, file in enumerate(files, 1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in other people's sources
                tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue  # templates and broken examples that come with packages
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= MIN_DOCSTRING and _is_english(text):
                    yield encode(text)
        progress(done, len(files))


def _is_english(text: str) -> bool:
    """At least one word in ten is among the commonest of English."""
    words = _WORD.findall(text.lower())
    return sum(word in _ENGLISH for word in words) * 10 >= len(words) > 0


# -- text ------------------------------------------------------------------------------------


def _text_files(paths: str) -> list[Path]:
    """Files named by ``paths`` (separated as in PATH); folders are searched for text."""
    found: list[Path] = []
    for place in [Path(part).expanduser() for part in paths.split(os.pathsep) if part]:
        if place.is_dir():
            inside = (file for file in sorted(place.rglob("*")) if file.is_file())
            found += [f for f in inside if not f.name.startswith(".") and not text_problem(f)]
        elif problem := text_problem(place):
            raise operator_error(
                "E601", f"cannot read the training text {place}", why=problem, fix=SET_PATH
            )
        else:
            found.append(place)
    if not found:
        raise operator_error(
            "E601",
            f"no training text at {paths!r}" if paths else "data.path is not set",
            why="no readable, non-empty UTF-8 file is there",
            fix=SET_PATH,
        )
    return found


def text_problem(file: Path) -> str:
    """Why a file is no text, judged by its beginning; empty if it is."""
    try:
        with file.open("rb") as stream:
            head = stream.read(PROBE)
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < PROBE)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 (byte {error.start})"
    if not head.strip():
        return "it is empty"
    return "it is a binary file" if DOCUMENT_END in head else ""


def _text_documents(files: list[Path], progress: Progress) -> Iterator[bytes]:
    for done, file in enumerate(files, 1):
        for number, document in enumerate(text_file_documents(file)):
            if number:
                progress(done - 1, len(files))  # who asked may want it no more
            yield document
        progress(done, len(files))


def text_file_documents(file: Path) -> Iterator[bytes]:
    """Chunks of whole paragraphs whose ends depend on the paragraphs' own text.

    So the same text yields the same documents wherever it stands in a file. Some may be empty.
    """
    chunk = ""
    for paragraph in _paragraphs(file):
        chunk += paragraph
        if _hash(encode(paragraph))[0] % CHUNK_ONE_IN == 0 or len(chunk) >= CHUNK_LIMIT:
            yield encode(chunk.strip())
            chunk = ""
    yield encode(chunk.strip())


def _paragraphs(file: Path) -> Iterator[str]:
    """Lines up to and with a blank one, or up to the limit for text without any."""
    paragraph = ""
    with file.open(encoding="utf-8", errors="replace") as stream:
        while line := stream.readline(PARAGRAPH_LIMIT):
            paragraph += line.replace("\0", "")
            if not line.strip() or len(paragraph) >= PARAGRAPH_LIMIT:
                yield paragraph
                paragraph = ""
    yield paragraph


# -- the cache -------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class _Record:
    """What a sidecar says of its file."""

    blake3: str
    size: int
    documents: int


def _cached(
    path: Path, produce: Callable[[], Iterable[bytes]], end: bytes = DOCUMENT_END
) -> Corpus:
    """The file at ``path`` if it is there and intact, else made of ``produce()``.

    ``end`` is written behind each document.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let one process build; released by closing
            record = _intact(path)
            if record is None:
                record = _write(path, produce(), end)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise operator_error(
            "E402" if full else "E601",
            f"cannot keep the corpus at {path}",
            why=error.strerror or str(error),
            fix="free some disk space, or set XDG_CACHE_HOME to a folder that can be written",
        ) from error
    return Corpus(path, record.blake3, record.size, record.documents)


def _intact(path: Path) -> _Record | None:
    try:
        record = _Record(**json.loads(path.with_suffix(".json").read_bytes()))
        if path.stat().st_size == record.size:
            found = blake3().update_mmap(path) if record.size else blake3()
            return record if found.hexdigest() == record.blake3 else None
    except (FileNotFoundError, ValueError, TypeError):
        pass  # not there yet, or not ours to trust: build it again
    return None


def _write(path: Path, documents: Iterable[bytes], end: bytes) -> _Record:
    hasher, size, count = blake3(), 0, 0
    with _replacing(path) as file:
        for document in documents:
            hasher.update(document + end)
            file.write(document + end)
            size += len(document) + len(end)
            count += 1
    record = _Record(hasher.hexdigest(), size, count)
    with _replacing(path.with_suffix(".json")) as file:
        file.write(json.dumps(asdict(record)).encode())
    return record


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends well, and vanishes otherwise."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(name, path)
    except BaseException:  # also Ctrl-C: leave no half-written file behind
        os.unlink(name)
        raise
