"""Files that are made once and kept in the user's cache folder.

A sidecar records count and hash: a file that has changed is made again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3

from node.errors import cannot_write
from protocols.files import replacing, user_home

CACHE_FIX = "free some disk space, or set XDG_CACHE_HOME to a folder that can be written"
HOME_FIX = "set XDG_CACHE_HOME to a folder that can be written, or HOME"


def cache_folder() -> Path:
    """Where corpora are kept: ``$XDG_CACHE_HOME/atoll``, by default ``~/.cache/atoll``.

    Raises OperatorError E601 where this user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the specification says to ignore a relative path
        return Path(base) / "atoll"
    try:
        return user_home() / ".cache" / "atoll"
    except OSError as error:
        raise cannot_write("there is no folder to keep corpora in", error, fix=HOME_FIX) from error


@dataclass(frozen=True)
class Record:
    """What a sidecar says of its file."""

    blake3: str
    size: int
    documents: int
    left_out: int = 0  # of what it was made of, in the maker's unit


def cached(
    path: Path,
    produce: Callable[[], Iterable[bytes]],
    end: bytes,
    left_out: Callable[[], int],
) -> Record:
    """The file at ``path`` if it is there and intact, else made of ``produce()``.

    ``end`` is written behind each document. ``left_out`` is asked at the end, for the record.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let one process build; released by closing
            record = intact(path)
            if record is None:
                record = write(path, produce(), end, left_out)
    except OSError as error:
        what = f"cannot keep the corpus at {path}"
        raise cannot_write(what, error, fix=CACHE_FIX, full_fix=CACHE_FIX) from error
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


def write(
    path: Path,
    documents: Iterable[bytes],
    end: bytes = b"",
    left_out: Callable[[], int] = lambda: 0,
) -> Record:
    """A file of documents, each with ``end`` behind it, and its sidecar. Raises OSError."""
    hasher, size, count = blake3(), 0, 0
    with replacing(path) as file:
        for document in documents:
            hasher.update(document + end)
            file.write(document + end)
            size += len(document) + len(end)
            count += 1
    record = Record(hasher.hexdigest(), size, count, left_out())
    with replacing(path.with_suffix(".json")) as file:
        file.write(json.dumps(asdict(record)).encode())
    return record
