"""For how long this node stood still of late: suspended, frozen or stopped, its ranks with it.

A batch system suspends a job, or somebody pauses a container. The time that a collective call of
the ranks may take goes on meanwhile, so once they move again the call that they stood in has taken
too long, and they end. No rank is at fault then. All that tells is a look that is due every few
seconds and comes far later. Sans-IO.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

KEPT = 16  # standstills


@dataclass
class Absence:
    """Of one life of the ranks. ``every_s``: between two looks."""

    every_s: float
    _due: float | None = None  # the next look
    _found: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT))

    def look(self, now: float) -> None:
        """This process is at work, by a clock that the limits of collective calls go by, too."""
        missed = now - self._due if self._due is not None else 0.0
        if missed >= self.every_s:
            self._found.append((now, missed))
        self._due = now + self.every_s

    def within(self, limit_s: float, now: float) -> float:
        """Seconds of the longest standstill that explains why ``limit_s`` are over; 0: none does.

        It has ended in these seconds and took half of them at least: what was left for a call is
        more than it ever takes, but for a rank that hangs.
        """
        self.look(now)
        missed = max((missed for end, missed in self._found if now - end < limit_s), default=0.0)
        return missed if missed >= limit_s / 2 else 0.0
