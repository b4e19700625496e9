"""What a restarted member must not do: it has forgotten what it promised and voted.

Votes and promises are not written down, so whoever starts again stays out of the round in which
it may have made some. For :data:`LISTEN_S` it listens how far the swarm has come, and does not
decide anything meanwhile; in rounds up to the furthest it heard of it takes no part in deciding.
"""

from __future__ import annotations

LISTEN_S = 5.0  # a restarted member listens for so long how far the swarm is


class Forgetting:
    """What one member may have forgotten in one chain; nothing for a ``new_identity``."""

    def __init__(
        self, now: float, round_: int, *, joining: bool, new_identity: bool, among_others: bool
    ) -> None:
        self._started = now
        self.abstain_until = now + LISTEN_S if joining and not new_identity else 0.0
        self._last = round_ if round_ > 0 and among_others else -1

    def abstains(self, now: float) -> bool:
        """Whether this node listens, and is not to be taken into office meanwhile."""
        return now < self.abstain_until

    def listening(self, now: float) -> bool:
        """Whether it has restarted just now, and does not know yet how far the swarm is."""
        return self._last >= 0 and now < self._started + LISTEN_S

    def heard(self, round_: int) -> None:
        """We may have voted in rounds up to this one."""
        self._last = max(self._last, round_)

    def forgot(self, round_: int) -> bool:
        """Whether we may have voted in this round."""
        return round_ <= self._last
