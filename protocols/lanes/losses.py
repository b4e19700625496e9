"""Links that lose packets without congestion are noticed and left to BBR, where there is one.

Cubic and Reno take every lost packet for a full queue and send more slowly, for longer the longer
the round trip: their speed falls with the round trip and with the root of the share that is lost
(Mathis et al. 1997). Radio, and long ways through many networks, lose packets without any queue;
BBR goes by what arrives instead (Cardwell et al. 2016). On a way that loses nothing it moves less
than they do, so a connection is changed only once it has been seen to lose. One that was opened
behind a queue knows no shorter round trip, so the shortest of all to the same host counts.

Noticed here as well: that a way is long, so that bursts are better spread over a round trip.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocols.lanes.socket import Told
from protocols.lanes.streams import FAR_S

SHORT_S = 0.005  # over a shorter round trip losses are soon made good
QUEUE_S = 0.03  # beyond the shortest round trip: a queue was on the way, and may have been full
OFTEN = 3  # looks that found losses without a queue
SETTLED = 8  # looks: the first round trips may be those of a queue
HOSTS = 4096  # whose shortest round trips are remembered


@dataclass
class Losses:
    """Of one connection. Sans-IO: :meth:`look` is given what the system tells."""

    host: str = ""  # of the other end
    shortest: dict[str, float] = field(default_factory=dict)  # round trips by host, of all
    _again: int = 0  # segments retransmitted, by the last look
    _without: int = 0  # losses without a queue
    _done: bool = False
    _looks: int = 0

    def far(self) -> bool:
        """Whether the way is long, by what :meth:`look` was given; true once."""
        return self._looks == SETTLED and self.shortest.get(self.host, 0.0) >= FAR_S

    def look(self, told: Told) -> bool:
        """Whether the connection should be changed to BBR; true once."""
        self._looks += 1
        lost, self._again = told.again > self._again, told.again
        shortest = min(told.round_trip, self.shortest.get(self.host, told.round_trip))
        if shortest:
            if self.host not in self.shortest and len(self.shortest) >= HOSTS:
                self.shortest.clear()
            self.shortest[self.host] = shortest
        queue = told.smoothed - shortest >= QUEUE_S
        if self._done or not lost or queue or shortest < SHORT_S:
            return False
        self._without += 1
        self._done = self._without >= OFTEN
        return self._done
