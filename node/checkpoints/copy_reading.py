"""What copies of checkpoints are at a URL, and how one of them, or a part of it, comes here.

How they are made is :mod:`node.checkpoints.checkpoint_copy`. Whatever comes is checked against the
hashes in the checkpoint's index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from node.checkpoints.best import by_loss
from node.checkpoints.checkpoint import Checkpoint, CheckpointStore, OtherVersionError
from node.checkpoints.index import (
    MAX_INDEX_BYTES,
    Index,
    Part,
    UnknownFormError,
    check_names,
    everything,
    files_in,
    fingerprint,
    parse_index,
    said_by,
    verify,
)
from node.checkpoints.names import INDEX, round_of
from node.checkpoints.tensor_files import File
from node.data.opened import WEB, opened
from node.data.patience import met
from node.errors import operator_error, without_credentials
from node.headway import OnProgress
from node.statedir import CHECKPOINTS
from protocols.errors import OperatorError, kind_and_reason

PIECE = 1 << 22  # bytes that are read there at once

Tell = Callable[[OperatorError], object]
Begun = Callable[[str], OnProgress]  # of which is fetched; what it returns, of how far that is


@dataclass(frozen=True)
class Brought:
    """The first that was whole, and what is wrong with those before it, by their names."""

    checkpoint: Checkpoint | None
    damaged: tuple[tuple[str, ValueError], ...] = ()
    there: int = 0  # how many there are in all


class RemovedError(OperatorError):
    """E404: the copy ``name`` was removed there, as by the node that makes them, while it came."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        super().__init__(
            "E404",
            f"the copy {name} at {without_credentials(url)} cannot be used",
            "it was removed there before all of it was here",
            "try again, for a newer one",
        )


class _MissingError(ValueError):
    """A file of a copy is not there."""


