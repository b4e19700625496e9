"""Lines to a terminal or a pipe, on a thread of their own: who does not read them stops nobody."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections import deque
from collections.abc import Callable

from node.monitor.events import Record

MAX_WAITING = 4 * 1024 * 1024  # bytes of lines that wait to be read; then the oldest are left out
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # whoever read is not there any more


class Printer:
    """Writes what is put to a descriptor, in order, whenever that takes it.

    ``missing`` words how many were left out, and which was the last of them; this stands where
    they would have stood. What is said last is never left out for what was said before it.
    """

    def __init__(self, descriptor: int, missing: Callable[[int, Record], bytes]) -> None:
        self._descriptor, self._missing = descriptor, missing
        self._lines: deque[tuple[Record, bytes]] = deque()
        self._waiting = 0  # bytes of these
        self._left_out = 0  # since the last line that was written
        self._last: Record  # of those that were left out
        self._over = False
        self._torn = False  # the line before was cut short by a full disk
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="atoll-console", daemon=True)
        self._thread.start()

    def put(self, record: Record, text: bytes) -> None:
        """Write ``text``, a record's, behind all that waits. Takes no time."""
        with self._changed:
            if self._over:
                return
            self._lines.append((record, text))
            self._waiting += len(text)
            while self._waiting > MAX_WAITING and len(self._lines) > 1:
                self._last, oldest = self._lines.popleft()
                self._waiting -= len(oldest)
                self._left_out += 1
            self._changed.notify()

    def finish(self, seconds: float) -> None:
        """Take nothing more, and return when all is written, or after ``seconds``."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join(seconds)

    def _work(self) -> None:
        while (found := self._next()) is not None:
            left_out, record, text = found
            try:
                self._write(self._missing(left_out, self._last) + text if left_out else text)
            except OSError as error:
                with self._changed:
                    if error.errno in _GONE:
                        self._over = True
                        return
                    if not self._left_out:  # else one that came after it
                        self._last = record
                    self._left_out += left_out + 1  # a full disk, say, may have room again

    def _next(self) -> tuple[int, Record, bytes] | None:
        """How many were left out before the next line, and that; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._over)
            if not self._lines:
                return None
            record, text = self._lines.popleft()
            self._waiting -= len(text)
            left_out, self._left_out = self._left_out, 0
        return left_out, record, text

    def _write(self, text: bytes) -> None:
        rest = memoryview(b"\n" + text if self._torn else text)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process has made the terminal's or pipe's end so
                ready = select.poll()
                ready.register(self._descriptor, select.POLLOUT)
                ready.poll()
            self._torn = bool(rest)
