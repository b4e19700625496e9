"""Which islands have a loss curve of their own in :mod:`node.monitor.history`: a column each."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from node.monitor.views import can_be_drawn

MAX_ISLANDS = 64  # with a loss curve of their own
GONE_ROWS = 16  # without a loss, after which an island's curve gives way to a newcomer's


class Curves:
    """The columns of losses, at most :data:`MAX_ISLANDS`. ``me``: it has one in any case."""

    def __init__(self, me: str) -> None:
        self.islands: list[str] = []  # in the order of their columns
        self._me = me
        self._columns: dict[str, int] = {}
        self._told: list[int] = []  # by column: the turn of its newest loss
        self._turn = 0  # rows so far

    def put(
        self, losses: Mapping[str, float | None], table: npt.NDArray[np.float32], row: int
    ) -> dict[str, float]:
        """Put a round's losses into a row of the table; those that have a column."""
        self._turn += 1
        table[row] = np.nan
        kept: dict[str, float] = {}
        full = False
        for peer, loss in sorted(losses.items(), key=lambda item: item[0] != self._me):
            column = self._columns.get(peer)
            if loss is None or (full and column is None) or not can_be_drawn(loss):
                continue
            column = self._new_column(peer, table) if column is None else column
            if column is None:
                full = True  # for all others, too
                continue
            table[row, column] = kept[peer] = loss
            self._told[column] = self._turn
        return kept

    def _new_column(self, peer: str, table: npt.NDArray[np.float32]) -> int | None:
        """One for its curve, if need be that of whoever has told no loss for longest."""
        if len(self.islands) < MAX_ISLANDS:
            self.islands.append(peer)
            self._told.append(self._turn)
            self._columns[peer] = len(self.islands) - 1
            return self._columns[peer]
        others = [place for place, one in enumerate(self.islands) if one != self._me]
        column = min(others, key=self._told.__getitem__)
        if self._turn - self._told[column] <= GONE_ROWS and peer != self._me:
            return None
        del self._columns[self.islands[column]]
        self.islands[column], self._columns[peer] = peer, column
        table[:, column] = np.nan
        return column
