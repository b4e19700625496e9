"""How long a peer's silence is normal: by its rhythm, link, and this node's own stalls. Sans-IO.

Every live node announces itself once a heartbeat. It is overdue after a heartbeat, plus the time by
which it has usually been late (a loaded machine), plus as long as its link may stand still (round
trips, :mod:`gossip.membership.trips`). All of this is measured here, so delays of the path and of
this node are included. What this node misses while it stands still itself (a laptop lid, a stopped
process, a processor that it does not get) is nobody's silence at all: :class:`Wakefulness`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gossip.membership.trips import RoundTrip, answer_s

MEMORY = 8.0  # heartbeats after which what was measured counts a third
DEVIATIONS = 4.0
TRUSTED = 8  # announcements: before, nobody knows how regular they are
MOST_LATE_S = 10.0  # nobody can make the others wait for longer by being irregular
NOISE_S = 0.05  # timers that fire up to this late say nothing


@dataclass
class Rhythm:
    """How much later than a heartbeat after the one before a peer's announcements come. Seconds.

    Weighed by the time between them: many at once say no more than one.
    """

    late: float = 0.0
    deviation: float = 0.0
    count: int = 0

    def add(self, gap: float, heartbeat: float) -> None:
        """An announcement has come ``gap`` seconds after the last one.

        One that is out of all proportion tells of an outage and not of a rhythm: it counts as
        twice the longest so far, or a heartbeat, so that a slower rhythm is learnt from a few.
        """
        late = min(max(0.0, gap - heartbeat), max(heartbeat, 2 * self.longest))
        gain = 1.0 - math.exp(-min(gap, heartbeat + late) / (MEMORY * heartbeat))
        self.deviation += gain * (abs(late - self.late) - self.deviation)
        self.late += gain * (late - self.late)
        self.count += 1

    @property
    def longest(self) -> float:
        """What its announcements are hardly ever late by."""
        return self.late + DEVIATIONS * self.deviation


def silence_s(heartbeat: float, rhythm: Rhythm, trip: RoundTrip | None, unknown: float) -> float:
    """For how long a peer may be silent; ``unknown`` at least before both are measured."""
    answer = answer_s(trip, 0.0)
    silence = heartbeat + min(rhythm.longest + answer, MOST_LATE_S)
    return silence if answer and rhythm.count >= TRUSTED else max(silence, unknown)


@dataclass
class Wakefulness:
    """Whether this process runs when it means to, told by how late its own timers fire."""

    usual: RoundTrip = field(default_factory=lambda: RoundTrip(0.0, 0.0))  # seconds too late
    _counted: float = -math.inf  # what was missed up to then is counted

    def woke(self, due: float, now: float) -> float:
        """A timer that was ``due`` fires ``now``: seconds in which nobody could be heard.

        Of several timers that were held up by one stall each counts what the others have not.
        """
        late = now - due
        missed = now - max(due, self._counted)
        self.usual.add(max(0.0, late))
        if missed <= NOISE_S:
            return 0.0
        self._counted = now
        return missed

    def dazed(self, late: float) -> bool:
        """Whether this is more than usual: what was said meanwhile is to be heard first."""
        return late > max(NOISE_S, self.usual.longest)
