"""Of whom nothing was merged lately, and who was left out, as far as one node has seen. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocols.counts import runs_of
from protocols.identity import PeerId
from protocols.messages import Outcome

LONGEST = 64  # rounds in which somebody owns no part, however often it was left out


@dataclass
class Missed:
    """Fed with every outcome; who has just come into office has missed nothing."""

    _last: dict[PeerId, int] = field(default_factory=dict)  # the last round with their work
    _left_out: dict[PeerId, tuple[int, int]] = field(default_factory=dict)  # how often, and when

    def note(self, outcome: Outcome) -> None:
        """A round is committed."""
        self._last = {peer: self._last.get(peer, outcome.round) for peer in outcome.next_roster}
        for run in {run for part in outcome.parts for run in runs_of(part.counts)}:  # few differ
            for contributor in outcome.contributors[run.first : run.stop]:
                if contributor.peer in self._last:
                    self._last[contributor.peer] = outcome.round
        self._note_left_out(outcome)

    def rounds(self, round_: int) -> Mapping[PeerId, int]:
        """Rounds missed by those in office before ``round_``."""
        return {peer: round_ - 1 - last for peer, last in self._last.items()}

    def unreliable(self, round_: int) -> frozenset[PeerId]:
        """Who is to own no part of a round: what it owns would be waited for in vain.

        Who was left out of a round owns none in the next two, of one more then in the next four,
        and so on. It comes back before that when it delivers as a contributor.
        """
        return frozenset(
            peer
            for peer, (often, last) in self._left_out.items()
            if round_ <= last + min(2**often, LONGEST)
        )

    def _note_left_out(self, outcome: Outcome) -> None:
        for contributor in outcome.contributors:
            peer = contributor.peer
            if not contributor.active:
                often = self._left_out.get(peer, (0, 0))[0] + 1
                self._left_out[peer] = (min(often, LONGEST), outcome.round)
            elif self._last.get(peer) == outcome.round:
                self._left_out.pop(peer, None)
        self._left_out = {p: since for p, since in self._left_out.items() if p in self._last}
