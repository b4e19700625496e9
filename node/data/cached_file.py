"""Files that are made once, kept in the user's cache folder, and written whole or not at all.

A sidecar records count and hash: a file that has changed is made again. What is being written is
locked by its writer, so that drafts of one that was killed are known, and removed by the next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from node.errors import operator_error

DRAFT = ".draft-"


def cache_folder() -> Path:
    """Where corpora are kept: ``$XDG_CACHE_HOME/atoll``, by default ``~/.cache/atoll``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # the specification says to ignore a relative path
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "atoll"


@dataclass(frozen=True)
class Record:
    """What a sidecar says of its file."""

    blake3: str
    size: int
    documents: int


def cached(path: Path, produce: Callable[[], Iterable[bytes]], end: bytes) -> Record:
    """The file at ``path`` if it is there and intact, else made of ``produce()``.

    ``end`` is written behind each document.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let one process build; released by closing
            record = intact(path)
            if record is None:
                record = write(path, produce(), end)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise operator_error(
            "E402" if full else "E601",
            f"cannot keep the corpus at {path}",
            why=error.strerror or str(error),
            fix="free some disk space, or set XDG_CACHE_HOME to a folder that can be written",
        ) from error
    return record


def intact(path: Path) -> Record | None:
    """What the sidecar says of a file that is as it was written; None for any other."""
    try:
        record = Record(**json.loads(path.with_suffix(".json").read_bytes()))
        if path.stat().st_size == record.size:
            found = blake3().update_mmap(path) if record.size else blake3()
            return record if found.hexdigest() == record.blake3 else None
    except (FileNotFoundError, ValueError, TypeError):
        pass  # not there yet, or not ours to trust: build it again
    return None


def write(path: Path, documents: Iterable[bytes], end: bytes = b"") -> Record:
    """A file of documents, each with ``end`` behind it, and its sidecar. Raises OSError."""
    hasher, size, count = blake3(), 0, 0
    with replacing(path) as file:
        for document in documents:
            hasher.update(document + end)
            file.write(document + end)
            size += len(document) + len(end)
            count += 1
    record = Record(hasher.hexdigest(), size, count)
    with replacing(path.with_suffix(".json")) as file:
        file.write(json.dumps(asdict(record)).encode())
    return record


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends well, and vanishes otherwise."""
    sweep(path.parent)
    handle, name = new_draft(path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a power loss may leave the name and not the bytes
            os.replace(name, path)  # while it is locked: or a sweep could remove it
    except BaseException:  # also Ctrl-C: leave no half-written file behind
        os.unlink(name)
        raise


def new_draft(folder: Path) -> tuple[int, str]:
    """A new empty file, locked as long as it is open: handle and name."""
    while True:
        handle, name = tempfile.mkstemp(dir=folder, prefix=DRAFT)
        with contextlib.suppress(OSError):  # without locks nothing is swept either
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.path.exists(name):
            return handle, name
        os.close(handle)  # swept away before it was locked


def sweep(folder: Path) -> None:
    """Remove the drafts that nobody writes any more: those of processes that were killed."""
    for draft in folder.glob(f"{DRAFT}*"):
        with contextlib.suppress(OSError), draft.open("r+b") as file:  # still written, or gone
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink()
