"""How much arrives, in bytes a second: over windows, of short bodies, and lately. Sans-IO.

What :mod:`protocols.lanes.pacing` goes by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean

WINDOW_S = 0.25  # long beside the queues of links, short beside a round
SEARCHED = 4  # windows
KEPT = 32  # windows, eight seconds of sending: after these a slower link is believed
SPAN = 4  # windows in a row whose mean tells the speed
BURSTS = 1 / 16  # of the windows, the fastest, are not counted
SHORT_BYTES = 8192  # shorter bursts may arrive in one piece


@dataclass
class Windows:
    """Bytes a second over windows in which there was something to move all the time."""

    window_s: float = WINDOW_S
    _began: float | None = None
    _at: int = 0

    def note(self, now: float, total: int, wanting: bool) -> float | None:
        """``total`` bytes have come through by now; the speed, where a window is over.

        To be told several times a window; ``wanting``: there is something to move just now.
        """
        if not wanting:
            self._began = None
        elif self._began is None:
            self._began, self._at = now, total
        elif now >= self._began + self.window_s:
            speed = (total - self._at) / (now - self._began)
            self._began, self._at = now, total
            return speed
        return None


@dataclass
class Burst:
    """Bytes a second of what was sent in one go and has arrived before a window was over."""

    _since: float | None = None  # nothing had arrived by then
    _at: int = 0
    _long: bool = False

    def note(self, now: float, total: int, wanting: bool, under_way: bool) -> float | None:
        """As :meth:`Windows.note`; ``under_way``: some has not arrived yet."""
        if self._since is None:
            if wanting or under_way:
                self._since, self._at, self._long = now, total, False
            return None
        if wanting or under_way:
            if total == self._at:
                self._since = now
            return None
        count, seconds = total - self._at, now - self._since
        self._since = None
        return None if self._long or count < SHORT_BYTES or not seconds else count / seconds

    @property
    def short(self) -> bool:
        """Something is on its way, and no window is over yet."""
        return self._since is not None and not self._long

    def lasts(self) -> None:
        """A window is over, and tells more."""
        self._long = True


@dataclass
class IncomingSpeed:
    """What lately came in, in bytes a second; the link may carry more."""

    windows: int = 0  # how many have been seen
    _windows: Windows = field(default_factory=Windows)
    _seen: deque[float] = field(default_factory=lambda: deque(maxlen=2 * KEPT))

    def note(self, now: float, total: int, wanting: bool) -> None:
        """As :meth:`Windows.note`."""
        found = self._windows.note(now, total, wanting)
        if found is not None:
            self.windows += 1
            self._seen.append(found)

    @property
    def speed(self) -> float | None:
        """Nearly the most, since for much of the time no peer sent as fast as it could."""
        return most(self._seen) if len(self._seen) >= SEARCHED else None


def lasting(seen: Sequence[float]) -> float:
    """Nearly the most of ``seen`` over :data:`SPAN` windows in a row; of fewer, the mean of all."""
    span = min(SPAN, len(seen))
    return most([fmean(seen[at : at + span]) for at in range(len(seen) - span + 1)])


def most(seen: Collection[float]) -> float:
    """Nearly the most; while there are few, the second highest, or the only one."""
    skipped = max(int(BURSTS * len(seen)), min(1, len(seen) - 1))
    return sorted(seen)[-1 - skipped]
