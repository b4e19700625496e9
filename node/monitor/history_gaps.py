"""Rounds that a node was not there for, among those of :mod:`node.monitor.history`.

Rows of several rounds leave numbers out as well. So what is missing is noted as the row after it
comes, which is of one round then, and kept in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from node.monitor.history_columns import COLUMNS, ROUND, Array

KEPT = 64  # gaps, the newest

Gap = tuple[int, int]  # the rounds between these two


class Gaps:
    """Where rounds are missing, by ascending rounds, until somebody has told of them."""

    def __init__(self, known: Iterable[Sequence[int]] = ()) -> None:
        self.open: list[Gap] = [(int(low), int(high)) for low, high in known][-KEPT:]

    def note(self, newest: int, round_: int) -> None:
        """``round_`` comes after the ``newest`` one that is known, -1: after none."""
        while self.open and self.open[-1][1] > newest:
            self.open.pop()  # the node went back in the chain
        if newest + 1 < round_:
            self.open = [*self.open, (newest, round_)][-KEPT:]

    def until(self, before: int) -> list[Gap]:
        """Those up to the one that ends at this round; none where none ends there any more."""
        found = [gap for gap in self.open if gap[1] <= before]
        return found if found and found[-1][1] == before else []

    def close(self, before: int) -> None:
        """Others have told what they have of all up to this round."""
        self.open = [gap for gap in self.open if gap[1] > before]


def in_gaps(gaps: Sequence[Gap], round_: float) -> bool:
    """Whether a round is missing."""
    return any(low < round_ < high for low, high in gaps)


def rows_in(gaps: Sequence[Gap], told: Iterable[Mapping[str, float | None]]) -> Array:
    """Those of the rows told, by names of columns, that are in gaps and by ascending rounds."""
    taken, newest = list[Array](), -1.0
    for values in told:
        row = np.array([np.nan if (v := values.get(n)) is None else v for n in COLUMNS])
        if row[ROUND] > newest and in_gaps(gaps, row[ROUND]):
            taken.append(row)
            newest = row[ROUND]
    return np.stack(taken) if taken else np.empty((0, len(COLUMNS)))


def stand_for(gaps: Sequence[Gap], rounds: Iterable[float]) -> list[tuple[float, float]]:
    """Of each row in gaps: its round, and how many it stands for: those since the last."""
    found, newest = list[tuple[float, float]](), -1.0
    for round_ in rounds:
        low = max(low for low, _ in gaps if low < round_)
        found.append((round_, round_ - max(low, newest)))
        newest = round_
    return found