class CopyReader:
    """The copies at one URL, or path. Methods block: call them off the loop.

    All raise OperatorError E407 where the place cannot be reached or read.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def on_this_machine(self) -> Path | None:
        """The path that the URL stands for; None where it is one of another file system.

        Needs no network, and tells of a protocol that nobody knows, or whose library is missing.
        """
        with self._errors_of("read"):
            return self._path()

    def get_newest(
        self,
        store: CheckpointStore,
        tell: Tell = lambda problem: None,
        begun: Begun = lambda name: lambda done, total: None,
    ) -> Path | None:
        """Bring the newest whole one into ``store``, which has none, passing over damaged ones.

        Each of these is told of, as E404. None where there is none; where all are damaged, what is
        wrong with the newest is raised. One that cannot be read now may be whole: that raises E407,
        E202 where it is another version's; no older one takes its place, and what has come of it is
        not fetched again the next time.
        """
        with self._errors_of("read"):
            files, root = self._open()
            names = _newest_first(self._there(files, root))
            found = self._bring(files, root, names, store, tell, begun=begun)
            if found.checkpoint is not None:
                return found.checkpoint.path
            if found.damaged:
                raise found.damaged[0][1]
            return None

    def get_best(
        self,
        store: CheckpointStore,
        newest: Path,
        tell: Tell = lambda problem: None,
        begun: Begun = lambda name: lambda done, total: None,
    ) -> None:
        """Bring the best whole one into ``store`` too, where it is not the ``newest`` that came.

        Nothing is raised, but told: who goes on does not need it.
        """
        try:
            with self._errors_of("read"):
                files, root = self._open()
                found = dict(self._there(files, root))
                names, here = by_loss(found.items()), said_by(newest)
                better = takewhile(lambda name: found[name] != here, names)
                self._bring(
                    files, root, list(better), store, tell, best=True, beside=newest, begun=begun
                )
        except OperatorError as error:
            tell(error)

    def get_part(
        self,
        store: CheckpointStore,
        part: Part,
        *,
        one: str,
        best: bool,
        tell: Tell,
        begun: Begun,
    ) -> Brought:
        """Bring ``part`` of the newest whole one into ``store``, as :meth:`get_newest` does.

        Or of the ``best``, or of the ``one`` of that name, for which nothing is listed. They may
        lie in a state directory there. Only that part is looked at: the rest may be damaged.
        Raises :class:`RemovedError` where a node removes it meanwhile.
        """
        with self._errors_of("read"):
            files, root = self._open()
            found = self._one(files, root, one) if one else self._there(files, root)
            if not (one or found) and CHECKPOINTS in self._listed(files, root):  # a state directory
                root = f"{root}/{CHECKPOINTS}"
                found = self._there(files, root)
            names = by_loss(found) if best else _newest_first(found)
            brought = self._bring(
                files, root, names, store, tell, best=best, part=part, begun=begun
            )
            return Brought(brought.checkpoint, brought.damaged, len(found))

    @contextmanager
    def _errors_of(self, what: str) -> Iterator[None]:
        try:
            yield
        except OperatorError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise self._failed(what, error) from error

    def _bring(
        self,
        files: Any,
        root: str,
        names: list[str],
        store: CheckpointStore,
        tell: Tell,
        *,
        best: bool = False,
        part: Part = everything,
        beside: Path | None = None,
        begun: Begun,
    ) -> Brought:
        """The first of these that is whole, in ``store``, ``beside`` one that it does not replace.

        Raises :class:`RemovedError` where one is removed there meanwhile.
        """
        damaged: list[tuple[str, ValueError]] = []
        for later, name in enumerate(names, start=1):
            try:
                with store.fetching(name) as draft:
                    self._fetch(files, f"{root}/{name}", draft, part, begun(name))
                    index = verify(draft, part)
                    target = store.take(draft, index.round, beside)
                store.forget_fetched()
                return Brought(Checkpoint(target, index), tuple(damaged))
            except ValueError as error:
                store.forget_fetched(but=[store.fetched(older) for older in names[later:]])
                if not self._one(files, root, name):
                    raise RemovedError(name, self.url) from error
                if isinstance(error, UnknownFormError):
                    place = without_credentials(self.url)
                    raise OtherVersionError(f"{name} at {place}", str(error)) from error
                damaged.append((name, error))
                then = f"{names[later]} is tried" if later < len(names) else "none is left"
                fix = f"nothing to do: {then}" if later < len(names) else then
                if best:  # it may be kept for ever
                    fix = f"remove it there, so that a whole one is kept as the best; {then}"
                tell(
                    operator_error(
                        "E404",
                        f"the copy {name} at {self.url} cannot be used",
                        why=str(error)[:500],
                        fix=fix,
                    )
                )
        return Brought(None, tuple(damaged))

    def _fetch(self, files: Any, source: str, draft: Path, part: Part, came: OnProgress) -> None:
        """Only what the index names of that part, and never more of it than it says.

        What an earlier try has left in ``draft`` is not fetched again. ValueError: damaged.
        """
        raw = self._raw_index(files, source)
        (draft / INDEX).write_bytes(raw)
        index = parse_index(raw)
        check_names(index)
        wanted = {name: file for name, file in index.files.items() if part(name)}
        for path in files_in(draft):
            if path.relative_to(draft).as_posix() not in (INDEX, *wanted):
                path.unlink()  # of an earlier copy of that name
        before, total = 0, sum(file.bytes for file in wanted.values())
        for name, expected in wanted.items():
            further = partial(_further, came, before, total)
            self._fetch_file(files, f"{source}/{name}", draft / name, expected, further)
            before += expected.bytes

    def _fetch_file(
        self, files: Any, place: str, path: Path, expected: File, further: Callable[[int], None]
    ) -> None:
        path.parent.mkdir(exist_ok=True)
        path.touch()
        there = path.stat().st_size
        if there == expected.bytes and fingerprint(path) == expected:
            return
        begins = there if there < expected.bytes else 0
        self._pull(files, place, path, begins, expected.bytes, further)
        if begins and fingerprint(path) != expected:  # that was not its beginning
            self._pull(files, place, path, 0, expected.bytes, further)

    def _pull(
        self,
        files: Any,
        place: str,
        path: Path,
        begins: int,
        size: int,
        further: Callable[[int], None],
    ) -> None:
        """What a file there has from byte ``begins`` on, up to a byte more than ``size``."""
        further(begins)
        with path.open("r+b") as out:
            out.truncate(begins)
            for at, piece in self._pieces(files, place, size + 1, begins):
                out.seek(at)
                out.write(piece)
                further(at + len(piece))

    def _pieces(
        self, files: Any, place: str, most: int, begins: int = 0
    ) -> Iterator[tuple[int, bytes]]:
        """A file there, as far as ``most`` bytes, and where each piece of it belongs.

        From byte ``begins`` on where its file system can do that, else from the beginning.
        Raises ValueError where it is missing, and E407 where it cannot be read: its errors are
        OSErrors too, and would count as those of the disk here.
        """
        try:
            with _opened(files, place, begins) as (file, at):
                while at < most and (piece := file.read(min(most - at, PIECE))):
                    yield at, piece
                    at += len(piece)
        except Exception as error:  # each file system has errors of its own
            cause = met(error)
            if isinstance(cause, FileNotFoundError):
                raise _MissingError(f"{place.rpartition('/')[2]} is missing") from error
            raise self._failed("read", cause) from cause

    def _there(self, files: Any, root: str) -> list[tuple[str, Index | None]]:
        """Names of the whole ones, and what they say of themselves.

        That which was made last is the first, and damaged ones, which say nothing, are the last.
        """
        whole: list[tuple[float, int, str, Index | None]] = []
        for name in self._named(files, root):
            for _, index in self._one(files, root, name):
                whole.append((index.created if index else 0.0, round_of(name) or 0, name, index))
        whole.sort(key=lambda one: one[:3], reverse=True)
        return [(name, index) for *_, name, index in whole]

    def _one(self, files: Any, root: str, name: str) -> list[tuple[str, Index | None]]:
        """As :meth:`_there`, of the one of that name: empty where it is not there."""
        if not _may_be_there(files, f"{root}/{name}/{INDEX}"):
            return []
        try:
            raw = self._raw_index(files, f"{root}/{name}")
        except _MissingError:
            return []
        try:
            return [(name, parse_index(raw))]
        except ValueError:
            return [(name, None)]

    def _raw_index(self, files: Any, place: str) -> bytes:
        pieces = self._pieces(files, f"{place}/{INDEX}", MAX_INDEX_BYTES + 1)
        return b"".join(piece for _, piece in pieces)

    def _named(self, files: Any, root: str) -> list[str]:
        """Names of all, also of those that were broken off."""
        return [name for name in self._listed(files, root) if round_of(name) is not None]

    def _listed(self, files: Any, root: str) -> list[str]:
        """Names of all that lies there."""
        if not _may_be_there(files, root):
            return []
        try:
            found = files.ls(root, detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]

    def _path(self) -> Path | None:
        from fsspec import get_filesystem_class
        from fsspec.implementations.local import LocalFileSystem
        from fsspec.utils import get_protocol

        kinds = [get_filesystem_class(get_protocol(part)) for part in self.url.split("::")]
        if len(kinds) > 1 or not issubclass(kinds[0], LocalFileSystem):
            return None
        return Path(kinds[0]._strip_protocol(self.url))

    def _open(self) -> tuple[Any, str]:
        import fsspec

        files, root = fsspec.core.url_to_fs(self.url)
        files.invalidate_cache()
        return files, str(root).rstrip("/")

    def _failed(self, what: str, error: Exception) -> OperatorError:
        return operator_error(
            "E407",
            f"cannot {what} the copy of checkpoints at {self.url}",
            why=kind_and_reason(error),
        )


def _newest_first(found: list[tuple[str, Index | None]]) -> list[str]:
    """Names, in the order in which they are tried: what says nothing may be the newest.

    It may, where its round is later than that of the newest of the others.
    """
    newest = next((round_of(name) or 0 for name, index in found if index is not None), -1)
    first = [name for name, index in found if index is None and (round_of(name) or 0) > newest]
    return [*first, *(name for name, _ in found if name not in first)]


def _further(came: OnProgress, before: int, total: int, done: int) -> None:
    """So much of a file is there, after ``before`` bytes of others."""
    came(before + done, total)


@contextmanager
def _opened(files: Any, place: str, begins: int) -> Iterator[tuple[Any, int]]:
    """A file there, and the byte that comes first: ``begins``, or 0."""
    if place.startswith(WEB):  # fsspec's own asks for pieces, which not all web servers have
        with opened(place, begins) as found:
            yield found.file, found.start
        return
    with files.open(place, "rb") as file:
        at = 0
        with suppress(ValueError, NotImplementedError):
            if begins:  # what seek returns is not always the place: SFTP's returns nothing
                file.seek(begins)
                at = begins
        yield file, at


def _may_be_there(files: Any, place: str) -> bool:
    """Whether to look there; a web server's errors are told then, and none of them means no."""
    return place.startswith(WEB) or bool(files.exists(place))
