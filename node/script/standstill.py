"""How long a script waits for a node that is to save and to leave: while anything of it moves."""

from __future__ import annotations

from pathlib import Path

from node.checkpoints.copying import SLOWEST
from node.checkpoints.under_way import UnderWay, under_way

# of a node, or of its checkpoint, which stands still while it waits for a round, or for space on a
# full disk
STILL_S = 120.0


class Standstill:
    """For how long nothing has come of a node: no word, and no more of a checkpoint.

    Counted in seconds that were waited for it: clocks jump where a machine was suspended.
    """

    def __init__(self, checkpoints: Path | None) -> None:
        """``checkpoints``: where it saves."""
        self.saving: UnderWay | None = None  # as of the newest look
        self._checkpoints, self._seconds = checkpoints, 0.0

    def over(self) -> None:
        """It has said something."""
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """It has said nothing for so long: look at what it writes."""
        found = under_way(self._checkpoints) if self._checkpoints else None
        self._seconds = self._seconds + seconds if found == self.saving else 0.0
        self.saving = found

    @property
    def too_long(self) -> bool:
        """Whether it hangs: the more there is to write, the longer a disk may take."""
        return self._seconds > STILL_S + (self.saving.size / SLOWEST if self.saving else 0.0)
