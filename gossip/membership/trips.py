"""How long a transfer over a link may stand still, by the round trips measured over it.

When a segment is lost with those behind it, a transfer over TCP stands still for one retransmission
time-out, and for three if the repetition is lost as well, since the time-out doubles. That much is
tolerated, and no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

LEAST_S = 0.2  # no common TCP repeats earlier, however short the round trip (RFC 6298 says 1 s)
FORGIVEN = 3.0  # time-outs: the first, and the doubled second
MOST_S = 5.0  # nobody can make the others wait for longer by answering late
GAIN, DEVIATION_GAIN = 1 / 8, 1 / 4  # RFC 6298, section 2
DEVIATIONS = 4.0
LATE = 32  # measurements, of which the shortest counts
TRUSTED = 8  # measurements: before, one that met a burst would count for all,
ENOUGH = 3  # for the shortest: a burst makes them longer, never shorter


@dataclass
class RoundTrip:
    """Round trips to one peer: smoothed, and how much they vary (RFC 6298, section 2). Seconds."""

    mean: float
    deviation: float
    count: int = 1
    _newest: deque[float] = field(default_factory=lambda: deque(maxlen=LATE))

    @classmethod
    def first(cls, seconds: float) -> RoundTrip:
        """After one measurement."""
        trip = cls(seconds, seconds / 2)
        trip._newest.append(seconds)
        return trip

    def add(self, seconds: float) -> None:
        """Another measurement.

        Longer than twice the longest so far, it tells of an outage rather than of the link (RFC
        6298 leaves such out as well, section 3). It counts as that much, so that a link that has
        become longer is believed after a few.
        """
        seconds = min(seconds, 2 * max(self.longest, LEAST_S / 2))
        self.deviation += DEVIATION_GAIN * (abs(seconds - self.mean) - self.deviation)
        self.mean += GAIN * (seconds - self.mean)
        self.count += 1
        self._newest.append(seconds)

    @property
    def shortest(self) -> float:
        """The shortest of late: hardly more than what the way itself takes."""
        return min(self._newest, default=self.mean)

    @property
    def longest(self) -> float:
        """What a round trip hardly ever takes longer than."""
        return self.mean + DEVIATIONS * self.deviation


def answer_s(trip: RoundTrip | None, unknown: float) -> float:
    """How long a short question over a link, or its answer, may be on its way.

    ``unknown`` before there are measurements.
    """
    if trip is None or trip.count < TRUSTED:
        return unknown
    return min(FORGIVEN * max(LEAST_S, trip.longest), MOST_S)


def stillness_s(trips: Iterable[RoundTrip], unknown: float) -> float:
    """For how long a transfer between any two of these may stand still.

    ``unknown`` before there are measurements. The way from one peer to another is no longer than
    by way of whoever has measured both; what queues at that one's own link counts once.
    """
    known = sorted((t for t in trips if t.count >= TRUSTED), key=lambda t: t.longest, reverse=True)
    if not known:
        return unknown
    longest = known[0].longest + (known[1].mean if len(known) > 1 else 0.0)
    return min(FORGIVEN * max(LEAST_S, longest), MOST_S)
