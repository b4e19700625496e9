"""Files by sha256 on this machine, of bounded size: what was not used for longest goes first.

A file is checked against its hash before it is used; one with another hash is fetched again, and
after some tries refused. A server that does not answer, or breaks off, is asked again for some
minutes, and as long again after each progress, and so is a disk that is full; what came stays, also
when this process is killed (:mod:`node.data.partial_file`). The processes of a machine share a
cache, so only one of them fetches.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from node.data.opened import Opened
from node.data.partial_file import COPY_BYTES, PART, PartialFile, bytes_held, remove
from node.data.patience import Patience
from node.errors import cannot_write, operator_error
from protocols.errors import OperatorError, is_full
from protocols.files import sweep

logger = logging.getLogger(__name__)

TRIES = 3
INDEX_COPY = ".index-"  # how the name of a folder's index begins, which stays and is small
PROGRESS_BYTES = 1 << 20  # of a file, with each of which patience begins anew


class FileSource(Protocol):
    """Where files come from. What cannot be read raises OperatorError E603, from its cause."""

    @property
    def place(self) -> str: ...

    def opening(
        self, name: str, start: int = 0, version: str = ""
    ) -> AbstractContextManager[Opened]: ...


class ShardCache:
    """Files by sha256 in one folder; those used least recently go first. For several processes."""

    def __init__(self, directory: Path, max_bytes: int, *, full_passes: bool = True) -> None:
        """``full_passes``: see :class:`node.data.patience.Patience`."""
        self.directory, self.max_bytes = directory, max_bytes
        self._full_passes = full_passes
        self.fetched = 0  # files, by this process
        self._checked: set[str] = set()

    def get(self, source: FileSource, name: str, sha256: str, size: int) -> Path:
        """The file, fetched if it is not there.

        Raises OperatorError E603 (not to be had for minutes, or with another hash again and
        again), E402 (a disk that is full for minutes).
        """
        part = PartialFile(self.directory, sha256, size)
        patience = Patience(full_passes=self._full_passes)
        while True:
            try:
                return self._got(source, name, part, patience)
            except OperatorError as error:  # no lock is held: others may try meanwhile
                if error.code != "E402" or not patience.wait(error):
                    raise

    def _got(self, source: FileSource, name: str, part: PartialFile, patience: Patience) -> Path:
        sha256, size = part.sha256, part.size
        path = self.directory / sha256
        with self._keeping():
            if self._intact(path, sha256, size):  # whatever is being fetched
                return path
        with (
            self._keeping(),
            self._locked(f".lock-{sha256[:2]}"),
        ):  # one fetches a file, others wait
            if self._intact(path, sha256, size):
                return path
            left, before = TRIES, -1
            while left:
                failure: OperatorError | None = None
                try:
                    ended = self._fetch(source, name, path, part)
                    if ended is None:
                        self._checked.add(sha256)
                        return path
                    # an answer without a length breaks off like this, anywhere; a file that is
                    # too short ends at the same place each time
                    if ended >= size or ended == before:
                        left -= 1
                    else:
                        failure = operator_error(
                            "E603",
                            f"cannot read {source.place}/{name}",
                            why=f"it ended after {ended:,} of {size:,} bytes",
                        )
                        failure.__cause__ = ConnectionError("broken off")  # so that it may pass
                    before = ended
                except OperatorError as error:
                    failure = error
                    if is_full(error.__cause__) and self._give_way(part):
                        continue
                patience.got_to((part.length // PROGRESS_BYTES,))
                if failure is not None and (failure.code != "E603" or not patience.wait(failure)):
                    raise failure
        raise operator_error(
            "E603",
            f"{source.place}/{name} has another hash than its index says",
            why=f"{TRIES} fetches of it, and none was the file with sha256 {sha256[:16]}…",
        )

    def headway(self) -> int:
        """Another number whenever more of a file is here, whichever process fetches it."""
        found = 0
        for part in self.directory.glob(f"{PART}*"):
            with contextlib.suppress(OSError):  # complete, or given up
                found = max(found, part.stat().st_mtime_ns)
        return found

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        """What this machine's disk refuses, as OperatorError E402 if it is full, E601 else."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            raise cannot_write(
                f"cannot keep training data in {self.directory}",
                error,
                full_fix="free some disk space, or allow less with --data-cache",
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

    def _make_room(self, part: PartialFile) -> None:
        """Throw out what was not used for longest, and open the file, which holds the room.

        What others are fetching stays: what they do together may not fit. To wait for them would
        gain nothing where each of their files is thrown out again before it is read.
        """
        if part.size > self.max_bytes:
            raise operator_error(
                "E603",
                "the data cache is too small",
                why=f"a file of {part.size:,} bytes does not fit into {self.max_bytes:,}",
                fix="allow it more with --data-cache",
            )
        with self._locked(".lock"):
            part.open()
            held, files = self._held()
            self._throw_out(files, held - self.max_bytes)

    def _give_way(self, part: PartialFile) -> bool:
        """The disk is full of other things: throw out as much as is to come; False: nothing is."""
        with self._locked(".lock"):
            files = [one for one in self._held()[1] if one[1] != part.path]
            return self._throw_out(files, part.size - part.length)

    def _held(self) -> tuple[int, list[tuple[os.stat_result, Path]]]:
        """Bytes of all files, and those that nobody writes, in the order of their last use."""
        sweep(self.directory)
        held, files = 0, []
        for file in self.directory.iterdir():
            if file.name.startswith(INDEX_COPY):
                continue
            partial = file.name.startswith(PART)
            try:
                status = file.stat()
                if not stat.S_ISREG(status.st_mode):  # parts of a stream lie in a folder beside
                    continue
                size, busy = bytes_held(file) if partial else (status.st_size, False)
            except FileNotFoundError:  # given up, or a person is tidying up
                continue
            held += size
            if not busy if partial else file.name[0] != ".":
                files.append((status, file))
        return held, sorted(files, key=lambda known: known[0].st_mtime_ns)

    def _throw_out(self, files: list[tuple[os.stat_result, Path]], size: int) -> bool:
        """Remove files, the first ones first, until ``size`` bytes are free; whether any was."""
        before = size
        for status, file in files:
            if size <= 0:
                break
            size -= status.st_size
            if file.name.startswith(PART):
                remove(file)
            else:
                file.unlink(missing_ok=True)
                self._checked.discard(file.name)
        return size < before

    def _fetch(self, source: FileSource, name: str, path: Path, part: PartialFile) -> int | None:
        """None where what came is the file, else how long it is; hardly more than its size."""
        with self._keeping(), contextlib.closing(part):
            self._make_room(part)
            have = part.resume()
            if have < part.size or not have:
                with source.opening(name, have, part.version or "") as found:
                    if not have or found.start != have:
                        part.begin(found.version)
                    while part.length <= part.size and (piece := found.file.read(COPY_BYTES)):
                        part.add(piece)
            if not part.intact:
                ended = part.length
                if ended >= part.size or ended == have:  # nothing to go on from
                    part.drop()
                return ended
            note_used(part.path)
            with self._locked(".lock"):  # or it could be counted twice, under both names
                part.become(path)
        self.fetched += 1
        return None


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
