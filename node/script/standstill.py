"""How long a script waits for its node.

For one that is to save and to leave while anything of it moves, for any other as long as its
process shows that it lives: what that waits for (peers, a round, a download) may take for ever.
"""

from __future__ import annotations

import logging
from pathlib import Path

from node.checkpoints.copying import SLOWEST
from node.checkpoints.under_way import UnderWay, under_way
from node.island.silence import SILENT_S

logger = logging.getLogger(__name__)

# of a node, or of its checkpoint, which stands still while it waits for a round, or for space on a
# full disk
STILL_S = 120.0
GAP_S = 60.0  # between two looks at most counts: longer, and this process may have been stopped too


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


class Pulse:
    """For how long a node has not shown that it lives (:meth:`SharedVectors.beat`)."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._beats, self._looked = -1, 0.0

    def lost(self, beats: int, now: float) -> bool:
        """Whether it hangs for good; ``beats``: so far. Says so long before."""
        before, passed = self.seconds, min(now - self._looked, GAP_S)
        self.seconds = before + passed if beats == self._beats else 0.0
        self._beats, self._looked = beats, now
        if before <= STILL_S < self.seconds:
            logger.warning(
                "the node of this script has shown no sign of life for %.0f s: it hangs, or was "
                "stopped; until it goes on no round is merged, and after %.0f s it is ended (E405)",
                self.seconds,
                SILENT_S,
            )
        elif before > STILL_S and not self.seconds:
            logger.warning("the node of this script goes on, after %.0f s", before)
        return self.seconds > SILENT_S
