"""How many tokens of each island were merged, for :mod:`node.monitor.history`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence, Set

MAX_TOTALS = 1024  # islands whose merged tokens are added up, each apart
OTHERS = ""  # whose name those have of whom nothing was merged for the longest time
MAX_UNDONE = 256  # newest rounds whose tokens are taken back where they are gone through again
MAX_MERGED = 10**15  # tokens of one island: whoever says more has made it up


class MergedTokens:
    """Sums by island, as far as this node knows, and what the newest rounds have in them."""

    def __init__(self, totals: Mapping[str, int] | None = None) -> None:
        self.totals: dict[str, int] = dict(totals or {})  # who was merged last comes last
        self._counted: deque[tuple[float, dict[str, int]]] = deque()  # by ascending rounds
        self._summed = -math.inf  # of this round, and of older ones, the sums alone are known

    def add(self, round_: float, tokens: Mapping[str, int]) -> dict[str, int]:
        """A round comes after all before it, maybe once more; returns what of it counts."""
        if self._counted and self._counted[-1][0] >= round_:
            while self._counted and self._counted[-1][0] >= round_:
                for peer, count in self._counted.pop()[1].items():
                    self.totals[peer] -= count
            self._order()
        merged = {peer: tokens[peer] for peer in sorted(tokens) if tokens[peer]}
        self._make_room(merged.keys())
        counted = dict[str, int]()
        for peer, count in merged.items():
            name = self._name(peer)
            counted[name] = counted.get(name, 0) + count
            self.totals[name] = self.totals.pop(name, 0) + count
        if tokens:
            self._counted.append((round_, counted))
            self._forget()
        else:  # one that was read back may be in the sums
            self._summed = max(self._summed, round_)
        return counted

    def _make_room(self, names: Set[str]) -> None:
        """Let there be room for the sums of these: who was merged before all others has no own one.

        In the rounds that may be taken back, too: else sums would stand still where these have more
        islands than there may be, as after many starts or by what a stranger has made up.
        """
        spared = names | {OTHERS}
        missing = len(self.totals.keys() | spared) - MAX_TOTALS
        if missing <= 0:
            return
        gone = [peer for peer in self.totals if peer not in spared][:missing]
        self.totals[OTHERS] = self.totals.pop(OTHERS, 0) + sum(map(self.totals.pop, gone))
        for _, tokens in self._counted:
            if found := [peer for peer in gone if peer in tokens]:
                tokens[OTHERS] = tokens.get(OTHERS, 0) + sum(map(tokens.pop, found))

    def _order(self) -> None:
        """As a restarted node has it that reads these rounds back: so it makes room as this one."""
        for _, tokens in self._counted:
            for peer in sorted(tokens):
                self.totals[peer] = self.totals.pop(peer)

    def _name(self, peer: str) -> str:
        """Whose tokens these are in the sums: its own while there is room for a name."""
        room = len(self.totals) + (OTHERS not in self.totals) < MAX_TOTALS
        return peer if room or peer in self.totals else OTHERS

    def _forget(self) -> None:
        while len(self._counted) > MAX_UNDONE:
            self._summed = max(self._summed, self._counted.popleft()[0])

    def until(self, before: float) -> dict[str, int] | None:
        """The sums of the rounds before this one; None where they are no longer known."""
        if before <= self._summed:
            return None
        totals = dict(self.totals)
        for round_, tokens in self._counted:
            if round_ >= before:
                for peer, count in tokens.items():
                    totals[peer] -= count
        return totals

    def learn(
        self, told: Mapping[str, int], before: float, rows: Sequence[tuple[float, float]]
    ) -> None:
        """Others have told of the sums of all rounds before ``before``.

        What is more than is known counts to ``rows``, each with how many rounds it stands for: so
        it is taken back where these are gone through again.
        """
        if (known := self.until(before)) is None:
            return  # what was counted since would count twice
        if known.get(OTHERS):  # these may have whoever has no sum of its own
            told = {peer: tokens for peer, tokens in told.items() if peer in known}
        more = dict[str, int]()
        for peer, tokens in told.items():
            name = self._name(peer)
            room = MAX_MERGED - self.totals.get(name, 0)
            if (count := min(tokens - known.get(peer, 0), room)) > 0:
                more[name] = more.get(name, 0) + count
                self.totals[name] = self.totals.get(name, 0) + count
        rounds, upto, given = sum(stands for _, stands in rows), 0.0, dict.fromkeys(more, 0)
        for left, (round_, stands) in zip(range(len(rows) - 1, -1, -1), rows, strict=True):
            upto += stands
            if left > MAX_UNDONE:
                continue
            share = {p: int(count * upto / rounds) for p, count in more.items()} if left else more
            here = {p: new for p, count in share.items() if (new := count - given[p])}
            self._counted.append((round_, here))
            given = share
        self._counted = deque(sorted(self._counted, key=lambda one: one[0]))
        self._order()
        self._forget()  # what the oldest of them has for all that are older, too

    def by_round(self) -> dict[float, dict[str, int]]:
        """What of the newest rounds is in the sums."""
        return dict(self._counted)
