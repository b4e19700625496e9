"""Checkpoints on disk: whole or not there at all, and checked before they are used.

One checkpoint is a directory ``ckpt-<round>/`` with tensors (safetensors), small state (JSON) and
``checkpoint.json`` (:mod:`node.checkpoints.index`), which names every file with its length and
BLAKE3 hash. It is written under another name, flushed to the disk and then renamed, so that a crash
or a full disk leaves the previous ones as they were. Nothing in it is ever unpickled.

Two parties write into the same draft: the daemon its outer state, the trainer its inner state.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from node.checkpoints import spared
from node.checkpoints.best import as_good, by_loss, seems_whole
from node.checkpoints.index import (
    Facts,
    Index,
    UnknownFormError,
    bytes_in,
    files_in,
    fingerprint,
    made,
    said_by,
    verify,
    write_index,
)
from node.checkpoints.names import (
    ASIDE_PREFIX,
    DRAFT_PREFIX,
    FETCHED_PREFIX,
    OLD_PREFIX,
    beside,
    name_of,
    remove,
    round_of,
)
from node.checkpoints.tensor_files import take_notes
from protocols.errors import OperatorError, is_full, reason
from protocols.files import sync

ITS_VERSION = (
    "use the version of Atoll that made it, or upgrade this machine (docs/operators/upgrade.md)"
)
DAMAGED = (errno.ENOENT, errno.EIO)  # what a file's disk says that is lost


class DiskFullError(OperatorError):
    """E402: no room for a checkpoint; training goes on without it."""

    def __init__(self, directory: Path, why: str) -> None:
        super().__init__(
            "E402",
            f"no room for a checkpoint in {directory}",
            why,
            "free disk space, lower --keep-checkpoints, or give another --dir",
        )


class FolderGoneError(OperatorError):
    """E105: the folder of the checkpoints is not there any more; training goes on without it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            "E105",
            f"the folder {directory} is gone",
            "it was removed, moved or unmounted while the node ran",
            "put it back",
        )


class CheckpointError(OperatorError):
    """E404: a checkpoint is damaged, or could not be written for another reason than space."""

    def __init__(self, path: Path, why: str, fix: str) -> None:
        super().__init__("E404", f"checkpoint {path.name} cannot be used", why, fix)
        self.path = path


class OtherVersionError(OperatorError):
    """E202: a checkpoint has another version's form; none of this version's takes its place."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            "E202", f"checkpoint {name} is of another version of Atoll", why, ITS_VERSION
        )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been verified."""

    path: Path
    facts: Index


@dataclass(frozen=True)
class Search:
    """The first that is whole, and an E404 for each before it that had to be passed over."""

    checkpoint: Checkpoint | None
    damaged: tuple[CheckpointError, ...]

    @property
    def why(self) -> str:
        """What is wrong with those that were passed over, the newest first."""
        return "; ".join(f"{damage.path.name}: {damage.why}" for damage in self.damaged[:8])


