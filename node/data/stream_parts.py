"""The parts of a stream, dealt out and made: each a file of tokens (see :mod:`node.data.live`)."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from node.data.batches import batches
from node.data.cached_file import intact, write
from node.data.marks import Marks
from node.data.patience import Patience
from node.data.stream_recipe import Recipe, with_end
from node.data.streamed import DataSet, Reader
from node.errors import cannot_write, operator_error
from node.trainer.corpus import MORE_TEXT, is_held_out
from protocols.errors import OperatorError
from protocols.files import sweep

logger = logging.getLogger(__name__)

LOOK_S = 0.1  # between looks for a part that another process is to make
SIGN, SIGN_S = ".reading", 1.0  # a file that is touched so often while somebody reads
IDLE_S = 10.0  # seconds to wait for a maker before making it: ranks of an island ask at one time


def trained_on(reader: Reader) -> Iterator[bytes]:
    """Its texts that are not held out; raises OperatorError E601 where a whole pass has none."""
    last = reader.passes
    for text in reader:
        if not is_held_out(text):
            last = reader.passes
            yield text
        elif reader.passes > last + 1:
            raise operator_error(
                "E601",
                "the data set has nothing to train on",
                why="all of its texts are held out for evaluation, as one in twenty is",
                fix=MORE_TEXT,
            )


def deal(texts: Iterator[bytes], parts: int, part_bytes: int) -> Iterator[tuple[int, bytes]]:
    """One stretch: texts with the part that each is dealt to, until all parts have enough.

    An ended document counts for one byte more than its text.
    """
    filled = [(0, part) for part in range(parts)]
    while filled[0][0] < part_bytes:
        text = next(texts)
        size, part = filled[0]
        heapq.heapreplace(filled, (size + len(text) + 1, part))
        yield part, text


class Parts:
    """The parts of a stream as files of tokens. For several threads and processes at once.

    One process makes part s of every round, as long as it lives, and the others wait for it: only
    its reader stands where the next stretch begins. Another's would have to go there from a mark,
    which lies in the middle of a file, and the library reads a file from its beginning.
    """

    def __init__(
        self, recipe: Recipe, kind: np.dtype[Any], directory: Path, end: int | None = None
    ) -> None:
        """``directory``: where files may be kept, of this stream and others; ``end``: see coder."""
        self._recipe, self._kind = recipe, kind
        self._coder = recipe.coder(end)
        self._source = DataSet.parse(recipe.place)
        self._directory = directory / f"stream-{recipe.digest[:16]}"
        self._marks = Marks(self._directory / "marks")  # of stretches that were begun
        self._reader: tuple[int, Reader] | None = None  # the round whose stretch it is at
        self._making: int | None = None  # the part that this process makes in every round
        self._give_up: weakref.finalize[..., Any] | None = None  # ends that; so does gc
        self._lock = threading.Lock()
        # parts of before that are not what was written: this machine may have lost its power
        self._suspect: set[Path] | None = None
        self._looked = False  # whether those of other streams are gone
        self._told = False  # that there is less text than a stretch has
        self._signed = -math.inf  # when the last sign of reading was left
        self.made = 0  # by this process

    def get(self, round: int, part: int) -> npt.NDArray[np.integer[Any]]:
        """Tokens of a part, mapped; made if they are not there.

        Raises OperatorError E601 for a data set that cannot be read, after minutes of retries
        without progress if it may pass, E402 for a disk that is full for as long, and E603 where
        parts cannot be kept for another reason.
        """
        patience = Patience(full_passes=True)
        while True:
            try:
                return self._got(round, part, patience)
            except OperatorError as error:  # no lock is held: others may try meanwhile
                if error.code not in ("E601", "E402") or not patience.wait(error):
                    raise

    def _got(self, round: int, part: int, patience: Patience) -> npt.NDArray[np.integer[Any]]:
        path = self._directory / f"part-{round}-{part}.bin"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            idle_s = 0.0
            while (found := self._mapped(path)) is None:
                if not self._lock.acquire(timeout=LOOK_S):  # another thread makes one
                    continue
                try:
                    with self._alone() as alone:
                        if alone:
                            self._look_over()
                            if path.is_file():
                                continue
                            if self._makes(part) or idle_s >= IDLE_S:
                                self._make(round, part, path, patience)
                                continue
                            idle_s += LOOK_S
                finally:
                    self._lock.release()
                time.sleep(LOOK_S)
            return found
        except OSError as error:
            what = f"cannot keep training data in {self._directory}"
            raise cannot_write(what, error, otherwise="E603") from error

    def _mapped(self, path: Path) -> npt.NDArray[np.integer[Any]] | None:
        """A part that is there, whatever is being made meanwhile; None where it is not."""
        if self._suspect is None:
            files = self._directory.glob("part-*.bin")
            self._suspect = {file for file in files if intact(file) is None}
        if path not in self._suspect:
            with contextlib.suppress(FileNotFoundError):
                return np.memmap(path, dtype=self._kind, mode="r")
        return None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether no other process is making a part; then none does in this block."""
        with (self._directory / ".lock").open("w") as lock:
            yield _locked(lock.fileno())  # released by closing

    def _makes(self, part: int) -> bool:
        """Whether this process makes this part of every round: it does if no other does."""
        if self._making == part:
            return True
        lock = os.open(self._directory / f".maker-{part}", os.O_RDWR | os.O_CREAT, 0o666)
        with contextlib.ExitStack() as refused:
            refused.callback(os.close, lock)
            if not _locked(lock):
                return False
            refused.pop_all()
        if self._give_up is not None:  # the island has another slot by now
            self._give_up()
        self._making, self._give_up = part, weakref.finalize(self, os.close, lock)
        return True

    def _look_over(self) -> None:
        """Remove parts that are not what was written, and, once, those of other streams."""
        for path in self._suspect or ():
            if intact(path) is None:  # what it lacked may have come by now
                path.unlink(missing_ok=True)
        self._suspect = set()
        if not self._looked:
            self._clear_others()
        self._looked = True

    def _clear_others(self) -> None:
        """Remove the parts of other streams, or of other rounds' sizes, that nobody trains on.

        Their marks stay, which are small: whoever comes back to one goes on from there. Who only
        waits for parts of a stream is not seen, and could have one made again, no more.
        """
        for folder in self._directory.parent.glob("stream-*"):
            if folder == self._directory:
                continue
            with contextlib.suppress(OSError), contextlib.ExitStack() as held:
                for name in (folder / ".lock", *folder.glob(".maker-*")):
                    lock = held.enter_context(name.open("r+b"))
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # in use, if it is refused
                sweep(folder)
                for part in folder.glob("part-*"):
                    part.unlink(missing_ok=True)

    def _make(self, round: int, part: int, path: Path, patience: Patience) -> None:
        at, reader = self._reader or (-1, None)
        known, mark = self._marks.nearest(round)
        if reader is None or at > round or at < known:
            at, reader = known, Reader(self._source, mark, self._sign)
        self._reader = None  # until it stands at the beginning of a stretch again
        try:
            while at < round:
                for _ in self._stretch(reader):
                    pass
                at += 1
                self._marks.note(at, reader.mark)
            own = (text for dealt, text in self._stretch(reader) if dealt == part)
            write(path, self._coded(own))
            self._marks.note(at + 1, reader.mark)
        finally:
            patience.got_to((reader.passes, reader.examples))
        self._reader = at + 1, reader
        self.made += 1
        there = [(int(old.name.split("-")[1]), old) for old in self._directory.glob("part-*")]
        before = max((number for number, _ in there if number < round), default=0)
        for number, old in there:  # the round before may still be read
            if number < before:
                old.unlink(missing_ok=True)

    def _stretch(self, reader: Reader) -> Iterator[tuple[int, bytes]]:
        passes, examples = reader.passes, reader.examples
        yield from deal(trained_on(reader), self._recipe.parts, self._recipe.part_bytes)
        # beyond where it began; that the data set begins anew in between is no matter
        again = (reader.passes - 1, reader.examples) > (passes, examples)
        if again and not self._told:
            self._told = True
            logger.warning(
                "%s has less text than one stretch of it takes (inner steps, batch, data.islands): "
                "texts are read again within a round",
                self._recipe.place,
            )

    def _sign(self) -> None:
        if (now := time.monotonic()) >= self._signed + SIGN_S:
            self._signed = now
            (self._directory / SIGN).touch()

    @property
    def headway(self) -> int:
        """Another number whenever a process of this machine has read, or passed, more examples."""
        try:
            return (self._directory / SIGN).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _coded(self, texts: Iterator[bytes]) -> Iterator[bytes]:
        for batch in batches(texts, len):
            for ids in self._coder.encode(batch):
                yield with_end(ids, self._coder, self._kind).tobytes()


def _locked(handle: int) -> bool:
    """Lock an open file; False where another has it locked."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
