"""The log of a node's events: numbered, written, kept and passed on.

An :class:`EventLog` numbers each event, appends it as a JSON line to ``events.jsonl``, keeps the
newest in memory for the API, and calls its subscribers in turn. It starts no tasks and never
holds training up: what a full disk refuses is counted and dropped.

>>> log = EventLog(state_dir.events)
>>> log.subscribe(console)
>>> log.emit(PeerJoined(peer="12D3KooW…", name="alps"))
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from node.monitor.events import Event, Record, RoundDone

MAX_LOG_BYTES = 16 * 1024 * 1024  # of one file; then it becomes events.jsonl.1
KEPT_LOGS = 2  # older files beside the current one
KEPT_IN_MEMORY = 2048
KEPT_ROUNDS = 256  # of these, with each island's figures: there may be hundreds of islands
LOOK_LINES = 16  # between two looks whether the file is still there

Subscriber = Callable[[Record], None]


class EventLog:
    """Numbers, writes, keeps and passes on events. ``path`` None: in memory only."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        max_bytes: int = MAX_LOG_BYTES,
        kept: int = KEPT_LOGS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.instance = secrets.token_hex(8)  # tells API readers that numbering began anew
        self.dropped = 0  # lines that could not be written
        self.recent: deque[Record] = deque(maxlen=KEPT_IN_MEMORY)
        self._rounds: deque[int] = deque()  # those in ``recent`` with islands' figures
        self._max_bytes = max_bytes
        self._kept = kept
        self._clock = clock
        self._seq = 0
        self._subscribers: list[Subscriber] = []
        self._descriptor: int | None = None
        self._size = 0
        self._unseen = 0  # lines since the last look at it
        self._torn = False  # the last line was cut short, by a full disk or as a process ended

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call ``subscriber`` with each further record, in the emitter's own call."""
        self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Call it no more."""
        self._subscribers.remove(subscriber)

    def emit(self, event: Event) -> Record:
        """Number, write and pass on one event."""
        self._seq += 1
        record = Record(self._seq, self._clock(), event)
        self.recent.append(record)
        if isinstance(event, RoundDone) and event.islands:
            self._rounds.append(record.seq)
            if len(self._rounds) > KEPT_ROUNDS:
                self._shorten(self._rounds.popleft())
        if self.path is not None:
            self._write(record.line().encode() + b"\n")
        for subscriber in self._subscribers:
            subscriber(record)
        return record

    def _shorten(self, seq: int) -> None:
        """Keep the round of an older record without what each island did."""
        place = seq - self.recent[0].seq
        if place < 0:  # it is gone
            return
        record = self.recent[place]
        assert isinstance(record.event, RoundDone)
        self.recent[place] = replace(record, event=replace(record.event, islands={}))

    def since(self, seq: int, limit: int = 500) -> list[Record]:
        """The oldest ``limit`` records still in memory with a higher number than ``seq``."""
        newer = list(itertools.takewhile(lambda record: record.seq > seq, reversed(self.recent)))
        return newer[::-1][:limit]

    def close(self) -> None:
        """Close the file; further events stay in memory."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self.path = None

    def _write(self, line: bytes) -> None:
        try:
            descriptor = self._open(len(line) + 1)
            data = b"\n" + line if self._torn else line
            written = os.write(descriptor, data)
        except OSError:  # a full or broken disk must not end training
            self.dropped += 1
            return
        self._size += written
        self._torn = written < len(data)
        self.dropped += self._torn

    def _open(self, more: int) -> int:
        assert self.path is not None
        self._unseen += 1
        if self._unseen >= LOOK_LINES:
            self._look(self.path)
        if self._descriptor is not None and self._size and self._size + more > self._max_bytes:
            self._rotate(self.path)
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            self._size = os.fstat(self._descriptor).st_size
            self._torn = self._size > 0 and os.pread(self._descriptor, 1, self._size - 1) != b"\n"
            if self._size and self._size + more > self._max_bytes:
                self._rotate(self.path)
                return self._open(more)
        return self._descriptor

    def _look(self, path: Path) -> None:
        """Open it anew where somebody has moved or removed it; it may also have been cut."""
        self._unseen = 0
        if self._descriptor is None:
            return
        mine = os.fstat(self._descriptor)
        self._size = mine.st_size
        try:
            if os.path.samestat(mine, os.stat(path)):
                return
        except FileNotFoundError:
            pass
        except OSError:  # nobody knows
            return
        os.close(self._descriptor)
        self._descriptor = None

    def _rotate(self, path: Path) -> None:
        assert self._descriptor is not None
        os.close(self._descriptor)
        self._descriptor = None
        self._size = 0
        for number in range(self._kept, 0, -1):
            newer = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
            with contextlib.suppress(FileNotFoundError):
                os.replace(newer, path.with_name(f"{path.name}.{number}"))
