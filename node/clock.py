"""The wall clock as it was when the process started, and one that counts what is waited.

:data:`wall` is gone on with since: nobody can set it. Where the machine stood still and the seconds
since its boot with it, :mod:`node.entry.timekeeping` puts it right.

Announcements expire, so a node whose clock is set by an hour while it runs would hear nobody,
and be heard by nobody; and a node that hangs would be healthy until a clock that was set back is
where it was. How far the clock was off at the start the greetings have told
(:mod:`bootstrap.handshake`). Time in which the machine sleeps counts, where the system tells it.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def since_boot() -> float:
    """Seconds that only go forward, with those that the machine slept through (Linux)."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class SteadyClock:
    """Unix seconds, by what ``wall`` said once and ``since`` has counted from then on.

    Until it is :meth:`put`.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, since: Callable[[], float] = since_boot
    ) -> None:
        self._wall, self._since = wall, since
        self._epoch = wall() - since()

    def __call__(self) -> float:
        return self._epoch + self._since()

    def behind(self) -> float:
        """How far it is behind the machine's own clock, which anybody may set; seconds."""
        return self._wall() - self()

    def put(self, by: float) -> None:
        """Put it forward by so many seconds, or back."""
        self._epoch += by


wall = SteadyClock()


class Waited:
    """Seconds that were waited for others, who could do nothing while this process stood still.

    So between two looks they are ``most_s`` at most: whoever looks does so more often.
    """

    def __init__(self, most_s: float, since: Callable[[], float] = time.monotonic) -> None:
        self._since, self._most_s = since, most_s
        self._seconds, self._looked = 0.0, since()

    def __call__(self) -> float:
        now = self._since()
        self._seconds += min(now - self._looked, self._most_s)
        self._looked = now
        return self._seconds
