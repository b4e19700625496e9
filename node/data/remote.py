"""Reading token folders: from this machine, or from a web server or object store by fsspec.

Files that are not on this machine come through a cache of bounded size: the one that was not used
for longest goes when room is needed. A file is named by its sha256 and checked against it before
it is used; one with another hash is fetched again, and after some tries refused. A server that does
not answer is asked again for some minutes. The ranks of an island share the cache, so only one of
them fetches.

What is read at one time should lie in few files: a run over remote data sets ``data.pool_windows``
(see :mod:`node.trainer.sampler`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import math
import os
import tempfile
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np
import numpy.typing as npt

from node.data.folder import INDEX, MAX_INDEX_BYTES, Index, Shard, parse_index
from node.data.tokenizer import BYTES, FILE, MAX_TOKENIZER_BYTES
from node.errors import operator_error, reason
from protocols.errors import OperatorError

logger = logging.getLogger(__name__)

TRIES = 3
# a server that is away, or the way to it: how long it is asked again, less than half of the time
# that the other ranks wait for this one, since whoever fetched ahead may have asked as long before
PATIENCE_S = 240.0
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0
FULL = (errno.ENOSPC, errno.EDQUOT)  # this machine's disk
GONE = (404, 410)  # a web server's word for: there is no such file
NOW_OR_NEVER = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
COPY_BYTES = 4 * 1024 * 1024
DEFAULT_CACHE_BYTES = 20 * 10**9
DRAFT = ".fetching-"
ABANDONED_S = 3600.0  # without a byte written
MAPPED = 64  # files of one process
NOTED_S = 5.0  # between notes that a mapped file is in use


class Folder:
    """A token folder at a path or URL. Raises OperatorError E603 where there is none.

    ``cache`` is where files of a URL are kept, at most ``cache_bytes`` of them.
    """

    def __init__(
        self, place: str, cache: Path | None = None, cache_bytes: int = DEFAULT_CACHE_BYTES
    ) -> None:
        self.place = place.rstrip("/")
        self.remote = "://" in place
        self._cache = ShardCache(cache, cache_bytes) if self.remote and cache is not None else None
        self.cache_bytes = cache_bytes if self._cache is not None else 0
        self.index: Index = parse_index(self.read(INDEX, MAX_INDEX_BYTES), place)

    def read(self, name: str, limit: int) -> bytes:
        """A small file's bytes; raises E603 where it has more than ``limit``."""
        with self._opening(name) as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise operator_error(
                "E603", f"{self.place}/{name} is too long", why=f"it has more than {limit} bytes"
            )
        return data

    def tokenizer(self) -> bytes:
        """The bytes of its tokenizer file; empty for ``bytes``."""
        return b"" if self.index.tokenizer == BYTES else self.read(FILE, MAX_TOKENIZER_BYTES)

    def file(self, name: str, sha256: str, size: int) -> Path:
        """A file on this machine, of the size that the index says.

        One of a URL has been checked against its hash. Raises OperatorError E603, E402.
        """
        if self.remote:
            if self._cache is None:
                raise ValueError("files of a URL need a cache")
            return self._cache.get(self, name, sha256, size)
        path = Path(self.place, name)
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            why = "it is missing" if found is None else f"it has {found} bytes instead of {size}"
            raise operator_error("E603", f"{path} cannot be used", why=why)
        return path

    def has(self, shard: Shard, *, used: bool = False) -> bool:
        """Whether a file of tokens is on this machine; ``used``: note that it is in use."""
        if self._cache is None:
            return True
        try:
            path = self._cache.directory / shard.sha256
            _used(path) if used else path.stat()
        except FileNotFoundError:
            return False
        return True

    def tokens(self, shard: Shard) -> npt.NDArray[np.integer[Any]]:
        """A file's tokens, mapped."""
        width = self.index.width
        kind = np.dtype(self.index.dtype).newbyteorder("<")
        if not shard.tokens:
            return np.empty(0, kind)
        for _ in range(TRIES):
            path = self.file(shard.name, shard.sha256, shard.tokens * width)
            try:
                return np.memmap(path, dtype=kind, mode="r")
            except FileNotFoundError:  # another rank made room just now
                continue
        raise operator_error(
            "E603", "the data cache is too small", why="files go before they are read"
        )

    @contextlib.contextmanager
    def _opening(self, name: str) -> Iterator[BinaryIO]:
        where = f"{self.place}/{name}"
        try:
            if self.remote:
                import fsspec

                with fsspec.open(where, "rb") as file:
                    yield file
            else:
                with open(where, "rb") as file:
                    yield file
        except OperatorError:
            raise
        except ImportError as error:  # fsspec says which library the protocol needs
            raise operator_error(
                "E605", f"cannot read {where}", why=str(error), fix="install that library"
            ) from error
        except Exception as error:  # every file system has errors of its own
            if _is_full(error):
                raise  # ours, while copying
            met = _met(error)
            raise operator_error("E603", f"cannot read {where}", why=_text(met)) from met


