"""The outer state of a checkpoint wherever that lies; from a URL it comes while it is read.

Nothing of the trainer's comes with it, which is twice as large, but for a script's names of its
parameters.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bootstrap.validation import bad_config
from node.checkpoints.checkpoint import Checkpoint, CheckpointStore, DiskFullError
from node.checkpoints.copy_reading import CopyReader, RemovedError, Tell
from node.checkpoints.names import INDEX, round_of
from node.checkpoints.outer_files import (
    NONE,
    TENSORS,
    OuterFiles,
    read_newest,
    read_outer,
    why_none,
)
from node.data.patience import Patience
from node.data.tokenizer import FILE
from node.errors import cannot_write, operator_error
from node.headway import Headway, OnProgress
from node.interrupts import held_back
from node.setting_values import is_url
from node.statedir import MANIFEST
from node.trainer.trainer_state import FOLDER, MOMENTS, STATE
from protocols.errors import OperatorError

NEEDED = (TENSORS, MANIFEST, FILE, *(f"{folder}/{STATE}" for folder in (FOLDER, MOMENTS)))
TRIES = 5  # to bring one where a node may remove it meanwhile
OTHER_DISK = "free disk space, or name a folder on another disk"


@contextmanager
def outer_at(
    place: str, folder: Path, *, best: bool, warn: Tell, tell: Callable[[str], object]
) -> Iterator[tuple[Path, OuterFiles]]:
    """The newest whole checkpoint at a path or URL, or the ``best``, and what is read of it.

    Raises OperatorError E404 where there is none, and E407 where the URL cannot be read. What comes
    from there lies beside ``folder``, which is to be written, or in it where it is there (it may be
    a disk of its own), and is gone after the block. ``warn`` is told of damaged ones that are
    passed over, ``tell`` how far a long download is.
    """
    path = CopyReader(place).on_this_machine() if is_url(place) else Path(place)
    name = Path(place.rstrip("/")).name
    one = name if path is None and round_of(name) is not None else ""
    if best and (one or (path is not None and (path / INDEX).is_file())):
        fix = "give what it lies in, or leave out --best"
        raise bad_config(f"--best of {name}", "that is one checkpoint", fix)
    if path is not None:
        yield read_newest(path, best=best, tell=warn)
        return
    with _room(folder) as room:
        fetching = _Fetching(place, one, best, room, warn, tell)
        try:
            checkpoint = fetching.run()
        except DiskFullError as error:
            raise operator_error(
                "E402", f"no room for a checkpoint beside {folder}", why=error.why, fix=OTHER_DISK
            ) from error
        yield checkpoint.path, read_outer(checkpoint.path, checkpoint.facts)


@contextmanager
def _room(folder: Path) -> Iterator[Path]:
    """A folder of this process's own on the disk of ``folder``; gone however the block ends."""
    made: Path | None = None
    try:
        try:
            home = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
            with held_back():
                made = Path(tempfile.mkdtemp(dir=home, prefix=f".{folder.name}."))
        except OSError as error:
            what = f"cannot export to {folder}"
            raise cannot_write(what, error, full_fix=OTHER_DISK, otherwise="E602") from error
        yield made
    finally:
        with held_back():
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)


class _Fetching:
    """One download, of ``one`` checkpoint at a URL or of the newest or best there, into ``room``.

    A link that goes down is waited for once something has come by it: before, it may be the URL
    that is wrong. Where a node removes it there meanwhile, the newest by then is begun.
    """

    def __init__(
        self,
        url: str,
        one: str,
        best: bool,
        room: Path,
        warn: Tell,
        tell: Callable[[str], object],
    ) -> None:
        self._url, self._one, self._best = url, one, best
        self._store, self._warn, self._tell = CheckpointStore(room, keep=1), warn, tell
        self._headways: dict[str, Headway] = {}
        self._furthest: Counter[str] = Counter()  # bytes of each that were here

    def run(self) -> Checkpoint:
        """Blocks; raises OperatorError E402, E404 and E407."""
        patience, before, left = Patience(), 0, TRIES
        while True:
            try:
                return self._try()
            except RemovedError as error:
                left -= 1
                if self._one:
                    raise
                if not left:
                    raise self._overtaken() from error
                if self._headways[error.name].told:
                    self._tell(f"{error.name} was removed there meanwhile: begins anew")
            except OperatorError as error:
                if (now := self._furthest.total()) > before:  # it moves
                    patience, before = Patience(), now
                if error.code != "E407" or not before or not patience.wait(error):
                    raise

    def _try(self) -> Checkpoint:
        url = self._url.rstrip("/")
        reader = CopyReader(url.rpartition("/")[0] if self._one else url)
        found = reader.get_part(
            self._store,
            NEEDED.__contains__,
            one=self._one,
            best=self._best,
            tell=self._warn,
            begun=self._begun,
        )
        if found.checkpoint is not None:
            return found.checkpoint
        damaged = "; ".join(f"{name}: {error}" for name, error in found.damaged[:8])
        why, fix = why_none(damaged, best=self._best, there=found.there > 0) or (
            NONE,
            "give the URL of a node's --checkpoint-copy or state directory, or of a checkpoint "
            "where a web server lists no folders",
        )
        raise operator_error("E404", f"checkpoint {url} cannot be used", why=why, fix=fix)

    def _overtaken(self) -> OperatorError:
        keep = "raise --keep-checkpoints of the node there"
        return operator_error(
            "E404",
            f"checkpoint {self._url} cannot be used",
            why=f"the node there has replaced each of {TRIES} copies before all of it was here",
            fix=keep if self._best else f"give --best, which is not replaced as often, or {keep}",
        )

    def _begun(self, name: str) -> OnProgress:
        headway = Headway(lambda text: self._tell(f"fetches {name}: {text}"))
        headway = self._headways.setdefault(name, headway)  # a new one would count what was there

        def came(done: int, total: int) -> None:
            free = shutil.disk_usage(self._store.directory).free
            if free < total - done:
                why = f"{(total - done) / 2**20:,.0f} MiB are to come, {free / 2**20:,.0f} are free"
                raise DiskFullError(self._store.directory, why)
            self._furthest[name] = max(done, self._furthest[name])
            headway(done, total)

        return came
