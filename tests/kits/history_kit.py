"""A run's history behind an event log with a clock in hand, and a disk that is full."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from node.monitor.event_log import EventLog
from node.monitor.events import RoundDone
from node.monitor.history import History

RUN = "8c41"


def done(round_: int, **changes: object) -> RoundDone:
    return RoundDone(round=round_, **changes)  # type: ignore[arg-type]


def island(loss: float, tokens: int = 0) -> dict[str, float]:
    return {"loss": loss, "tokens": tokens}


class Kit:
    """A history behind an event log with a clock in hand."""

    def __init__(self, path: Path | None = None, max_rows: int = 64, me: str = "") -> None:
        self.now = 1000.0
        self.history = History(path, max_rows=max_rows, me=me)
        self.history.begin(RUN)
        self.log = EventLog(clock=lambda: self.now)
        self.log.subscribe(self.history)

    def rounds(self, *numbers: int, **changes: object) -> None:
        for number in numbers:
            self.now += 10
            self.log.emit(done(number, **changes))


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Files take no more bytes than these, as on a disk that is full then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
