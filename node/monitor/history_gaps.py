"""Rounds that a node was not there for, among those of :mod:`node.monitor.history`.

Rows of several rounds leave numbers out as well: what is missing is noted as it is passed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from node.monitor.history_columns import ROUND, Array

KEPT = 16  # gaps of which it is known that they are some


class Gaps:
    """Where rounds are missing: each between two that are known."""

    def __init__(self) -> None:
        self._found: deque[tuple[float, float]] = deque(maxlen=KEPT)

    @property
    def newest(self) -> int | None:
        """The round before which some are missing; None: nowhere, as far as is known."""
        return int(self._found[-1][1]) if self._found else None

    def note(self, known: Array, round_: int) -> None:
        """A round has come after those ``known``; it may be one that was there before."""
        while self._found and self._found[-1][1] >= round_:
            self._found.pop()
        below = int(np.searchsorted(known, round_))
        if below and known[below - 1] + 1 < round_:
            self._found.append((float(known[below - 1]), float(round_)))

    def missing(self, known: Array, rows: Sequence[Array], before: int | None) -> list[Array]:
        """Those of ``rows``, by ascending rounds, that are in gaps, or before all of ``known``.

        ``before``: where the next round is to come; None: that is not known.
        """
        first = known[0] if len(known) else np.inf
        spans = [(-1.0, first), *self._found]
        if before is not None and len(known):
            spans.append((known[-1], float(before)))
        taken, newest = list[Array](), -1.0
        for row in rows:
            if row[ROUND] > newest and any(low < row[ROUND] < high for low, high in spans):
                taken.append(row)
                newest = row[ROUND]
        return taken

    def filled(self, rounds: npt.NDArray[np.float64]) -> None:
        """These are here now, in ascending order: what is after them may still be missing."""
        left = list(self._found)
        self._found.clear()
        for low, high in left:
            inside = rounds[(low < rounds) & (rounds < high)]
            low = float(inside[-1]) if len(inside) else low
            if low + 1 < high:
                self._found.append((low, high))
