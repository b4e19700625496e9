"""How often a trainer whose ranks die is started again."""

from __future__ import annotations

from collections.abc import Sequence

from node.island.rank_ends import TrainerDied
from node.replicas.replica import OuterReplica
from node.trainer.channel import Applied

MAX_RESTARTS = 3  # of the trainer, without a round in between
SURVIVED = ("", "E401", "E405", "E406", "E408")  # the trainer is started again


class Restarts:
    """Counts them for one trainer."""

    def __init__(self, replicas: Sequence[OuterReplica]) -> None:
        """``replicas``: by fragment."""
        self._replicas, self._count = replicas, 0
        self._began_at = self._rounds

    @property
    def _rounds(self) -> list[int]:
        return [replica.place.round for replica in self._replicas]

    def died(self, died: TrainerDied, *, counted: bool) -> bool:
        """The ranks have died; returns whether that was once too often, or cannot be survived."""
        self._count += counted
        return self._count > MAX_RESTARTS or died.code not in SURVIVED

    def applied(self, applied: Applied) -> None:
        """The trainer has read what it was given.

        Neither what it begins with nor the same round once more, as after steps that were not
        finite, counts as progress: ranks that die in each first step would be started for ever.
        """
        if applied.fragment is None:
            self._began_at = self._rounds
        elif applied.round > self._began_at[applied.fragment]:
            self._count = 0
