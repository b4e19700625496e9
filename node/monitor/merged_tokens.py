"""How many tokens of each island were merged, for :mod:`node.monitor.history`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

MAX_TOTALS = 1024  # islands whose merged tokens are added up
MAX_UNDONE = 256  # newest rounds whose tokens are taken back where they are gone through again
MAX_MERGED = 10**15  # tokens of one island: whoever says more has made it up


class MergedTokens:
    """Sums by island, as far as this node knows, and what the newest rounds have in them."""

    def __init__(self, totals: Mapping[str, int] | None = None) -> None:
        self.totals: dict[str, int] = dict(totals or {})
        self._counted: deque[tuple[float, dict[str, int]]] = deque(maxlen=MAX_UNDONE)

    def add(self, round_: float, tokens: Mapping[str, int]) -> dict[str, int]:
        """A round comes after all before it, maybe once more; returns what of it counts."""
        while self._counted and self._counted[-1][0] >= round_:
            for peer, count in self._counted.pop()[1].items():
                self.totals[peer] -= count
        counted: dict[str, int] = {}
        for peer, count in tokens.items():
            if peer in self.totals or len(self.totals) < MAX_TOTALS:
                counted[peer] = count
                self.totals[peer] = self.totals.get(peer, 0) + count
        self._counted.append((round_, counted))
        return counted

    def learn(self, told: Mapping[str, int], before: int) -> None:
        """Others have told of all rounds before ``before``: what was counted since comes on top."""
        known = self.until(before)
        for peer, tokens in told.items():
            if peer in self.totals or len(self.totals) < MAX_TOTALS:
                own = known.get(peer, 0)
                since = self.totals.get(peer, 0) - own
                self.totals[peer] = min(MAX_MERGED, max(own, tokens) + since)

    def until(self, before: int) -> dict[str, int]:
        """The sums without what the newest rounds from ``before`` on have in them."""
        totals = dict(self.totals)
        for round_, tokens in self._counted:
            if round_ >= before:
                for peer, count in tokens.items():
                    totals[peer] -= count
        return totals

    def by_round(self) -> dict[float, dict[str, int]]:
        """What of the newest rounds is in the sums."""
        return dict(self._counted)
