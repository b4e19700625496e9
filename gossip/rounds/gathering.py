"""A run's creator that waits, before the first round, until so many islands are there. Sans-IO.

At that place nobody else is in office. So whoever has come waits to be let in, as newcomers do, and
the creator alone says when: once they are enough it calls the roll, a round that merges nothing,
and with it all of them begin at the same state. Nobody else can hold a round up like this, nor can
the creator after that round.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossip.place import Place
from gossip.rounds.attendance import Attendance
from protocols.messages import UNKNOWN_ETA_S, Announce


@dataclass
class Gathering:
    """Whom one node waits for; it lives as long as the node, for the chains of all fragments."""

    least: int = 0  # islands, itself counted if it is one; 0: it does not wait
    able: bool = False  # this node's own trainer is there
    ended: bool = False  # whoever is there is let in

    def on(self, place: Place) -> bool:
        """Whether it waits at this place of the chain."""
        return self.least > 0 and place.round == 0

    def there(self, attendance: Attendance, now: float) -> int:
        """How many islands can begin: their trainers are there, and they have the state."""
        told = map(attendance.announcement, attendance.waiting(now))
        return self.able + sum(one is not None and _can_begin(one) for one in told)

    def complete(self, attendance: Attendance, now: float) -> bool:
        """Whether somebody waits to be let in, and all are there."""
        all_there = self.ended or self.there(attendance, now) >= self.least
        return all_there and bool(attendance.waiting(now))

    def end(self) -> None:
        """Wait for nobody else: this node will leave, and only it could let in who is there."""
        self.ended = True


def _can_begin(announce: Announce) -> bool:
    """Whether it is an island with a trainer: it says how long a round's inner steps take it."""
    return announce.role == "island" and announce.eta < UNKNOWN_ETA_S
