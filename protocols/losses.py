"""Ways that lose packets by themselves: noticed, and left to BBR where the system has it.

Cubic and Reno take every lost packet for a queue that was full and send more slowly, for longer the
longer the round trip: what they reach falls with it and with the root of the share that is lost
(Mathis et al. 1997). Radio, and long ways through many networks, lose packets without any queue;
BBR goes by what arrives instead (Cardwell et al. 2016). On a way that loses nothing it moves less
than they do, so a connection is changed only once it has been seen to lose. One that was opened
behind a queue knows no shorter round trip, so the shortest of all to the same host counts.

Noticed here as well: that a way is long, so that bursts are better spread over a round trip.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocols.lane_socket import Told
from protocols.streams import FAR_S

SHORT_S = 0.005  # a round trip within which what was lost is soon made good
QUEUE_S = 0.03  # beyond the shortest round trip: a queue was on the way, and may have been full
OFTEN = 3  # looks that found something lost without one
SETTLED = 8  # looks: the first round trips may be those of a queue
HOSTS = 4096  # whose shortest round trips are remembered


@dataclass
class Losses:
    """Of one connection. Sans-IO: :meth:`look` is given what the system tells."""

    host: str = ""  # of the other end
    shortest: dict[str, float] = field(default_factory=dict)  # round trips by host, of all
    _again: int = 0  # segments sent again, of all that was ever sent
    _without: int = 0  # looks
    _done: bool = False
    _looks: int = 0

    def far(self) -> bool:
        """Whether the way is long, by what :meth:`look` was given; true once."""
        return self._looks == SETTLED and self.shortest.get(self.host, 0.0) >= FAR_S

    def look(self, told: Told) -> bool:
        """Whether it should be changed; true once."""
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
