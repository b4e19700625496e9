"""Who is on the way here from an earlier round: reads a copy of its state, or replays from there.

A newcomer with a narrow link reads a copy for hours, and then replays the rounds that were
committed meanwhile, for up to as long again. If they were forgotten by then it would have to
download another copy, and so on without end. Where a state has several fragments they are read one
after the other, so whoever reads a copy of one is on the way in all that it has read. Whoever
replays is on the way in that fragment alone: a member that now and then misses a round of one has
all it needs of the others.
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
    # for whom, and by fragment until when and from which round on; who has read last is last
    _known: dict[PeerId, dict[int, tuple[float, int]]] = field(default_factory=dict)

    def copied(self, peer: PeerId, fragment: int, round_: int) -> None:
        """A peer reads a copy of the state at ``round_``."""
        until, begun = self.now() + AWAY_S, self._left(self._known.pop(peer, {}))
        known = {one: (until, begins) for one, (_, begins) in begun.items()}
        self._known[peer] = known | {fragment: (until, round_)}
        if len(self._known) > MAX_PEERS:
            del self._known[next(iter(self._known))]

    def replays(self, peer: PeerId, fragment: int, round_: int) -> None:
        """A peer has come to ``round_``, and reads what was merged in it.

        Who has read no copy here is no reader: members that missed a round or two are far more
        frequent than newcomers, and come through with the few rounds that are kept anyway.
        """
        begun = self._left(self._known.get(peer, {}))
        if fragment in begun:
            del self._known[peer]
            self._known[peer] = begun | {fragment: (self.now() + AWAY_S, round_)}

    def needed(self, fragment: int) -> int | None:
        """The earliest round of a fragment that a reader needs; None: there is no reader.

        That is the one before its own, too: its certificate shows where the reader stands.
        """
        left = {peer: self._left(begun) for peer, begun in self._known.items()}
        self._known = {peer: begun for peer, begun in left.items() if begun}
        begins = [begun[fragment][1] for begun in self._known.values() if fragment in begun]
        return min(begins) - 1 if begins else None

    def _left(self, begun: dict[int, tuple[float, int]]) -> dict[int, tuple[float, int]]:
        """Without fragments of which nothing was read for too long."""
        now = self.now()
        return {fragment: place for fragment, place in begun.items() if place[0] > now}