def _met(error: Exception) -> Exception:
    """What was met: fsspec says of a web server's every error that there is no such file."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and _of_a_server(cause):
        return error if getattr(cause, "status", None) in GONE else cause
    return error


def _of_a_server(error: BaseException | None) -> TypeGuard[Exception]:
    # of connections and of bodies, which are of no common kind with others
    return isinstance(error, Exception) and type(error).__module__.startswith("aiohttp.")


def _passes(error: BaseException | None) -> bool:
    """Whether what could not be read may be there in a moment."""
    if isinstance(status := getattr(error, "status", None), int):  # a web server's answer
        return status >= 500 or status in (408, 429)
    if isinstance(error, NOW_OR_NEVER) or _is_full(error):
        return False
    return isinstance(error, OSError) or _of_a_server(error)


def _is_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in FULL


def _text(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, NotADirectoryError | IsADirectoryError | PermissionError):
        return reason(error)
    return f"{type(error).__name__}: {error}"[:500]


class ShardCache:
    """Files by sha256 in one folder; those used least recently go first. For several processes."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory, self.max_bytes = directory, max_bytes
        self.fetched = 0  # files, by this process
        self._checked: set[str] = set()

    def get(self, folder: Folder, name: str, sha256: str, size: int) -> Path:
        """The file, fetched if it is not there.

        Raises OperatorError E603 (not to be had for minutes, or with another hash again and
        again), E402.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / sha256
        with self._locked(f".lock-{sha256[:2]}"):  # one fetches a file, others wait for it
            if self._intact(path, sha256, size):
                return path
            left, pause, end = TRIES, FIRST_PAUSE_S, time.monotonic() + PATIENCE_S
            while left:
                try:
                    if self._fetch(folder, name, path, sha256, size):
                        self._checked.add(sha256)
                        return path
                    left -= 1
                except OperatorError as error:
                    if _is_full(error.__cause__) and self._give_way(size):
                        continue
                    passes = error.code == "E603" and _passes(error.__cause__)
                    if not passes or time.monotonic() + pause > end:
                        raise
                    logger.warning("%s: %s; again in %.0f s", error.what, error.why, pause)
                    time.sleep(pause)
                    pause = min(2 * pause, LAST_PAUSE_S)
        raise operator_error(
            "E603",
            f"{folder.place}/{name} has another hash than its index says",
            why=f"{TRIES} fetches of it, and none was the file with sha256 {sha256[:16]}…",
        )

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
                _used(file.fileno())
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
            handle, name = tempfile.mkstemp(dir=self.directory, prefix=DRAFT)
            os.truncate(handle, size)
            return handle, name

    def _give_way(self, size: int) -> bool:
        """The disk is full of other things: throw out as much as is to come; False: nothing is."""
        with self._locked(".lock"):
            return self._throw_out(self._held()[1], size)

    def _held(self) -> tuple[int, list[tuple[os.stat_result, Path]]]:
        """Bytes of all files, and those that are whole, in the order of their last use."""
        held, files = 0, []
        for file in self.directory.iterdir():
            try:
                status = file.stat()
            except FileNotFoundError:  # given up, or a person is tidying up
                continue
            if file.name.startswith(DRAFT) and status.st_mtime < time.time() - ABANDONED_S:
                file.unlink(missing_ok=True)  # whoever wrote it was killed
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

    def _fetch(self, folder: Folder, name: str, path: Path, sha256: str, size: int) -> bool:
        """Whether what came is the file; no more than ``size`` bytes and a bit are taken."""
        hasher = hashlib.sha256()
        length = 0
        draft = ""
        try:
            handle, draft = self._make_room(size)
            with os.fdopen(handle, "wb") as out, folder._opening(name) as incoming:
                while length <= size and (piece := incoming.read(COPY_BYTES)):
                    length += len(piece)
                    hasher.update(piece)
                    out.write(piece)
                out.flush()
                _used(out.fileno())
            if length != size or hasher.hexdigest() != sha256:
                return False
            with self._locked(".lock"):  # whoever counts what is held sees it once
                os.replace(draft, path)
            self.fetched += 1
            return True
        except OSError as error:
            raise operator_error(
                "E402",
                f"no room for training data in {self.directory}",
                why=error.strerror or str(error),
                fix="free some disk space, or allow less with --data-cache",
            ) from error
        finally:
            if draft:
                Path(draft).unlink(missing_ok=True)


def _used(file: int | Path) -> None:
    """Note when; the file system's own clock has steps of milliseconds."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))


