"""What a member announces about itself in the rounds of one fragment, and what changes it.

For example that it is joining, active or leaving, or that it gives up its vote for a while because
its trainer stands still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gossip.catchup.following import Following
from gossip.chain.forgetting import Forgetting
from gossip.chain.promises import Promises
from gossip.chain.timing import Timing
from gossip.common import FragmentPresence
from gossip.hooks import Replica
from gossip.membership.members import MEMBERS
from gossip.place import Place
from gossip.plans.rules import Rules
from gossip.rounds.round import Round
from protocols.messages import Announce

STUCK_S = 10.0  # or a round: an outer step may take this long, as it has to wait for the trainer


class OwnStatus(FragmentPresence):
    """The part of a :class:`gossip.chain.chain.Chain` that the others know it by."""

    replica: Replica
    rules: Rules
    late_s: Callable[[], float]
    round: Round
    following: Following
    promises: Promises
    timing: Timing
    _forgetting: Forgetting
    _stepping_since: float | None = None  # the outer step of a round is under way
    _stands_still = False  # the trainer, by this node's own word

    def announced_place(self) -> Place:
        """Our place; without its state, which would bring us into office, while we abstain."""
        place = self.replica.place
        if self._forgetting.abstains(self.now()) and self.me not in self.replica.roster:
            return replace(place, state=b"")
        return place

    def _ask_to_wait(self) -> None:
        """Ask the others to wait, where this node cannot catch up by itself."""
        takes_part = self.status.role in MEMBERS and not self._forgetting.abstains(self.now())
        before, asks = self.status.behind_s, self.following.asks() if takes_part else 0.0
        if asks != before:
            self.note(behind_s=asks)
        if (asks > 0) != (before > 0):
            self.presence.tell()

    def _say_epoch(self) -> None:
        """Announce at once to all, not only to the candidate, in which epoch this node decides."""
        epoch, place = self.round.agreement.promised[0], self.round.place
        if epoch != self.status.epoch and not self.promises.unwritten(place.at):
            self.note(epoch=epoch)
            self.presence.tell()

    def _take_office(self) -> None:
        """At a place that this node has just come to, its vote counts from now on."""
        in_office = self.me in self.replica.roster and not self.round.forgot
        if self.status.status == "joining" and in_office:
            self.note(status="active")

    def _leave_office(self, *, forgot: bool) -> None:
        """Out of the roster, or of a round in which it may have voted: nobody shall wait for it."""
        put_out = self.me not in self.replica.roster and self.status.role in MEMBERS
        if (forgot or put_out) and self.status.status == "active":
            self.note(status="joining")

    def _stuck(self) -> bool:
        """Whether the trainer stands still and takes in no round.

        That shows once the next one is to be applied. Where a part of the islands trains, there may
        be none before this one has trained.
        """
        longest, since = max(STUCK_S, self.timing.round_s), self._stepping_since
        if since is not None and self.now() > since + longest:
            return True
        return self.rules.clients is not None and self.late_s() > longest

    def _say_stuck(self) -> None:
        """The trainer stands still: nobody is to wait for this node's work, or its vote.

        It comes back into office as soon as it is through (:meth:`_take_office`).
        """
        stuck = self._stuck()
        if stuck and self.status.status == "active":
            self._stands_still = True
            self.note(status="joining")
            self.presence.tell()
        elif self._stands_still and not stuck:
            self._stands_still = False
            self._take_office()
            self.presence.tell()

    def _take_office_again(self, seen: Announce) -> None:
        """After a restart with all promises on record, its vote counts once it has caught up.

        That is at the place of another member in office: further back it would be waited for in
        vain.
        """
        place = self.replica.place
        there = (seen.round, seen.head) == (place.round, place.previous)
        in_office = {self.me, seen.peer} <= set(self.replica.roster)
        if not there or not in_office or self.status.status != "joining" or self._stuck():
            return
        if self._forgetting.remembers(*place.at):
            self.note(status="active")
            self.presence.tell()
