"""How often a trainer whose ranks die is started again, and with what changed."""

from __future__ import annotations

from collections.abc import Sequence

from node.island.rank_ends import TrainerDied
from node.replicas.replica import OuterReplica
from node.trainer.channel import Applied
from node.trainer.settings import TrainerSettings

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

    def died(
        self, died: TrainerDied, settings: TrainerSettings, *, begun: bool
    ) -> dict[str, int] | None:
        """The ranks have died; returns which settings the next ones have changed.

        None: there are no next ones, as that was once too often, or cannot be survived. ``begun``:
        they had begun to train.
        """
        changes = {"micro_batch": settings.halved} if died.code == "E401" else {}
        # a restart with a smaller micro-batch is not counted, as halving comes to an end by itself;
        # but where no step was tried it was the model that did not fit (--compile tries one first)
        stepped = begun or settings.compile
        less = bool(changes) and stepped and settings.halved < settings.at_once
        # nor is the loss of a host that others go on without: node.hosts.hub counts those; nor what
        # befell the whole node, or its host 0
        self._count += not (less or died.spared)
        survived = self._count <= MAX_RESTARTS and died.code in SURVIVED
        return changes if survived else None

    def applied(self, applied: Applied) -> bool:
        """The trainer has read what it was given; returns whether that is progress.

        Neither what it begins with nor the same round once more, as after steps that were not
        finite, counts as progress: ranks that die in each first step would be started for ever.
        """
        if applied.fragment is None:
            self._began_at = self._rounds
            return False
        progress = applied.round > self._began_at[applied.fragment]
        if progress:
            self._count = 0
        return progress
