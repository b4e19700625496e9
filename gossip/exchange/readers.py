"""Who is on the way here from an earlier round: reads a copy of its state, or replays from there.

A newcomer with a narrow link reads a copy for hours, and then replays the rounds that were
committed meanwhile, for up to as long again. If they were forgotten by then it would have to
download another copy, and so on without end. Where a state has several fragments they are read one
after the other, so whoever reads one is on the way in all that it has read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from protocols.bounds import MAX_PEERS
from protocols.identity import PeerId

# Since anything was last read. Trainers take minutes to start; and a part of a round is asked for
# once and then read to its end: 3.5 GB (7 billion parameters in int4) take ten minutes at 50 Mbit.
AWAY_S = 3600.0


@dataclass
class Readers:
    """What all fragments of a node have readers for."""

    now: Callable[[], float]
    # for whom, and from which round of each fragment on; who has read something last is last
    _known: dict[PeerId, tuple[float, dict[int, int]]] = field(default_factory=dict)

    def copied(self, peer: PeerId, fragment: int, round_: int) -> None:
        """A peer reads a copy of the state at ``round_``."""
        _, begins = self._known.pop(peer, (0.0, {}))
        self._known[peer] = (self.now(), begins | {fragment: round_})
        if len(self._known) > MAX_PEERS:
            del self._known[next(iter(self._known))]

    def replays(self, peer: PeerId, fragment: int, round_: int) -> None:
        """A peer has come to ``round_``, and reads what was merged in it.

        Who has read no copy here is no reader: members that missed a round or two are far more
        frequent than newcomers, and come through with the few rounds that are kept anyway.
        """
        if peer in self._known:
            self.copied(peer, fragment, round_)

    def needed(self, fragment: int) -> int | None:
        """The earliest round of a fragment that a reader needs; None: there is no reader.

        That is the one before its own, too: its certificate shows where the reader stands.
        """
        late = self.now() - AWAY_S
        while self._known:
            peer, (at, _) = next(iter(self._known.items()))
            if at > late:
                break
            del self._known[peer]
        begins = [rounds[fragment] for _, rounds in self._known.values() if fragment in rounds]
        return min(begins) - 1 if begins else None
