"""How many connections carry what goes from one peer to another: over long ways several. Pure.

A connection that has rested begins with :data:`BEGINS` bytes a round trip and doubles them with
each (RFC 6928, RFC 5681 section 4.1), and what it reaches where packets get lost falls with the
round trip (Mathis et al. 1997). So over a long way one is hardly up to speed when a transfer ends,
and several together are sooner, and fall back less. Over short ways, or narrow ones that a few
first windows fill, they would only crowd each other out.

Measured with `benchmarks/far.py`: docs/experiments.md.
"""

from __future__ import annotations

from math import inf

FAR_S = 0.06  # from this round trip on one connection is too few:
EACH_S = 0.02  # there is one for each of these in it
MOST = 8
BEGINS = 10 * 1460  # bytes


def streams(round_trip_s: float, speed: float = inf) -> int:
    """Connections over a way of this length that carries ``speed`` bytes a second between them."""
    if round_trip_s < FAR_S:
        return 1
    return max(1, int(min(round_trip_s / EACH_S, speed * round_trip_s / BEGINS, MOST)))
