"""A second copy of checkpoints, anywhere that fsspec reaches: ``--checkpoint-copy URL``.

A checkpoint is copied file by file, its index last, so that one without an index is none. Whoever
has lost the disk and starts with ``--resume`` and the same URL gets the newest one back, and the
best; they are checked like any other, against the hashes in their index.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from node.checkpoints.best import by_loss
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.index import (
    MAX_INDEX_BYTES,
    Index,
    check_names,
    files_in,
    fingerprint,
    said_by,
    verify,
)
from node.checkpoints.names import INDEX, name_of, round_of
from node.errors import operator_error
from protocols.errors import OperatorError

PIECE = 1 << 22  # bytes that are read there at once


class CheckpointCopy:
    """The copies at one URL, of which the newest ``keep`` are kept, and the best. Methods block:
    call them off the loop.

    All raise OperatorError E407 where the place cannot be reached, read or written.
    """

    def __init__(self, url: str, keep: int) -> None:
        self.url, self.keep = url.rstrip("/"), keep
        self._others: set[float] | None = None  # other islands' that were there, by their times

    def check(self) -> None:
        """Tell at once what needs no network: no such protocol, its library, a path of no folder.

        The place need not be there yet.
        """
        try:
            from fsspec import get_filesystem_class
            from fsspec.implementations.local import LocalFileSystem
            from fsspec.utils import get_protocol

            kinds = [get_filesystem_class(get_protocol(part)) for part in self.url.split("::")]
            if len(kinds) == 1 and issubclass(kinds[0], LocalFileSystem):
                place = Path(kinds[0]._strip_protocol(self.url))
                there = next(path for path in (place, *place.parents) if path.exists())
                if not there.is_dir():
                    raise NotADirectoryError(f"{there} is no folder")
                if not os.access(there, os.W_OK | os.X_OK):
                    raise PermissionError(f"this user cannot write to {there}")
        except Exception as error:  # each file system has errors of its own
            raise self._failed("write", error) from error

    def put(self, checkpoint: Path, moved: Callable[[], None] = lambda: None) -> None:
        """Copy a checkpoint there, if it is not there yet, and then remove those made first.

        But never the best one, as here. Copies that broke off before are removed too; if any is of
        another run, this raises E407 first. ``moved`` is called when a file is there, or has grown,
        if the file system tells.
        """
        with self._errors_of("write"):
            from fsspec.callbacks import Callback

            files, root = self._open()
            told = Callback(hooks={"moved": lambda size, value: moved()})
            found = self._there(files, root)
            if (mine := said_by(checkpoint)) is not None:
                it = [name for name, index in found if index == mine]
                if any(self._has_all(files, f"{root}/{name}", mine) for name in it):
                    return
                self._check_whose(found, mine)
            names = [p.relative_to(checkpoint).as_posix() for p in files_in(checkpoint)]
            names.remove(INDEX)
            chosen, round_ = checkpoint.name, round_of(checkpoint.name)
            same = [name for name, _ in found if round_of(name) == round_]
            if same[:1] == [chosen]:  # made earlier in the same round: it stays until this is whole
                chosen = f"ckpt-0{chosen[5:]}"
            target = f"{root}/{chosen}"
            if files.exists(target):  # broken off, or of an earlier life
                files.rm(target, recursive=True)
            for name in [*names, INDEX]:
                files.makedirs(f"{target}/{name}".rpartition("/")[0], exist_ok=True)
                files.put_file(str(checkpoint / name), f"{target}/{name}", callback=told)
                moved()
            self._remove_all_but(chosen, files, root)

    def put_best(self, checkpoint: Path, moved: Callable[[], None] = lambda: None) -> None:
        """Copy the best one here, as :meth:`put` does, unless one there is as good.

        Such a one holds the place of the best there, so that the next copy would remove this one.
        """
        with self._errors_of("write"):
            files, root = self._open()
            loss = said.validation if (said := said_by(checkpoint)) is not None else None
            rival = self._best(files, root, self._there(files, root))
            if loss is None or rival is None or loss < rival[1]:
                self.put(checkpoint, moved)

    def _remove_all_but(self, chosen: str, files: Any, root: str) -> None:
        """Remove what is not to be kept beside the one that was ``chosen`` just now."""
        others = [
            (name, index)
            for name, index in self._there(files, root)
            if name == chosen or round_of(name) != round_of(chosen)
        ]
        kept = {chosen, *(name for name, _ in others[: self.keep])}
        if (best := self._best(files, root, others)) is not None:
            kept.add(best[0])
        for old in self._named(files, root):
            if old not in kept:
                files.rm(f"{root}/{old}", recursive=True)

    def get_newest(
        self, store: CheckpointStore, tell: Callable[[OperatorError], None] = lambda problem: None
    ) -> Path | None:
        """Bring the newest whole one into ``store``, which has none, passing over damaged ones.

        Each of these is told of, as E404. None where there is none; where all are damaged, what is
        wrong with the newest is raised. One that cannot be read now may be whole: that raises E407,
        no older one takes its place, and what has come of it is not fetched again the next time.
        """
        with self._errors_of("read"):
            files, root = self._open()
            names = [name for name, _ in self._there(files, root)]
            path, damaged = self._bring(files, root, names, store, tell)
            if path is None and damaged is not None:
                raise damaged
            return path

    def get_best(
        self,
        store: CheckpointStore,
        newest: Path,
        tell: Callable[[OperatorError], None] = lambda problem: None,
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
                self._bring(files, root, list(better), store, tell, best=True)
        except OperatorError as error:
            tell(error)

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
        tell: Callable[[OperatorError], None],
        *,
        best: bool = False,
    ) -> tuple[Path | None, ValueError | None]:
        """The first of these that is whole, in ``store``, and what is wrong with the first one."""
        damaged: ValueError | None = None
        for later, name in enumerate(names, start=1):
            try:
                with store.fetching(name) as draft:
                    self._fetch(files, f"{root}/{name}", draft)
                    target = store.directory / name_of(verify(draft).round)
                    if target.exists():  # a damaged one
                        shutil.rmtree(target)
                    draft.rename(target)
                store.forget_fetched()
                return target, damaged
            except ValueError as error:
                store.forget_fetched()
                damaged = damaged or error
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
        return None, damaged

    def _fetch(self, files: Any, source: str, draft: Path) -> None:
        """Only what the index names, and never more of it than it says; ValueError: damaged.

        What an earlier try has left in ``draft`` is not fetched again.
        """
        pieces = self._pieces(files, f"{source}/{INDEX}", MAX_INDEX_BYTES + 1)
        raw = b"".join(piece for _, piece in pieces)
        (draft / INDEX).write_bytes(raw)
        index = Index.model_validate_json(raw)
        check_names(index)
        for path in files_in(draft):
            if path.relative_to(draft).as_posix() not in (INDEX, *index.files):
                path.unlink()  # of an earlier copy of that name
        for name, expected in index.files.items():
            path = draft / name
            path.parent.mkdir(exist_ok=True)
            path.touch()
            there = path.stat().st_size
            if there == expected.bytes and fingerprint(path) == expected:
                continue
            begins = there if there < expected.bytes else 0
            self._pull(files, f"{source}/{name}", path, begins, expected.bytes)
            if begins and fingerprint(path) != expected:  # that was not its beginning
                self._pull(files, f"{source}/{name}", path, 0, expected.bytes)

    def _pull(self, files: Any, place: str, path: Path, begins: int, size: int) -> None:
        """What a file there has from byte ``begins`` on, up to a byte more than ``size``."""
        with path.open("r+b") as out:
            out.truncate(begins)
            for at, piece in self._pieces(files, place, size + 1, begins):
                out.seek(at)
                out.write(piece)

    def _pieces(
        self, files: Any, place: str, most: int, begins: int = 0
    ) -> Iterator[tuple[int, bytes]]:
        """A file there, as far as ``most`` bytes, and where each piece of it belongs.

        From byte ``begins`` on where its file system can do that, else from the beginning.
        Raises ValueError where it is missing, and E407 where it cannot be read: its errors are
        OSErrors too, and would count as those of the disk here.
        """
        at = 0
        try:
            with files.open(place, "rb") as file:
                with suppress(ValueError, NotImplementedError):
                    if begins:  # what seek returns is not always the place: SFTP's returns nothing
                        file.seek(begins)
                        at = begins
                while at < most and (piece := file.read(min(most - at, PIECE))):
                    yield at, piece
                    at += len(piece)
        except FileNotFoundError as error:
            raise ValueError(f"{place.rpartition('/')[2]} is missing") from error
        except Exception as error:  # each file system has errors of its own
            raise self._failed("read", error) from error

    def _there(self, files: Any, root: str) -> list[tuple[str, Index | None]]:
        """Names of the whole ones, and what they say of themselves.

        That which was made last is the first, and damaged ones, which say nothing, are the last.
        """
        whole: list[tuple[float, int, str, Index | None]] = []
        for name in self._named(files, root):
            if files.exists(f"{root}/{name}/{INDEX}"):
                index = self._index(files, f"{root}/{name}")
                whole.append((index.created if index else 0.0, round_of(name) or 0, name, index))
        whole.sort(key=lambda one: one[:3], reverse=True)
        return [(name, index) for *_, name, index in whole]

    def _best(
        self, files: Any, root: str, found: list[tuple[str, Index | None]]
    ) -> tuple[str, float] | None:
        """The best there, and its loss; as here, one that lacks files does not hold that place."""
        for name, index in by_loss((one, one[1]) for one in found):
            if index is None or index.validation is None:
                continue
            if self._has_all(files, f"{root}/{name}", index):
                return name, index.validation
        return None

    def _has_all(self, files: Any, place: str, index: Index) -> bool:
        """Whether all files that it names are there with their lengths, where these are told."""
        try:
            return all(
                files.info(f"{place}/{name}").get("size") in (file.bytes, None)
                for name, file in index.files.items()
            )
        except FileNotFoundError:
            return False

    def _index(self, files: Any, place: str) -> Index | None:
        """What one says of itself; None where that is damaged."""
        with files.open(f"{place}/{INDEX}", "rb") as file:
            raw = file.read(MAX_INDEX_BYTES + 1)
        try:
            return Index.model_validate_json(raw)
        except ValueError:
            return None

    def _named(self, files: Any, root: str) -> list[str]:
        """Names of all, also of those that were broken off."""
        if not files.exists(root):
            return []
        names = (str(path).rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False))
        return [name for name in names if round_of(name) is not None]

    def _check_whose(self, found: list[tuple[str, Index | None]], mine: Index) -> None:
        """Raise E407 where a copy there is of another run, or of another island that makes copies
        there as well: each would push the other's out.

        What another island had there from the beginning is left to be replaced: it may have been
        this one, which has lost its disk and its identity with it.
        """
        others = set()
        for name, index in found:
            if index is None:
                continue
            if index.run != mine.run:
                raise operator_error(
                    "E407",
                    f"{self.url} has checkpoints of another run",
                    why=f"{name} there is of the run {index.run[:16]}, and this is {mine.run[:16]}",
                    fix="give each run another --checkpoint-copy, or remove those that are there",
                )
            if index.peer and mine.peer and index.peer != mine.peer:
                others.add(index.created)
                if self._others is not None and index.created not in self._others:
                    raise operator_error(
                        "E407",
                        f"another island copies its checkpoints to {self.url} as well",
                        why=f"{name} there is of …{index.peer[-8:]}, and was made meanwhile",
                        fix="give each island a --checkpoint-copy of its own",
                    )
        self._others = others

    def _open(self) -> tuple[Any, str]:
        import fsspec

        files, root = fsspec.core.url_to_fs(self.url)
        files.invalidate_cache()
        return files, str(root).rstrip("/")

    def _failed(self, what: str, error: Exception) -> OperatorError:
        return operator_error(
            "E407",
            f"cannot {what} the copy of checkpoints at {self.url}",
            why=f"{type(error).__name__}: {error}"[:500],
        )
