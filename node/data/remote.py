"""Reading token folders: from this machine, or from a web server or object store by fsspec.

Files that are not on this machine come through a cache (:mod:`node.data.shard_cache`).

What is read at one time should lie in few files: a run over remote data sets ``data.pool_windows``
(see :mod:`node.trainer.sampler`).
"""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from node.data.folder import INDEX, MAX_INDEX_BYTES, Index, Shard, check_finished, parse_index
from node.data.opened import Opened, opened
from node.data.patience import Patience, met, passes
from node.data.shard_cache import INDEX_COPY, TRIES, ShardCache, note_used
from node.data.tokenizer import BYTES, FILE, MAX_TOKENIZER_BYTES
from node.errors import operator_error
from node.setting_values import is_url
from protocols.errors import OperatorError, is_full, kind_and_reason, reason
from protocols.files import replacing

DEFAULT_CACHE_BYTES = 20 * 10**9
MAPPED = 64  # files of one process
NOTED_S = 5.0  # between notes that a mapped file is in use


class Folder:
    """A token folder at a path or URL. Raises OperatorError E603 where there is none.

    ``cache`` is where files of a URL are kept, at most ``cache_bytes`` of them, and a copy of its
    index, for when the server is away. ``known``: a run trains on it, so that the copy is as good
    as what is there now, and a full disk is waited for.
    """

    def __init__(
        self,
        place: str,
        cache: Path | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        *,
        known: bool = False,
    ) -> None:
        self.place = place.rstrip("/")
        self.remote = is_url(place)
        self._cache = None
        if self.remote and cache is not None:
            self._cache = ShardCache(cache, cache_bytes, full_passes=known)
        self.cache_bytes = cache_bytes if self._cache is not None else 0
        if not self.remote:
            check_finished(Path(self.place))
        self.index: Index = self._read_index(known=known)

    def _read_index(self, *, known: bool) -> Index:
        if self._cache is None:
            return self._fetch_index()
        copy = self._cache.directory / f"{INDEX_COPY}{blake3(self.place.encode()).hexdigest()}"
        if known and (kept := _kept_index(copy)) is not None:
            return kept
        patience = Patience()
        while True:
            try:
                index = self._fetch_index()
            except OperatorError as error:
                kept = _kept_index(copy) if passes(error.__cause__) else None
                if kept is not None:
                    return kept
                if not known or not patience.wait(error):  # a new place may be a wrong one
                    raise
            else:
                _keep_index(copy, index)
                return index

    def _fetch_index(self) -> Index:
        return parse_index(self.read(INDEX, MAX_INDEX_BYTES), self.place)

    def read(self, name: str, limit: int) -> bytes:
        """A small file's bytes; raises E603 where it has more than ``limit``."""
        data = bytearray()
        with self.opening(name) as found:
            while len(data) <= limit and (piece := found.file.read(limit + 1 - len(data))):
                data += piece
        if len(data) > limit:
            raise operator_error(
                "E603", f"{self.place}/{name} is too long", why=f"it has more than {limit} bytes"
            )
        return bytes(data)

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

    @property
    def headway(self) -> int:
        """Another number whenever more of a file has come to this machine."""
        return 0 if self._cache is None else self._cache.headway()

    def has(self, shard: Shard, *, used: bool = False) -> bool:
        """Whether a file of tokens is on this machine; ``used``: note that it is in use."""
        if self._cache is None:
            return True
        try:
            path = self._cache.directory / shard.sha256
            note_used(path) if used else path.stat()
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
    def opening(self, name: str, start: int = 0, version: str = "") -> Iterator[Opened]:
        """A file of the folder, from byte ``start`` on if that version of it can be had so.

        Raises OperatorError E603, and E605 where a library is missing.
        """
        where = f"{self.place}/{name}"
        try:
            if self.remote:
                with opened(where, start, version) as found:
                    yield found
            else:
                with open(where, "rb") as file:
                    yield Opened(file)
        except OperatorError:
            raise
        except ImportError as error:  # fsspec says which library the protocol needs
            raise operator_error(
                "E605", f"cannot read {where}", why=str(error), fix="install that library"
            ) from error
        except Exception as error:  # every file system has errors of its own
            if is_full(error):
                raise  # ours, while copying
            cause = met(error)
            raise operator_error("E603", f"cannot read {where}", why=_text(cause)) from cause


def _keep_index(copy: Path, index: Index) -> None:
    with contextlib.suppress(OSError):  # then it is fetched again
        copy.parent.mkdir(parents=True, exist_ok=True)
        with replacing(copy) as file:
            file.write(index.model_dump_json().encode())


def _kept_index(copy: Path) -> Index | None:
    """None where there is none that can be used."""
    with contextlib.suppress(OSError, OperatorError), copy.open("rb") as file:
        return parse_index(file.read(MAX_INDEX_BYTES + 1), str(copy))
    return None


def _text(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, NotADirectoryError | IsADirectoryError | PermissionError):
        return reason(error)
    return kind_and_reason(error)


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

    @property
    def headway(self) -> int:
        """Another number whenever more of a file has come to this machine."""
        return self._folder.headway

    def files(self, starts: npt.NDArray[np.int64], length: int) -> list[int]:
        """The files, by number, of windows of ``length`` tokens: in order, each once."""
        firsts = np.searchsorted(self._starts, starts, side="right") - 1
        lasts = np.searchsorted(self._starts, starts + length - 1, side="right") - 1
        found: dict[int, None] = {}
        for first, last in dict.fromkeys(zip(firsts.tolist(), lasts.tolist(), strict=True)):
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

        Until it is unmapped, a file that was thrown out takes room on the disk beyond the cache's.
        """
        now, shards = time.monotonic(), self._folder.index.shards
        if now - self._noted.get(used, -math.inf) > NOTED_S:
            self._noted[used] = now
            for number in list(self._open):
                if not self._folder.has(shards[number], used=number == used):
                    del self._open[number]
        if used not in self._open and not self._folder.has(shards[used]):
            self._open.clear()  # or the cache could not free their room for a new file
