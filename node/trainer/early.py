"""Batches that are read beside the loop, where that may take longer than a collective call may.

Where no mark is left, as on a host that was replaced, all texts before a stream's part are read for
it, and over a slow link a large file comes for half an hour. The other ranks of the island would
wait in their next collective call, give it up (E406), and all of them would start again, with that
reading from its beginning. So a thread reads, and the ranks agree between two steps on whether all
have theirs; until then they still do what the daemon says.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from torch import Tensor

from node.data.ahead import Place
from node.data.live import StreamData
from node.trainer.data import Batches, TrainingData

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # seconds that one look waits: a small part of what a collective call may take
TELL_S = 60.0  # between lines about a batch that is still not there


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

    def here(self, place: Place, rows: Sequence[range]) -> bool:
        """Whether reading the rows has ended, well or with an error; waits a moment for it.

        The first call starts it, but only one thread reads at a time: rows that were asked for at
        another place are finished first.
        """
        reading, wanted = self._reading, (place, tuple(rows))
        if reading is None or (reading.wanted != wanted and reading.done.is_set()):
            reading = self._reading = _Reading(self._data, wanted)
        found = reading.done.wait(self._look_s)
        if not found:
            reading.tell()
        return found and reading.wanted == wanted

    def batch(self, place: Place, rows: range) -> tuple[Tensor, Tensor]:
        """Inputs and targets; raises the error that ended reading them."""
        reading = self._reading
        if reading is not None and reading.wanted[0] == place and reading.done.is_set():
            if reading.error is not None:
                raise reading.error
            if rows in reading.found:
                return reading.found[rows]
        return self._data.batch(place.round, place.slot, place.slots, place.step, rows)


class _Reading:
    """A thread that reads some rows."""

    def __init__(self, data: Batches, wanted: tuple[Place, tuple[range, ...]]) -> None:
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
