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
import json
import os
import re
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from bootstrap.manifest import Data
from node.errors import operator_error
from node.trainer.data import DOCUMENT_END, encode

FORMAT = 1  # of the cached files; part of their names
HELD_OUT_ONE_IN = 20
MIN_PASSAGE = 64  # bytes; shorter ones are common phrases
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

    def make_shard(self, sequences: int, seq_len: int) -> bytes:
        """The evaluation shard: up to ``sequences`` windows, spread over the held-out documents.

        It has n * (seq_len + 1) bytes for some 1 <= n <= sequences; windows do not overlap.
        Raises OperatorError E601 when the held-out documents fill no window.
        """
        held_out = (document for document in self if is_held_out(document))
        joined = b"".join(d + DOCUMENT_END for d in sorted(held_out, key=_hash))
        length = seq_len + 1
        count = min(sequences, len(joined) // length)
        if count < 1:
            raise operator_error(
                "E601",
                "the corpus is too small to set an evaluation shard apart",
                why=f"{self.size:,} bytes in {self.documents} documents leave {len(joined)} bytes "
                f"for it, and one sequence needs {length} ({self.path})",
                fix=MORE_TEXT,
            )
        starts = [i * (len(joined) - length) // max(1, count - 1) for i in range(count)]
        return b"".join(joined[start : start + length] for start in starts)

    def training_file(self, shard: bytes, seq_len: int) -> Path:
        """The cached file of training tokens: every document not held out and not in ``shard``.

        Raises OperatorError E601 when that is fewer than two sequences.
        """
        key = blake3(shard + seq_len.to_bytes(4, "little")).hexdigest()[:16]
        passages = _passages(shard, seq_len)

        def kept() -> Iterator[bytes]:
            for document in self:
                if not is_held_out(document) and not any(p in document for p in passages):
                    yield document

        name = f"tokens-{FORMAT}-{self.digest[:16]}-{key}.bin"
        tokens = _cached(self.path.with_name(name), kept)
        if tokens.size < 2 * seq_len:
            raise operator_error(
                "E601",
                "too little training text",
                why=f"{self.documents} documents, less those for evaluation, have {tokens.size} "
                f"bytes; two sequences need {2 * seq_len} ({self.path})",
                fix=MORE_TEXT,
            )
        return tokens.path


def _passages(shard: bytes, seq_len: int) -> list[bytes]:
    """The pieces of the shard's windows that lie in one document, short ones left out."""
    length = seq_len + 1
    windows = [shard[i : i + length] for i in range(0, len(shard), length)]
    pieces = [piece for window in windows for piece in window.split(DOCUMENT_END)]
    return [piece for piece in pieces if len(piece) >= min(seq_len, MIN_PASSAGE)]


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
            found += [f for f in inside if not f.name.startswith(".") and not _text_problem(f)]
        elif problem := _text_problem(place):
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


def _text_problem(file: Path) -> str:
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
    """Chunks of whole paragraphs whose ends depend on the paragraphs' own text.

    So the same text yields the same documents wherever it stands in a file.
    """
    for done, file in enumerate(files, 1):
        chunk = ""
        for paragraph in _paragraphs(file):
            chunk += paragraph
            if _hash(encode(paragraph))[0] % CHUNK_ONE_IN == 0 or len(chunk) >= CHUNK_LIMIT:
                yield encode(chunk.strip())
                chunk = ""
                progress(done - 1, len(files))  # who asked may want it no more
        yield encode(chunk.strip())
        progress(done, len(files))


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


def _cached(path: Path, produce: Callable[[], Iterable[bytes]]) -> Corpus:
    """The file at ``path`` if it is there and intact, else made of ``produce()``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let one process build; released by closing
            record = _intact(path)
            if record is None:
                record = _write(path, produce())
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


def _write(path: Path, documents: Iterable[bytes]) -> _Record:
    hasher, size, count = blake3(), 0, 0
    with _replacing(path) as file:
        for document in documents:
            hasher.update(document + DOCUMENT_END)
            file.write(document + DOCUMENT_END)
            size += len(document) + 1
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
