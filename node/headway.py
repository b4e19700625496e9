"""How far something long has come, told now and then: a state of gigabytes, a corpus.

And how many of what, in words.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from node.monitor.wording import duration

OnProgress = Callable[[int, int], None]  # done, in all; may raise, to end what it is told of
Tell = Callable[[str], object]  # a line for people

FIRST_S = 3.0  # what is done before is not worth a line
LONGEST_S = 60.0  # between two lines; each pause is longer than the one before
_GROWS = 1.5


class Headway:
    """Called with what is done of how much; ``tell`` gets ``12 %, 1.2 of 10.4 GB, …, 7m left``."""

    def __init__(
        self,
        tell: Callable[[str], object],
        *,
        total: int = 0,
        unit: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``total``: of all parts, where there are several. ``unit`` empty: bytes."""
        self._tell, self._total, self._unit, self._clock = tell, total, unit, clock
        self.told = False  # whether anything was
        self._before = 0  # of parts that are complete
        # that was there before it began, and says nothing of its speed: of this part, and of those
        self._had = self._had_before = 0
        self._began = self._next = clock()
        self._pause = FIRST_S
        self._next += FIRST_S

    def part_done(self, size: int) -> None:
        """A part of ``size`` is complete; what is told from now on is of the next one."""
        self._before += size
        self._had, self._had_before = 0, self._had_before + self._had

    def had(self, size: int) -> None:
        """So much of this part was there before it was begun, now for the last time."""
        self._had = size

    def __call__(self, done: int, total: int, sources: int = 0) -> None:
        """``done`` of ``total`` are there of this part, from so many sources."""
        now = self._clock()
        if now < self._next:
            return
        self._pause = min(LONGEST_S, self._pause * _GROWS)
        self._next = now + self._pause
        done, total = self._before + done, max(self._total, self._before + total)
        speed = max(0, done - self._had - self._had_before) / (now - self._began)
        parts = [f"{done / total:.0%}" if total else "", self._amount(done, total)]
        if sources:
            parts.append(f"from {counted(sources, 'peer')}")
        if speed and not self._unit:
            parts.append(f"{speed / 1e6:.1f} MB/s")
        if speed:
            parts.append(f"{duration((total - done) / speed)} left")
        self.told = True
        self._tell(", ".join(part for part in parts if part))

    def _amount(self, done: int, total: int) -> str:
        if self._unit:
            return f"{done:,} of {total:,} {self._unit}"
        size, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
        return f"{done / size:.1f} of {total / size:.1f} {name}"


def from_here_on(headway: Headway) -> OnProgress:
    """``headway`` of one part, of which what the first call says was there before."""
    first = True

    def came(done: int, total: int) -> None:
        nonlocal first
        if first:
            headway.had(done)
            first = False
        headway(done, total)

    return came


def counted(count: int, what: str) -> str:
    """``1 file``, ``1,200 files``."""
    return f"{count:,} {what}{'s' * (count != 1)}"
