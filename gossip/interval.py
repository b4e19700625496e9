"""How long it usually is from one round to the next."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

SMOOTHING = 0.3  # weight of the newest
OUTAGE = 3.0  # times the longest of late: one that takes longer tells of an outage
LATE = 8  # rounds


@dataclass
class Interval:
    """A moving mean in which an outage counts for little: this machine, or another, stood still.

    If rounds have become that much longer for good, the mean follows within a few of them.
    """

    usual_s: float = 0.0  # 0: not known yet
    _late: deque[float] = field(default_factory=lambda: deque(maxlen=LATE))

    def add(self, seconds: float, *, repeated: bool = False) -> None:
        """One more. Of rounds only ``repeated`` none is a short one once there was another.

        They may be all that a member sees whose link is too slow for its own.
        """
        weight = SMOOTHING if self.usual_s else 1.0
        longest = max(self._late, default=0.0)
        seconds = min(seconds, OUTAGE * longest) if longest else seconds
        if not repeated:
            self._late.append(seconds)
            weight = max(SMOOTHING, 1 / len(self._late))  # the first takes the repeated ones' place
        elif self._late and seconds <= self.usual_s:
            return
        self.usual_s += weight * (seconds - self.usual_s)
