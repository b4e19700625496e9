"""What honest deadlines may be at most in a cell of the fault matrix, by its links alone.

The engine works its deadlines out of what it measures, so a bound made of these grows with every
mistake in them. This one knows only how the cell is built: how fast its links are, how long their
queues, how many bytes a round has.

*A round trip* waits in four queues at most: on its way out, in, and both once more. And both ends
may not run when they want to, on a machine that others use: how late they are is measured apart
from the engine. But nobody may wait for longer than some seconds, however busy the machine is.

*Patience* is for a transfer whose segment was lost, and lost again: three of TCP's time-outs (the
first one, and the doubled second one). RFC 6298 makes a time-out of the mean trip and four times
its deviation. Trips between 0 and T with a mean of m deviate by 2 m (T - m) / T at most, so the sum
is at most 9 m - 8 m² / T, which is largest at m = 9/16 T: 81/32 T. The way between two others adds
a mean trip, T at most.

*The bytes* of a round are at most two vectors each way for a member (where two merge all there is,
each sends half of its own vector and three halves of what is merged), and for whoever merges
nothing one. They may be expected to take twice as long, since a link that was busy only in part is
measured too slow.

*Silence* is forgiven for a heartbeat, as long again for one that comes late, and patience with the
link; or for some heartbeats, as long as nothing is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.netns import QUEUE_MS
from gossip.membership.members import Patience

WIRE = 1.045  # bytes on the wire for each that is carried
QUEUES = 4
TIME_OUTS = 3
WORST_S = 5.0  # however busy the machine is
LONGEST = 81 / 32 + 1  # of a time-out: round trips
VECTORS = 2
MEASURED = 0.5  # of what a link carries


@dataclass(frozen=True)
class Deadlines:
    """Seconds: of a transfer that stands still, of a round's bytes, of a silent member."""

    patience: float
    expected: float
    silence: float

    def stall(self, *, silent: bool, connected: bool, heartbeat: float) -> float:
        """The longest that survivors may be held up.

        ``silent``: nobody is told of the fault; ``connected``: the victim still says something.
        """
        if silent:
            notice = 2.5 * self.patience + 4 * self.expected  # of an owner that does not deliver
            if not connected:
                notice = min(notice, self.silence)  # or of its silence
            notice += self.patience / 4  # doubts wait for each other
        else:
            notice = heartbeat  # the next message fails
        stand = self.patience  # the next in the leading order takes its turn
        # slices are waited for, and what is merged is sent
        repair = self.patience + 4 * self.expected
        return notice + stand + repair


def honest(
    vector: int, mbit: float, narrow: float | None, waits: Patience, lag: float
) -> Deadlines:
    """The longest for a vector of so many bytes; ``narrow``: Mbit/s of who merges nothing.

    ``lag``: seconds by which a process is late.
    """
    trip = QUEUES * QUEUE_MS / 1000 + 2 * lag
    patience = min(TIME_OUTS * LONGEST * trip, WORST_S)
    megabits = vector * 8 * WIRE / 1e6
    usual = max(VECTORS * megabits / mbit, megabits / narrow if narrow else 0.0)
    beat = waits.heartbeat_s
    silence = max(waits.unknown_beats * beat, 2 * beat + patience)
    return Deadlines(patience, usual / MEASURED, silence)