class FolderTokens:
    """The training tokens of a folder as one sequence; see node.trainer.data.TokenSource."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._starts = [0, *accumulate(shard.tokens for shard in folder.index.shards)]
        self._open: OrderedDict[int, npt.NDArray[np.integer[Any]]] = OrderedDict()
        self._noted: dict[int, float] = {}  # when it was last noted that a file is in use

    def __len__(self) -> int:
        return self._starts[-1]

    def window(self, start: int, length: int) -> npt.NDArray[np.integer[Any]]:
        """Tokens ``[start, start + length)``, out of one file or several.

        Raises OperatorError E603 where a file cannot be had.
        """
        if not 0 <= start <= start + length <= len(self):
            raise ValueError(f"no tokens {start} to {start + length} of {len(self)}")
        pieces = []
        number = bisect_right(self._starts, start) - 1
        while length:
            inside = start - self._starts[number]
            piece = self._shard(number)[inside : inside + length]
            pieces.append(piece)
            start, length, number = start + len(piece), length - len(piece), number + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    @property
    def cache_bytes(self) -> int:
        """What the cache of a folder at a URL holds; 0 for one on this machine."""
        return self._folder.cache_bytes

    def files(self, starts: npt.NDArray[np.int64], length: int) -> list[int]:
        """The files, by number, of windows of ``length`` tokens: in order, each once."""
        found: dict[int, None] = {}
        for start in starts.tolist():
            first = bisect_right(self._starts, start) - 1
            last = bisect_right(self._starts, start + length - 1) - 1
            found |= dict.fromkeys(range(first, last + 1))
        return list(found)

    def size_of(self, number: int) -> int:
        """Bytes of a file."""
        return self._folder.index.shards[number].tokens * self._folder.index.width

    def fetch(self, number: int) -> None:
        """Have a file on this machine; from any thread. Raises OperatorError E603, E402."""
        shard = self._folder.index.shards[number]
        self._folder.file(shard.name, shard.sha256, self.size_of(number))

    def _shard(self, number: int) -> npt.NDArray[np.integer[Any]]:
        if self.cache_bytes:
            self._look_over(number)
        if number not in self._open:
            self._open[number] = self._folder.tokens(self._folder.index.shards[number])
            if len(self._open) > MAPPED:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]

    def _look_over(self, used: int) -> None:
        """Let the cache know what is in use, and let go of what it has thrown out.

        A file that is mapped takes room on the disk until then, and more than the cache may have.
        """
        now, shards = time.monotonic(), self._folder.index.shards
        if now - self._noted.get(used, -math.inf) > NOTED_S:
            self._noted[used] = now
            for number in list(self._open):
                if not self._folder.has(shards[number], used=number == used):
                    del self._open[number]
        if used not in self._open and not self._folder.has(shards[used]):
            self._open.clear()  # for a file that comes others may have to make way
