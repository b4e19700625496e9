"""A file that is being fetched, kept as far as it has come, so that the next fetch goes on there.

``.part-SHA256-SIZE`` has its first bytes, and a lock while they are written; ``.version-…`` says
how to ask for the rest of the same version. Without it that cannot be had, and the next fetch
begins anew. Whether the rest was of the same version only the hash of the whole file tells.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from typing import BinaryIO

PART, VERSION = ".part-", ".version-"
MAX_VERSION_BYTES = 8192
COPY_BYTES = 4 * 1024 * 1024


class PartialFile:
    """One file; one process at a time writes it, between :meth:`open` and :meth:`close`."""

    def __init__(self, folder: Path, sha256: str, size: int) -> None:
        """``size``: what it is to have, in bytes."""
        self.sha256, self.size = sha256, size
        self.length = 0  # bytes here and hashed; 0 until :meth:`resume`
        self.path = folder / f"{PART}{sha256}-{size}"
        self._note = _note_of(self.path)
        self._hasher = hashlib.sha256()
        self._file: BinaryIO | None = None

    @property
    def version(self) -> str | None:
        """What to ask with for the rest; see :class:`node.data.opened.Opened`."""
        try:
            with self._note.open("rb") as note:
                return note.read(MAX_VERSION_BYTES).decode("ascii")
        except (FileNotFoundError, ValueError):
            return None

    @property
    def intact(self) -> bool:
        """Whether what was written is the file."""
        return self.length == self.size and self._hasher.hexdigest() == self.sha256

    def open(self) -> None:
        """Make it if need be; until closed it counts with its full size (:func:`bytes_held`)."""
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        self._file = os.fdopen(handle, "r+b")
        fcntl.flock(handle, fcntl.LOCK_EX)  # released by closing

    def resume(self) -> int:
        """How many bytes are here that a fetch can go on from; they are read and hashed."""
        assert self._file is not None
        self._hasher, self.length = hashlib.sha256(), 0
        there = os.fstat(self._file.fileno()).st_size
        if there <= self.size and self.version is not None:
            while piece := self._file.read(COPY_BYTES):
                self._hasher.update(piece)
                self.length += len(piece)
        return self.length

    def begin(self, version: str | None) -> None:
        """Forget what is here: what comes now is the file's beginning, in this version."""
        assert self._file is not None
        self._note.unlink(missing_ok=True)
        self._file.seek(0)
        self._file.truncate()
        self._hasher, self.length = hashlib.sha256(), 0
        if version is not None:
            self._note.write_bytes(version.encode("ascii"))

    def add(self, piece: bytes) -> None:
        """What comes next."""
        assert self._file is not None
        self._file.write(piece)
        self._hasher.update(piece)
        self.length += len(piece)

    def become(self, path: Path) -> None:
        """Take this name, once it is intact; still locked, so that none removes it as abandoned."""
        assert self._file is not None
        self._file.flush()
        self._note.unlink(missing_ok=True)
        os.replace(self.path, path)

    def close(self) -> None:
        """Keep what has come if a fetch can go on from it, else drop it. No effect if not open."""
        if self._file is None:
            return
        file, self._file = self._file, None
        file.close()
        if self.version is None:
            self.drop()

    def drop(self) -> None:
        """Remove it and its note."""
        self.length = 0
        remove(self.path)


def remove(path: Path) -> None:
    """Remove such a file, and its note; without effect where it is gone."""
    _note_of(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def bytes_held(path: Path) -> tuple[int, bool]:
    """Its bytes on the disk, or its full size while it is being written; and whether it is.

    One without a version, whose writer was killed, is removed. Raises FileNotFoundError.
    """
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(path.name.rpartition("-")[2]), True
        if not _note_of(path).exists():
            path.unlink()
            return 0, False
        return os.fstat(file.fileno()).st_size, False


def _note_of(path: Path) -> Path:
    return path.with_name(path.name.replace(PART, VERSION, 1))
