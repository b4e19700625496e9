"""What a restarted member must not do, since it has forgotten what it promised and voted.

In which rounds it promised anything is on disk (:mod:`gossip.chain.promises`). With that record it
takes no part in deciding these, and is free in all others. If the record is lost, the member first
listens for :data:`LISTEN_S` how far the swarm has come and decides nothing meanwhile; then it takes
no part in deciding rounds up to the furthest it heard of. It can only have voted where most of
those in office had come to the round before, so a few who claim to be further than the others are
not believed.
"""

from __future__ import annotations

from gossip.chain.promises import Promised
from protocols.identity import PeerId

LISTEN_S = 5.0  # a restarted member listens for this long to hear how far the swarm is


class Forgetting:
    """What one member may have forgotten in one chain; nothing for a ``new_identity``."""

    def __init__(
        self,
        now: float,
        round_: int,
        *,
        joining: bool,
        new_identity: bool,
        among_others: bool,
        promised: Promised | None = None,
    ) -> None:
        """``promised``: what is on record; None: not known."""
        self._started, self._promised = now, promised
        self._lost = promised is None  # what there was before this life, if there was any
        known = new_identity or promised is not None
        self.abstain_until = now + LISTEN_S if joining and not known else 0.0
        self._last = round_ if round_ > 0 and among_others else -1
        self._claims: dict[PeerId, int] = {}  # where members say that they stand
        self._liars = 0  # this many of them may lie

    def abstains(self, now: float) -> bool:
        """Whether this node listens, and is not to be taken into office meanwhile."""
        return now < self.abstain_until

    def listening(self, now: float) -> bool:
        """Whether it has restarted just now, and does not know yet how far the swarm is."""
        return self._lost and self._last >= 0 and now < self._started + LISTEN_S

    def heard(self, round_: int) -> None:
        """We may have voted in rounds up to this one."""
        self._last = max(self._last, round_)

    def again(self, promised: Promised | None) -> None:
        """What was promised in this life is forgotten as well, but for what is on record."""
        self._promised = promised or self._promised

    def claimed(self, peer: PeerId, round_: int, office: int) -> None:
        """A member, one of ``office`` in number, says that it stands at this round."""
        self._claims[peer] = round_
        self._liars = (office - 1) // 3

    def forgot(self, round_: int, previous: bytes) -> bool:
        """Whether we may have voted in the round that builds on this certificate."""
        if self._promised is not None and self._promised.binds(round_, previous):
            return True
        return self._lost and round_ <= max(self._last, self._furthest())

    def remembers(self, round_: int, previous: bytes) -> bool:
        """Whether it is on record that we have promised nothing in this round before we started."""
        return not self._lost and not self.forgot(round_, previous)

    def _furthest(self) -> int:
        """The furthest round in which we may have voted, by what members claim."""
        claims = sorted(self._claims.values(), reverse=True)
        if len(claims) <= self._liars:
            return max(claims, default=-1)
        return min(claims[0], claims[self._liars] + 1)
