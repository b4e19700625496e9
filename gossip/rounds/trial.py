"""Who is in office and has shown nothing yet, and how many such there may be. Sans-IO.

Identities cost nothing, and whoever follows the rounds comes into office. Some that only announce
themselves, and never vote, would stop a run for good once they are half of those who decide: they
are alive, so nobody goes on without them. So where strangers come, those in office of whom the
rounds have anything, a contribution or a merged part, are a majority by themselves once they are
two.

All of it follows from certificates, so members who have seen the same ones find the same. Those who
were started again have seen fewer, and let in more; what they have voted for comes to pass where
nothing else can be decided (:mod:`gossip.rounds.succession`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field

from gossip.plans.certificate import merged_peers
from protocols.bounds import MAX_ROSTER
from protocols.identity import PeerId
from protocols.messages import Certificate

PATIENT = 4  # rounds in which somebody in office has shown nothing, before others get its place
MAX_FAILED = 1024


@dataclass
class Trial:
    """Fed with every certificate; whom it has not seen come into office counts as tried."""

    _since: dict[PeerId, int] = field(default_factory=dict)  # the round that took the untried in
    _failed: dict[PeerId, None] = field(default_factory=dict)  # lost office untried, oldest first

    def note(self, certificate: Certificate) -> None:
        """A round is committed."""
        outcome = certificate.outcome
        shown = merged_peers(outcome) | {part.owner for part in outcome.parts}
        come = set(outcome.next_roster).difference(certificate.roster)
        untried = self._since | {peer: outcome.round for peer in come if peer not in self._since}
        self._since = {
            peer: since
            for peer, since in untried.items()
            if peer in outcome.next_roster and peer not in shown
        }
        for peer in sorted(untried.keys() - self._since.keys() - shown):
            self._failed.pop(peer, None)
            self._failed[peer] = None
        while len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    def room(self, stay: Collection[PeerId]) -> int:
        """How many may come into office beside those who ``stay``.

        Any number beside a lone one that is tried: with a single other it is no majority either.
        """
        untried = sum(peer in self._since for peer in stay)
        tried = len(stay) - untried
        return max(0, tried - 1 - untried) if tried > 1 else MAX_ROSTER

    def is_untried(self, peer: PeerId) -> bool:
        """Whether somebody was seen to come into office, and has shown nothing since."""
        return peer in self._since

    def overdue(self, peer: PeerId, round_: int) -> bool:
        """Whether somebody has been in office for long by ``round_``, and has shown nothing."""
        return round_ - self._since.get(peer, round_) > PATIENT

    def seated(self, stay: Set[PeerId], come: Iterable[PeerId], round_: int) -> set[PeerId]:
        """Who decides the round after ``round_``: those who stay, and the first newcomers that fit.

        Members that are overdue make room for others; those who lost office like this come last.
        """
        queue = sorted(come, key=lambda peer: peer in self._failed)
        if len(queue) > self.room(stay):
            stay = {peer for peer in stay if not self.overdue(peer, round_)}
        return set(stay) | set(queue[: self.room(stay)])
