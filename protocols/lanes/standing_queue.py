"""How long bytes stand in queues on their way out, and what that asks of a sender. Sans-IO.

What was sent longer ago than the shortest round trip and has not arrived stands somewhere: in this
system's buffers, or in front of the link. Where there is always some, the link is always busy, and
what arrives is what it carries; where there is much the queue soon overflows, and connections leave
each other behind. A sender that keeps it at a few packets sends at just the speed of the link and
loses nothing, as Vegas (Brakmo and Peterson 1995) and Copa (Arun and Balakrishnan 2018) do for one
connection. They compare what is under way with what the speed makes of a round trip; over long ways
an error of a few percent in the speed, or a pause before, would look like a queue.

Some of the queue may not be ours: acknowledgements wait behind what others send, and some ways are
longer at times. What stands there however slowly we send is left alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median

TARGET_S = 0.02  # of the link is to stand in the queue all the time,
SOME_BYTES = 16 * 1024  # and this much: a few packets of each of several connections
FULL = 0.4  # of the target: with this much or more the link was busy all the time
LONG = 1.25  # times the target: with this much or more the queue is too long
HORIZON_S = 0.5  # within which a queue is to come to its target
SLOWEST, FASTEST = 0.85, 1.05  # times the speed: the rate
SLOW = 0.95  # of the speed, where a queue of ours gets shorter for sure
SURE, UNSURE = 1 / 4, 1 / 16  # of a queue that stays: taken for others', each window
UNEVEN = 4  # times the median: no connection counts for more


def standing(loads: Sequence[int]) -> float:
    """Bytes that are under way to all peers, from those of each connection.

    If one has far more than most, its peer reads slowly, which says nothing of this node's link.
    """
    busy = [load for load in loads if load > 0]
    if not busy:
        return 0.0
    bound = UNEVEN * median(busy)
    return sum(min(load, bound) for load in busy)


@dataclass
class StandingQueue:
    """What stood in queues throughout the last window."""

    seconds: float | None = None  # of the link; None: not known
    full: bool = False  # the link was busy all the time
    long: bool = False  # and there is more than there should be
    tells: bool = False  # the queue is ours for sure: what arrived is what the link carries
    trim: float = 1.0  # times the speed: the rate at which the queue comes to its target
    _least: float = inf  # bytes in queues in this window
    _tells: bool = True  # the system did, all through this window
    _given: deque[tuple[float, int]] = field(default_factory=deque)  # bytes by when, a round trip
    _whole: bool = False  # there was something to send when it began
    _others: float = 0.0  # seconds that are none of ours

    def look(
        self, now: float, given: int, under_way: float | None, round_trip: float, wanting: bool
    ) -> None:
        """To be told often in a window.

        ``given`` bytes in all were given to the system by now; ``under_way`` of them, by
        :func:`standing`, have not arrived (None: not known). ``round_trip``: seconds, the mean of
        the sending connections' shortest ones.
        """
        fresh = self._fresh(now, given, round_trip)
        if wanting:
            self._tells = self._tells and under_way is not None
            self._least = min(self._least, max((under_way or 0.0) - fresh, 0.0))
        else:
            self._whole = False
            self.leave_out()

    def _fresh(self, now: float, given: int, round_trip: float) -> float:
        """Bytes given to the system within the last round trip: none of them can have arrived."""
        noted, since = self._given, now - round_trip
        if noted and given < noted[-1][1]:  # a connection has ended, and all that was to arrive
            gone = noted[-1][1] - given
            noted = self._given = deque((when, count - gone) for when, count in noted)
        noted.append((now, given))
        while len(noted) > 1 and noted[1][0] <= since:
            noted.popleft()
        (before, least), (after, most) = noted[0], noted[min(1, len(noted) - 1)]
        part = (since - before) / (after - before) if before < since < after else 0.0
        return given - least - part * (most - least)

    def leave_out(self) -> None:
        """A window is over that says nothing of the link."""
        self._least, self._tells = inf, True
        self._unknown()

    def over(self, window_s: float, speed: float, came: bool) -> None:
        """A window is over.

        ``speed`` in bytes a second is what the link is thought to carry; ``came``: all that was
        sent in it has arrived.
        """
        least, known = self._least, self._tells and self._least < inf
        self._least, self._tells = inf, True
        whole, self._whole = self._whole, True
        if not (known and whole):  # it has to fill first
            self._unknown()
            self.trim = self.trim if known else 1.0
            return
        before, self.seconds = self.seconds, least / speed
        target = TARGET_S + SOME_BYTES / speed
        over = self.seconds - target
        drained = (1 - self.trim) * window_s  # what it should be shorter by, if it is ours
        drains = before is not None and before - self.seconds >= drained / 4
        self.tells = not came or (drains and self.trim < 1)
        if before is not None and self.trim < 1 and not self.tells:
            self._others += (over - self._others) * (SURE if self.trim <= SLOW else UNSURE)
        self._others = max(0.0, min(self._others, over))
        ours = over - self._others
        self.full, self.long = self.seconds >= FULL * target, ours >= (LONG - 1) * target
        self.trim = min(max(1 - ours / HORIZON_S, SLOWEST), FASTEST)

    def _unknown(self) -> None:
        self.seconds, self.full, self.long = None, False, False
