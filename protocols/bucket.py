"""A limit of bytes a second that is smooth: small steps, never a burst worth more than 50 ms."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_SAVED_S = 0.02  # what may be saved up while nothing is sent
_PIECE_S = 0.005  # one grant; with what was saved up a burst stays below 50 ms
_SPENT = 0.75  # of the rate: at most this is charged for what is sent without a grant,
_SPENT_S = 0.5  # and this many seconds' worth at once
_MIN_PIECE = 1400  # about one packet
_MAX_PIECE = 1 << 20


class Bucket:
    """Grants of bytes at ``rate`` bytes a second; None: no limit. Safe to use from any thread.

    A grant may be larger than what there is; the next one then waits until the debt is paid. What
    is sent without one (:meth:`spend`) is charged too, but a quarter of the rate is always left for
    grants: a peer that asks for many answers must not stop those who wait for one.
    """

    def __init__(self, rate: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._saved = 0.0
        self._at = clock()
        self._set(rate)
        self._charged = self._rate * _SPENT_S  # of what is spent; more is free

    def change(self, rate: float | None) -> None:
        """From now on this is the limit; what is saved up or owed stays."""
        with self._lock:
            self._refill()
            self._set(rate)

    def _set(self, rate: float | None) -> None:
        if rate is not None and rate <= 0:
            raise ValueError(f"a limit of {rate} bytes a second")
        self.limited = rate is not None
        self._rate = rate or 1.0
        self._piece = int(min(max(self._rate * _PIECE_S, _MIN_PIECE), _MAX_PIECE))

    def take(self, want: int) -> int:
        """How many bytes may be sent now, at most ``want``; 0: none before :meth:`wait` is over."""
        if not self.limited:
            return want
        with self._lock:
            self._refill()
            if self._saved < 0:
                return 0
            granted = min(want, self._piece)
            self._saved -= granted
            return granted

    def spend(self, count: int) -> None:
        """``count`` bytes went out without a grant; most of them are charged to later grants."""
        if self.limited:
            with self._lock:
                self._refill()
                charged = min(count, self._charged)
                self._charged -= charged
                self._saved -= charged

    def wait(self) -> float:
        """Seconds until something can be taken again."""
        with self._lock:
            self._refill()
            return max(0.0, -self._saved / self._rate) if self.limited else 0.0

    def _refill(self) -> None:
        now = self._clock()
        if not self.limited:
            self._saved = 0.0  # nothing is saved up when a limit is set
        gained = (now - self._at) * self._rate
        self._saved = min(self._saved + gained, self._rate * _SAVED_S)
        self._charged = min(self._charged + gained * _SPENT, self._rate * _SPENT_S)
        self._at = now
