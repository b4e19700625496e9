"""A second copy of checkpoints, anywhere that fsspec reaches: ``--checkpoint-copy URL``.

A checkpoint is copied file by file, its index last, so that one without an index is none. Whoever
has lost the disk and starts with ``--resume`` and the same URL gets the newest one back, and the
best (:mod:`node.checkpoints.copy_reading`); they are checked like any other, against the hashes in
their index.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from node.checkpoints.best import by_loss
from node.checkpoints.copy_reading import CopyReader
from node.checkpoints.index import Index, files_in, said_by
from node.checkpoints.names import INDEX, beside, name_of, round_of
from node.errors import operator_error
from protocols.errors import OperatorError


class CheckpointCopy(CopyReader):
    """The copies at one URL, of which the newest ``keep`` are kept, and the best.

    Methods raise OperatorError E407 also where the place cannot be written.
    """

    def __init__(self, url: str, keep: int) -> None:
        super().__init__(url)
        self.keep = keep
        self._others: set[float] | None = None  # other islands' that were there, by their times

    def check(self) -> None:
        """Tell at once what needs no network: no such protocol, its library, a path of no folder.

        The place need not be there yet.
        """
        with self._errors_of("write"):
            if (place := self._path()) is None:
                return
            there = next(path for path in (place, *place.parents) if path.exists())
            if not there.is_dir():
                raise NotADirectoryError(f"{there} is no folder")
            if not os.access(there, os.W_OK | os.X_OK):
                raise PermissionError(f"this user cannot write to {there}")

    def put(self, checkpoint: Path, moved: Callable[[], None] = lambda: None) -> None:
        """Copy a checkpoint there, if it is not there yet, and then remove those made first.

        But never the best one, as here. Copies that broke off before are removed first, as it may
        take their room; if any copy is of another run, this raises E407 before. ``moved`` is called
        when a file is there, or has grown, if the file system tells, and before a copy is removed;
        what it raises ends this.
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
            chosen, there = name_of(round_of(checkpoint.name) or 0), {name for name, _ in found}
            self._remove_broken_off(there, files, root, moved)
            # made earlier in the same round: it stays until this is whole; what is there though it
            # was not found just now is not known to be no copy
            while chosen in there or files.exists(f"{root}/{chosen}"):
                chosen = beside(chosen)
            target = f"{root}/{chosen}"
            for name in [*names, INDEX]:
                if name == INDEX and self._index_of(chosen, files, root):
                    raise self._mixed(chosen)
                try:
                    files.makedirs(f"{target}/{name}".rpartition("/")[0], exist_ok=True)
                    files.put_file(str(checkpoint / name), f"{target}/{name}", callback=told)
                except Exception:  # whatever it is, what has come is in the way of the next one
                    self._give_up(target, files, moved, index=name == INDEX)
                    raise
                moved()
            if mine is not None and (
                self._index_of(chosen, files, root) != [mine]
                or not self._has_all(files, target, mine)
            ):
                raise self._mixed(chosen)
            found = self._there(files, root)
            if mine is not None:
                self._check_whose(found, mine)
            self._remove_all_but(chosen, found, files, root, moved)

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

    def _index_of(self, chosen: str, files: Any, root: str) -> list[Index | None]:
        """As it is there now, whoever has put it; none: it is not there."""
        files.invalidate_cache()
        return [index for _, index in self._one(files, root, chosen)]

    def _mixed(self, chosen: str) -> OperatorError:
        """E407 where another one copied to the same place in the same moment, unseen by this one.

        Its files have the lengths that these have, so the other may not come to know. What is there
        stays: if its index is the other's, that goes on and this one does not (_check_whose).
        """
        return operator_error(
            "E407",
            f"another island copies its checkpoints to {self.url} as well",
            why=f"it has written or removed files of {chosen} there while that was copied",
            fix="give each island a --checkpoint-copy of its own, and remove that one there: it "
            "may have files of both",
        )

    def _remove_broken_off(
        self, there: set[str], files: Any, root: str, moved: Callable[[], None]
    ) -> None:
        """Remove what no index came for; what is ``there`` stays.

        What cannot be removed may be in nobody's way: whoever ends well tries again, and tells.
        """
        for name in self._named(files, root):
            if name not in there:
                moved()
                with suppress(Exception):
                    if not _has_index(files, f"{root}/{name}"):
                        files.rm(f"{root}/{name}", recursive=True)

    def _give_up(self, target: str, files: Any, moved: Callable[[], None], *, index: bool) -> None:
        """Remove what has come of a copy that fails, also half of its ``index``; raises nothing.

        But nothing where another has taken its turn, nor what is another's by now.
        """
        with suppress(Exception):
            moved()
            if index or not _has_index(files, target):
                files.rm(target, recursive=True)

    def _remove_all_but(
        self,
        chosen: str,
        found: list[tuple[str, Index | None]],
        files: Any,
        root: str,
        moved: Callable[[], None],
    ) -> None:
        """Remove what is not to be kept beside the one that was ``chosen`` just now.

        It replaces those of its round that were made before it, but not the best.
        """
        made = {name: index.created if index is not None else 0.0 for name, index in found}
        others = [
            name
            for name, created in made.items()
            if name == chosen
            or round_of(name) != round_of(chosen)
            or created > made.get(chosen, 0.0)
        ]
        kept = {chosen, *others[: self.keep]}
        if (best := self._best(files, root, found)) is not None:
            kept.add(best[0])
        for old in self._named(files, root):
            # one that has an index, though none was found just now, is not known to be no copy
            if old not in kept and (old in made or not _has_index(files, f"{root}/{old}")):
                moved()
                files.rm(f"{root}/{old}", recursive=True)

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


def _has_index(files: Any, place: str) -> bool:
    """Whether one is listed there: other than ``exists``, that tells of a link that is down."""
    files.invalidate_cache()
    return any(str(path).endswith(f"/{INDEX}") for path in files.ls(place, detail=False))
