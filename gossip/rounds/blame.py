"""Who is to blame for the failed transfers of a round. Sans-IO.

A failed transfer shows that one of two members is at fault, not which of them. All failures
together do show it: an owner that delivers nothing fails everybody, and a member that cannot reach
anybody finds all others at fault, at once or one after the other. So the blame goes to the fewest
members that explain every failure of the round. If that leaves it open, as with a single failure,
it goes to the one that was named, since nobody reports itself. But if one of the two has failed
others as well (it waited in vain for slices of several, or was waited for in vain), it is the
likelier culprit (:meth:`Failures.hint`). So a leader whose own link has become slow hands over,
instead of leading one plan after the other that leaves out somebody else.

Failures stay known when the plan changes, else a member could have others taken out of one plan
after the other. But only what happens under the current plan speaks against that plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field

from protocols.identity import PeerId

Failure = tuple[PeerId, PeerId]  # who says so, and of whom


@dataclass
class Failures:
    """The failures of one round that one member knows of: its own, and what it was told."""

    me: PeerId
    _since: dict[Failure, float] = field(default_factory=dict)  # the newest time it was found
    _fresh: set[Failure] = field(default_factory=set)  # under the plan there is now
    _hints: set[PeerId] = field(default_factory=set)  # whose slices I have given up on

    def __bool__(self) -> bool:
        return bool(self._fresh)

    def note(self, teller: PeerId, peer: PeerId, now: float) -> None:
        """``peer`` has not delivered to ``teller``, or taken nothing of it."""
        if (teller, peer) not in self._fresh:
            self._fresh.add((teller, peer))
            self._since[teller, peer] = now

    def hint(self, peer: PeerId) -> None:
        """What ``peer`` brings me is late, or of no use: no reason for a new plan by itself."""
        self._hints.add(peer)

    def replanned(self) -> None:
        """There is a new plan: nobody has failed under it yet."""
        self._fresh.clear()

    def clear(self) -> None:
        """It was nobody's fault."""
        self._fresh.clear()
        self._since.clear()
        self._hints.clear()

    def mine(self) -> dict[PeerId, float]:
        """Who has failed me in this round, and since when."""
        return {named: since for (by, named), since in self._since.items() if by == self.me}

    def fresh(self) -> dict[PeerId, float]:
        """Who has failed me under the current plan, and since when."""
        return {
            peer: self._since[teller, peer] for teller, peer in self._fresh if teller == self.me
        }

    def explained(self, silent: Set[PeerId] = frozenset()) -> dict[PeerId, list[Failure]]:
        """The fewest members that explain all failures, found greedily, each with its failures.

        Of members that explain equally many, it is the one with more hints against it, then the
        one named more often, and me last: I know of my own failures before I hear of others'. That
        ``silent`` members fail others needs no explanation.
        """
        hints = dict.fromkeys(self._hints, 1) | {self.me: len(self._hints - silent)}
        left = {failure for failure in self._since if failure[1] not in silent}
        found = dict[PeerId, list[Failure]]()
        while left:
            parties = Counter(peer for failure in left for peer in failure)
            named = Counter(peer for _, peer in left)
            ranks = {p: (parties[p], hints.get(p, 0), named[p], p != self.me, p) for p in parties}
            worst = max(parties, key=ranks.__getitem__)
            found[worst] = [failure for failure in left if worst in failure]
            left.difference_update(found[worst])
        return found

    def certain_at(self, peer: PeerId, failures: list[Failure], wait: float) -> float | None:
        """When to believe that ``peer`` is to blame for these; None: not under this plan.

        Others may confirm or contradict it, hence the ``wait``: from when ``peer`` was first named
        or, if nobody names it, from when it named a second member itself, or the only one.
        """
        if self._fresh.isdisjoint(failures):
            return None
        named = [self._since[failure] for failure in failures if failure[1] == peer]
        if named:
            return min(named) + wait
        return sorted(map(self._since.__getitem__, failures))[:2][-1] + wait
