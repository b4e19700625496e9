"""For how many rounds nothing of each member was merged, as far as one node has seen. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocols.counts import runs_of
from protocols.identity import PeerId
from protocols.messages import Outcome


@dataclass
class Missed:
    """Fed with every outcome; who has just come into office has missed nothing."""

    _last: dict[PeerId, int] = field(default_factory=dict)  # the last round with their work

    def note(self, outcome: Outcome) -> None:
        """A round is committed."""
        self._last = {peer: self._last.get(peer, outcome.round) for peer in outcome.next_roster}
        for run in {run for part in outcome.parts for run in runs_of(part.counts)}:  # few differ
            for contributor in outcome.contributors[run.first : run.stop]:
                if contributor.peer in self._last:
                    self._last[contributor.peer] = outcome.round

    def rounds(self, round_: int) -> Mapping[PeerId, int]:
        """Rounds missed by those in office before ``round_``."""
        return {peer: round_ - 1 - last for peer, last in self._last.items()}
