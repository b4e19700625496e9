"""How often a peer, or an address, may ask for something."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

RATE = 200.0  # calls a second one peer may make, in the long run
BURST = 1000.0


class RateLimit:
    """A token bucket per peer; the least recently used buckets are forgotten."""

    def __init__(
        self,
        rate: float = RATE,
        burst: float = BURST,
        *,
        clock: Callable[[], float] = time.monotonic,
        limit: int = 4096,
    ) -> None:
        self._rate, self._burst, self._clock, self._limit = rate, burst, clock, limit
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, peer: str, count: int = 1) -> bool:
        """Use ``count`` tokens of ``peer``; False, and none is used, where fewer are left."""
        now = self._clock()
        tokens, since = self._buckets.pop(peer, (self._burst, now))
        tokens = min(self._burst, tokens + (now - since) * self._rate)
        allowed = tokens >= count
        self._buckets[peer] = (tokens - count if allowed else tokens, now)
        if len(self._buckets) > self._limit:
            self._buckets.popitem(last=False)
        return allowed
