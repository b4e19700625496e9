"""A member that stands for leader: what it asks for, and what it was promised. Sans-IO.

This is the proposer of Paxos. The acceptor, and what may be proposed at all, is
:mod:`gossip.rounds.agreement`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossip.plans.certificate import majority
from gossip.plans.planning import Ballot, Remains
from gossip.plans.validity import PartKey, check_outcome, check_statement, key_of
from gossip.rounds.agreement import Agreement
from protocols.errors import Malformed
from protocols.identity import PeerId
from protocols.messages import Outcome, PartResult, Prepare, Promise


@dataclass
class Proposer:
    """One member that stands for leader, as often as it has to."""

    agreement: Agreement
    promises: dict[PeerId, Promise] = field(default_factory=dict)  # for the ballot asked for last
    _asked: Prepare | None = None
    _aside: dict[PeerId, tuple[float, Promise]] = field(default_factory=dict)  # not counted; when
    _outbid: bool = False  # somebody has promised a higher ballot than I asked for

    def prepare(self, epoch: int, roster: tuple[PeerId, ...]) -> Prepare:
        """Ask for the lowest ballot of mine above everything seen.

        While no higher ballot is seen, this is the one asked for before, and its promises still
        count: over a slow link a promise may take longer than a candidate waits.
        """
        agreement, asked = self.agreement, self._asked
        if (
            asked is not None
            and agreement.awaits_plan
            and not self._outbid
            and (*agreement.promised, roster) == (epoch, asked.ballot, asked.roster)
        ):
            return asked
        number, step = agreement.order(roster).index(agreement.me), len(roster)
        reached, last = agreement.promised
        least = max(1, last + 1) if epoch == reached else 1
        if number < least:
            number += (least - number + step - 1) // step * step
        place = agreement.place
        self._asked = Prepare(place.fragment, place.round, epoch, number, place.previous, roster)
        self.promises, self._aside, self._outbid = {}, {}, False
        return self._asked

    def on_promise(self, sender: PeerId, promise: Promise) -> Remains | None:
        """Count a promise; returns the remains of the round once enough have promised.

        A promise of a higher ballot than I asked for does not count; the others may suffice.
        Raises RemoteProtocolError for one whose content does not belong to this round.
        """
        if (asked := self._answered(sender, promise)) is None:
            return None
        ballot = (asked.epoch, asked.ballot)
        self.promises[sender] = promise
        needed = len(asked.roster) if asked.epoch > 0 else majority(asked.roster)
        if len(self.promises) < needed:
            return None
        self._asked = None
        voted: tuple[Ballot, Outcome] | None = None
        held: dict[PartKey, PartResult] = {}
        for given in self.promises.values():
            held.update({key_of(result): result for result in given.held})
            if given.voted is not None:
                at = (given.voted_epoch, given.voted_ballot)
                if voted is None or at > voted[0]:
                    voted = (at, given.voted)
        return Remains(ballot, asked.roster, voted[1] if voted else None, held)

    def set_aside(self, sender: PeerId, promise: Promise, now: float) -> None:
        """Do not count a promise yet: the others may suffice. Raises as :meth:`on_promise` does."""
        if self._answered(sender, promise) is not None:
            self._aside.setdefault(sender, (now, promise))

    def aside_since(self, before: float) -> list[tuple[PeerId, Promise]]:
        """What was set aside by then, if the others have not sufficed."""
        aside = self._aside.items() if self._asked is not None else ()
        return [(peer, promise) for peer, (at, promise) in aside if at <= before]

    def _answered(self, sender: PeerId, promise: Promise) -> Prepare | None:
        """What I have asked, if this promises it."""
        self.agreement.heard(sender, promise.epoch)
        asked = self._asked
        if asked is None or sender not in asked.roster:
            return None
        ballot = (asked.epoch, asked.ballot)
        if (promise.epoch, promise.ballot) != ballot:
            self._outbid |= (promise.epoch, promise.ballot) > ballot
            return None
        self._check(promise, ballot)
        return asked

    def _check(self, promise: Promise, ballot: Ballot) -> None:
        agreement = self.agreement
        if promise.voted is not None:
            if (promise.voted_epoch, promise.voted_ballot) >= ballot:
                raise Malformed("voted under a ballot that it promised only now")
            check_outcome(
                promise.voted, agreement.place, agreement.shape, agreement.roster, agreement.known
            )
        for result in promise.held:
            check_statement(result, agreement.place, agreement.shape)
            if result.owner not in agreement.roster:
                raise Malformed("a result of a stranger")
            agreement.known.verify(agreement.place.run, result)
