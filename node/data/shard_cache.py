"""Files by sha256 on this machine, of bounded size: what was not used for longest goes first.

A file is checked against its hash before it is used; one with another hash is fetched again, and
after some tries refused. A server that does not answer is asked again for some minutes. The
processes of a machine share a cache, so only one of them fetches.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from node.data.cached_file import new_draft, sweep
from node.data.patience import Patience, is_full
from node.errors import operator_error, reason
from protocols.errors import OperatorError

logger = logging.getLogger(__name__)

TRIES = 3
INDEX_COPY = ".index-"  # how the name of a folder's index begins, which stays and is small
COPY_BYTES = 4 * 1024 * 1024


class FileSource(Protocol):
    """Where files come from. What cannot be read is an OperatorError E603, by its cause."""

    @property
    def place(self) -> str: ...

    def opening(self, name: str) -> AbstractContextManager[BinaryIO]: ...


class ShardCache:
    """Files by sha256 in one folder; those used least recently go first. For several processes."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory, self.max_bytes = directory, max_bytes
        self.fetched = 0  # files, by this process
        self._checked: set[str] = set()

    def get(self, source: FileSource, name: str, sha256: str, size: int) -> Path:
        """The file, fetched if it is not there.

        Raises OperatorError E603 (not to be had for minutes, or with another hash again and
        again), E402.
        """
        path = self.directory / sha256
        with (
            self._keeping(),
            self._locked(f".lock-{sha256[:2]}"),
        ):  # one fetches a file, others wait
            if self._intact(path, sha256, size):
                return path
            left, patience = TRIES, Patience()
            while left:
                try:
                    if self._fetch(source, name, path, sha256, size):
                        self._checked.add(sha256)
                        return path
                    left -= 1
                except OperatorError as error:
                    if is_full(error.__cause__) and self._give_way(size):
                        continue
                    if error.code != "E603" or not patience.wait(error):
                        raise
        raise operator_error(
            "E603",
            f"{source.place}/{name} has another hash than its index says",
            why=f"{TRIES} fetches of it, and none was the file with sha256 {sha256[:16]}…",
        )

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        """What this machine's disk refuses, as OperatorError E402."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            raise operator_error(
                "E402",
                f"no room for training data in {self.directory}",
                why=reason(error),
                fix="free some disk space, or allow less with --data-cache",
            ) from error

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Alone among all threads and processes that use the cache."""
        with (self.directory / name).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by closing
            yield

    def _intact(self, path: Path, sha256: str, size: int) -> bool:
        """Whether the file is there, which notes its use; each process checks its hash once."""
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != size:
                    return False
                if sha256 not in self._checked:
                    if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                        return False
                    self._checked.add(sha256)
                note_used(file.fileno())
        except FileNotFoundError:  # others may throw it out at any time
            return False
        return True

    def _make_room(self, size: int) -> tuple[int, str]:
        """Throw out what was not used for longest; an open draft that holds the room meanwhile."""
        if size > self.max_bytes:
            raise operator_error(
                "E603",
                "the data cache is too small",
                why=f"a file of {size:,} bytes does not fit into {self.max_bytes:,}",
                fix="allow it more with --data-cache",
            )
        with self._locked(".lock"):
            held, files = self._held()
            self._throw_out(files, held + size - self.max_bytes)
            handle, name = new_draft(self.directory)
            os.truncate(handle, size)
            return handle, name

    def _give_way(self, size: int) -> bool:
        """The disk is full of other things: throw out as much as is to come; False: nothing is."""
        with self._locked(".lock"):
            return self._throw_out(self._held()[1], size)

    def _held(self) -> tuple[int, list[tuple[os.stat_result, Path]]]:
        """Bytes of all files, and those that are whole, in the order of their last use."""
        sweep(self.directory)
        held, files = 0, []
        for file in self.directory.iterdir():
            if file.name.startswith(INDEX_COPY):
                continue
            try:
                status = file.stat()
            except FileNotFoundError:  # given up, or a person is tidying up
                continue
            held += status.st_size  # drafts of others count
            if file.name[0] != ".":
                files.append((status, file))
        return held, sorted(files, key=lambda known: known[0].st_mtime_ns)

    def _throw_out(self, files: list[tuple[os.stat_result, Path]], size: int) -> bool:
        """Remove files, the first ones first, until ``size`` bytes are free; whether any was."""
        before = size
        for status, file in files:
            if size <= 0:
                break
            size -= status.st_size
            file.unlink(missing_ok=True)
            self._checked.discard(file.name)
        return size < before

    def _fetch(self, source: FileSource, name: str, path: Path, sha256: str, size: int) -> bool:
        """Whether what came is the file; no more than ``size`` bytes and a bit are taken."""
        hasher = hashlib.sha256()
        length = 0
        draft = ""
        try:
            with self._keeping():
                handle, draft = self._make_room(size)
                with os.fdopen(handle, "wb") as out, source.opening(name) as incoming:
                    while length <= size and (piece := incoming.read(COPY_BYTES)):
                        length += len(piece)
                        hasher.update(piece)
                        out.write(piece)
                    out.flush()
                    note_used(out.fileno())
                    if length != size or hasher.hexdigest() != sha256:
                        return False
                    with self._locked(".lock"):  # whoever counts what is held sees it once
                        os.replace(draft, path)  # it is still open, or somebody would sweep it
            self.fetched += 1
            return True
        finally:
            if draft:
                Path(draft).unlink(missing_ok=True)


def note_used(file: int | Path) -> None:
    """Note when; the file system's own clock has steps of milliseconds.

    Raises FileNotFoundError; where the disk takes no notes, files go in the order of before.
    """
    now = time.time_ns()
    try:
        os.utime(file, ns=(now, now))
    except FileNotFoundError:
        raise
    except OSError as error:
        logger.debug("cannot note the use of %s: %s", file, error)
