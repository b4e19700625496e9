"""Batches that are read beside the loop, where that may take longer than a collective call may.

Where no mark is left, as on a host that was replaced, all texts before a stream's part are read for
it, and over a slow link a large file comes for half an hour. The other ranks of the island would
wait in their next collective call, give it up (E406), and all of them would start again, with that
reading from its beginning. So a thread reads, and the ranks agree between two steps on whether all
have theirs; until then they still do what the daemon says. Rank 0 tells it who is waited for, and
gives up where nothing moves any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from node.data.ahead import ReadPosition
from node.data.live import StreamData
from node.errors import operator_error
from node.headway import counted
from node.trainer.channel import MAX_AWAITED, Awaited
from node.trainer.data import Batches, TrainingData

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # seconds that one look waits: a small part of what a collective call may take
TELL_S = 60.0  # between lines about a batch that is still not there
FIRST_S = 10.0  # what has come before is not worth an event
# Without any sign that data come. Refusals are told after minutes (node/data/patience.py); this is
# for what hangs, and long: a library that goes on in the middle of a file reads all before that
# place in one call, over a slow link for half an hour.
STILL_S = 3600.0
GAP_S = 60.0  # between two looks: more, and the ranks have done something else meanwhile
HERE = -1  # a rank's sign that it has its rows
NAMED = 8  # ranks in one line


def may_take_long(data: Batches) -> bool:
    """Whether a batch may have to be fetched or made first; a disk that hangs is a fault, E406."""
    return isinstance(data, StreamData) or (
        isinstance(data, TrainingData) and data.ahead is not None
    )


class Early:
    """One rank's rows of the step that comes next."""

    def __init__(self, data: Batches, look_s: float = LOOK_S) -> None:
        self._data, self._look_s = data, look_s
        self._reading: _Reading | None = None

    def here(self, place: ReadPosition, rows: Sequence[range]) -> bool:
        """Whether the rows are here; waits a moment for them, and raises what reading has met.

        That at once: the other ranks may have to wait for theirs for long.

        The first call starts it, but only one thread reads at a time: rows that were asked for at
        another place are finished first.
        """
        reading, wanted = self._reading, (place, tuple(rows))
        if reading is None or (reading.wanted != wanted and reading.done.is_set()):
            reading = self._reading = _Reading(self._data, wanted)
        found = reading.done.wait(self._look_s)
        if not found:
            reading.tell()
        there = found and reading.wanted == wanted
        if there and reading.error is not None:
            raise reading.error
        return there

    @property
    def sign(self) -> int:
        """Another number whenever reading has got on."""
        return self._data.headway

    def batch(self, place: ReadPosition, rows: range) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        reading = self._reading
        read = reading is not None and reading.wanted[0] == place and reading.done.is_set()
        if reading is not None and read and rows in reading.found:
            return reading.found[rows]
        return self._data.batch(place.round, place.slot, place.slots, place.step, rows)


class Wait:
    """For whom all wait, and for how long nothing has moved; on rank 0."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None
        self._looked = self._moved = 0.0
        self._signs: tuple[int, ...] = ()
        self._told = False

    def look(self, step: int, signs: Sequence[int]) -> Awaited | None:
        """What to tell the daemon, now that the ranks have given these signs (none: all are HERE).

        Raises OperatorError E406 where nothing has moved for :data:`STILL_S`.
        """
        now, told = self._clock(), self._told
        if self._began is None or now > self._looked + GAP_S:
            self._began = self._moved = now
        self._looked, waited = now, now - self._began
        if not signs:
            self._began, self._told = None, False
            return Awaited(step, waited) if told else None
        if tuple(signs) != self._signs:
            self._signs, self._moved = tuple(signs), now
        ranks = tuple(rank for rank, sign in enumerate(signs) if sign != HERE)
        if (still := now - self._moved) > STILL_S:
            raise operator_error(
                "E406",
                f"the data of step {step} do not come",
                why=f"{named(ranks)} waits for them, and nothing has moved for {still:.0f} s",
                fix="look at the place that --data names, at the way to it, and at the disk with "
                "the cache",
            )
        if told or waited < FIRST_S:
            return None
        self._told = True
        return Awaited(step, waited, ranks[:MAX_AWAITED])


def named(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``rank 0, 1, 2, … (64 ranks)``."""
    shown = "rank " + ", ".join(map(str, ranks[:NAMED]))
    return shown if len(ranks) <= NAMED else f"{shown}, … ({counted(len(ranks), 'rank')})"


class _Reading:
    """A thread that reads some rows."""

    def __init__(self, data: Batches, wanted: tuple[ReadPosition, tuple[range, ...]]) -> None:
        self.wanted, self._data = wanted, data
        self.found: dict[range, tuple[Tensor, Tensor]] = {}
        self.error: Exception | None = None
        self.done = threading.Event()
        self._began = self._told = time.monotonic()
        threading.Thread(target=self._run, name="data-early", daemon=True).start()

    def tell(self) -> None:
        """A line, once in a while, in the log of the rank that the others wait for."""
        now = time.monotonic()
        if now - self._told >= TELL_S:
            place = self.wanted[0]
            waited = now - self._began
            logger.warning("step %d waits for its data, %.0f s so far", place.step, waited)
            self._told = now

    def _run(self) -> None:
        place, rows = self.wanted
        try:
            for part in rows:
                if part:
                    self.found[part] = self._data.batch(
                        place.round, place.slot, place.slots, place.step, part
                    )
        except Exception as error:  # noqa: BLE001 - raised where the rows are asked for
            self.error = error
        finally:
            self.done.set()