class CheckpointStore:
    """The checkpoints of one run directory, which belongs to one daemon.

    Any other process says ``owns=False`` and only reads: the daemon may be writing meanwhile.
    """

    def __init__(self, directory: Path, keep: int = 2, *, owns: bool = True) -> None:
        if keep < 1:
            raise ValueError("keep must be at least 1")
        self.directory = directory
        self.keep = keep
        # what was fetched and no checkpoint takes the place of: of where this node has yet to come
        self.ahead: Callable[[], Collection[Path]] = tuple
        self._before: Path | None = None
        self._damaged: set[Path] = set()  # those found so when they were read
        if not owns:
            return
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.glob(f"{OLD_PREFIX}*"):  # killed between two renames
            target = directory / old.name.removeprefix(OLD_PREFIX)
            if round_of(target.name) is not None and not target.exists():
                old.rename(target)
        spared.take_back(self.directory, self.paths())
        for draft in directory.glob(f"{DRAFT_PREFIX}*"):  # of a process that was killed
            shutil.rmtree(draft, ignore_errors=True)

    def preflight(
        self, checkpoint_bytes: int, *, copies: bool = False, evaluated: bool = False
    ) -> None:
        """Raise E402 unless there is room for the checkpoints to keep and one being written.

        ``copies``: and one that is still being copied to a second place (:meth:`aside`).
        ``evaluated``: and the best, which may be an old one.
        """
        count = self.keep + 1 + copies + evaluated
        needed = checkpoint_bytes * count - self.held()
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise DiskFullError(
                self.directory,
                f"{count} checkpoints of {checkpoint_bytes / 2**20:,.0f} MiB need "
                f"{needed / 2**20:,.0f} MiB more, {free / 2**20:,.0f} MiB are free",
            )

    def begin_anew(self) -> None:
        """Nothing is taken of what is here: the newest is kept aside as a newer one is made."""
        self._before = next(iter(self.paths()), None)

    def _spare(self, before: Path, facts: Facts) -> None:
        """Keep it aside; as the best it stays where it is as well, and is kept as such.

        Where there are no hard links that is all.
        """
        said = said_by(before)
        better = said is not None and said.run == facts.run and not as_good(facts, said)
        if not (better and before == self.best()):
            spared.spare(before)
        elif (links := self.aside(before)) != before:
            spared.spare(before, links)
            self.drop(links)

    def paths(self) -> list[Path]:
        """Checkpoint directories, the one that was made last first.

        The first may be of an earlier round: of another side of a split, or after damaged ones.
        """
        there = self.directory.glob("ckpt-*")  # none where the folder is gone
        found = [(made(p), p) for p in there if round_of(p.name) is not None]
        return [path for _, path in sorted(found, reverse=True)]

    def by_loss(self) -> list[Path]:
        """Those whose outer parameters were evaluated, the lowest loss first, unverified."""
        return by_loss((path, said_by(path)) for path in self.paths())

    def best(self) -> Path | None:
        """The one with the lowest validation loss; None: nothing is known of any.

        One that lacks files does not hold that place, nor one that was found damaged: a later one
        is to have it.
        """
        whole = (path for path in self.by_loss() if path not in self._damaged)
        return next((path for path in whole if seems_whole(path, said_by(path))), None)

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """A directory to write files into; it is gone afterwards unless :meth:`commit` took it.

        Raises :class:`DiskFullError` in place of the ``OSError`` of a full disk.
        """
        path = self.directory / f"{DRAFT_PREFIX}{os.getpid()}-{time.time_ns()}"
        try:
            with _disk_errors(path):
                path.mkdir()
                yield path
        except DiskFullError:
            spared.forget(self.directory)  # the next one is worth more
            self.forget_fetched()
            raise
        finally:
            # a thread that still writes, its call cancelled, finds no folder of that name
            gone = path.with_name(f"{path.name}-gone")
            with suppress(OSError):  # taken, or never made
                path.rename(gone)
            for left in (gone, path):
                shutil.rmtree(left, ignore_errors=True)

    def commit(self, draft: Path, facts: Facts) -> Checkpoint:
        """Make a draft the checkpoint of ``facts.round`` and drop those that were made first.

        But never the best one: if the run gets worse, that is the one to go back to. Where it is of
        the same round, as on the other side of a split, it stays under a name :func:`beside` this.
        What was fetched to begin with goes, too, but for what is :attr:`ahead`: from now on this
        node begins from checkpoints. Reads every file whose hash no note tells; run it off the
        event loop.
        """
        with _disk_errors(draft):
            told = take_notes(draft)
            files = {
                file.relative_to(draft).as_posix(): told.get(file) or fingerprint(file)
                for file in files_in(draft)
            }
            created = max([time.time(), *(math.nextafter(made(p), math.inf) for p in self.paths())])
            index = write_index(draft, facts, created, files)
            for path in (*draft.rglob("*"), draft):
                sync(path)
            target = self.directory / name_of(facts.round)
            old = self.directory / f"{OLD_PREFIX}{target.name}"
            if self._before is not None:  # first: whoever is killed now has it at the next start
                self._spare(self._before, facts)
            if target.exists():  # made earlier in the same round; a rename cannot replace it
                if target == self.best() and not as_good(facts, said_by(target)):
                    old = target.with_name(beside(target.name))
                    self._damaged.discard(old)
                remove(old)
                target.rename(old)
            try:
                draft.rename(target)
            except OSError:
                if old.exists():
                    old.rename(target)
                spared.take_back(self.directory, self.paths())
                raise
            sync(self.directory)
        self._damaged.discard(target)
        self._before = None
        spared.forget(self.directory, needed=sum(file.bytes for file in files.values()))
        others = [path for path in self.paths() if path != target]
        best = self.best()
        for path in others[self.keep - 1 :]:
            if path != best:
                remove(path)
        if old.name.startswith(OLD_PREFIX):
            shutil.rmtree(old, ignore_errors=True)
        self.forget_fetched(but=self.ahead())
        return Checkpoint(target, index)

    @contextmanager
    def fetching(self, name: str) -> Iterator[Path]:
        """A directory to fetch the copy of that name into; what has come stays for the next try.

        Raises as :meth:`draft` does.
        """
        path = self.fetched(name)
        with _disk_errors(path):
            path.mkdir(exist_ok=True)
            yield path

    def fetched(self, name: str) -> Path:
        """Where :meth:`fetching` puts the copy of that name."""
        return self.directory / f"{FETCHED_PREFIX}{name}"

    def take(self, fetched: Path, round_: int, but: Path | None = None) -> Path:
        """Make what was fetched, and is whole, the checkpoint of that round; a damaged one goes.

        ``but``: one that stays, if it is of that round as well.
        """
        target = self.directory / name_of(round_)
        if target == but:
            target = target.with_name(beside(target.name))
        if target.exists():
            shutil.rmtree(target)
        fetched.rename(target)
        self._damaged.discard(target)
        return target

    def forget_fetched(self, but: Collection[Path] = ()) -> None:
        """Remove what was kept of what was fetched to begin with, ``but`` for these."""
        for path in self._fetched():
            if path in but:
                continue
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _fetched(self) -> list[Path]:
        return list(self.directory.glob(f"{FETCHED_PREFIX}*"))

    def aside(self, path: Path) -> Path:
        """The same files under a name that stays when the checkpoint goes, by hard links.

        Where there are no hard links it is ``path``.
        """
        place = self.directory / f"{ASIDE_PREFIX}{time.time_ns()}" / path.name
        try:
            for file in files_in(path):
                link = place / file.relative_to(path)
                link.parent.mkdir(parents=True, exist_ok=True)
                os.link(file, link)
        except OSError:
            shutil.rmtree(place.parent, ignore_errors=True)
            return path
        return place

    def drop(self, aside: Path) -> None:
        """Remove what :meth:`aside` has made."""
        if aside.parent.name.startswith(ASIDE_PREFIX):
            shutil.rmtree(aside.parent, ignore_errors=True)

    def held(self) -> int:
        """Bytes of the disk that are there for checkpoints already."""
        there = (*self.paths(), *spared.spared(self.directory))
        return bytes_in(*there) + sum(map(_taken, self._fetched()))

    def latest(self, *, best: bool = False) -> Search:
        """The newest checkpoint that verifies, or the ``best``. Reads every byte of it.

        Raises E404 where one cannot be read now: it may be whole, and an older one does not take
        its place. E202 where that is so as it is another version's.
        """
        damaged: list[CheckpointError] = []
        paths = self.by_loss() if best else self.paths()
        for older, path in enumerate(paths, start=1):
            try:
                facts = verify(path)
                self._damaged.discard(path)
                return Search(Checkpoint(path, facts), tuple(damaged))
            except UnknownFormError as error:
                raise OtherVersionError(path.name, str(error)) from error
            except (OSError, ValueError) as error:
                if isinstance(error, ValueError):  # a disk that fails may yet give it
                    self._damaged.add(path)
                if isinstance(error, OSError) and error.errno not in DAMAGED:
                    fix = "let this user read it, or move it away"
                    raise CheckpointError(path, reason(error), fix) from error
                then = f"{paths[older].name} is tried" if older < len(paths) else "none is left"
                fix = f"nothing to do: {then}" if older < len(paths) else then
                if best:  # it may be kept for ever
                    fix = f"remove {path}, so that a whole one is kept as the best; {then}"
                damaged.append(CheckpointError(path, str(error), fix))
        return Search(None, tuple(damaged))


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """A full disk becomes :class:`DiskFullError`, any other OSError :class:`CheckpointError`.

    But where the folder itself has gone :class:`FolderGoneError`.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # no disk's error: TimeoutError is an OSError too
            raise
        if is_full(error):
            raise DiskFullError(path.parent, reason(error)) from error
        if not path.parent.exists():
            raise FolderGoneError(path.parent) from error
        raise CheckpointError(path, str(error), "check the disk and its mount options") from error


def _taken(path: Path) -> int:
    """What a file, or all in a folder, takes of the disk: less than its size where it has holes."""
    return sum(one.stat().st_blocks * 512 for one in (path, *path.rglob("*")) if one.is_file())
