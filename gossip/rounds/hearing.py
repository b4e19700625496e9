"""Who in office announces itself, and never answers who stands for leader. Sans-IO.

Names cost nothing, and one that only says that it is there is alive. A round that counts on its
promise would stand still for good. So a candidate takes those for mute that it has long asked in
vain, until they say something or there is a plan. The others go on without them as they would
without the dead (:mod:`gossip.rounds.reforming`).

Who refuses is not mute: it is there, and may know better.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from protocols.identity import PeerId

IN_VAIN = 16.0  # patiences: a candidate has asked again by then, and others have stood


@dataclass
class Hearing:
    """What has become of one candidate's questions in a round."""

    mute: set[PeerId] = field(default_factory=set)
    _asked: dict[PeerId, float] = field(default_factory=dict)  # in vain so far, since when

    def ask(self, peers: Iterable[PeerId], now: float) -> None:
        """I ask these for their promise."""
        for peer in peers:
            self._asked.setdefault(peer, now)

    def heard(self, peer: PeerId) -> None:
        """A peer has promised something, has refused to, or stands itself."""
        self._asked.pop(peer, None)
        self.mute.discard(peer)

    def over(self) -> None:
        """There is a plan: enough have promised."""
        self._asked.clear()
        self.mute.clear()

    def silent(self, since: float) -> set[PeerId]:
        """Those who have been asked by then, and have not answered."""
        return {peer for peer, asked in self._asked.items() if asked <= since}
