"""How the members of one round come to one outcome, whoever dies on the way. Sans-IO.

This is single-decree Paxos (Lamport, "Paxos Made Simple", 2001) with the certified roster of
the previous round as acceptors, and one twist: a member votes only when it holds the bytes of
every part, so a decided outcome can always be fetched from a majority.

- A *ballot* is (epoch, number). Number ``n`` belongs to the n-th peer of the leader order
  (modulo its length), so no two peers propose under one ballot.
- Ballot (0, 0) needs no promises: nothing can have been decided below it. Every other leader
  first asks the roster to promise; a majority must answer, and if one of them has voted, the
  vote with the highest ballot is what the new leader has to propose again.
- A plan fixes contributors and who merges which part. The merged bytes are not known yet, but
  every owner produces one result per part, so a ballot still stands for one outcome.
- When a majority is gone for good the survivors open a new *epoch* with themselves as roster;
  all of them must promise. That is a fork if the others live on behind a broken link; the
  chain with more work wins when they meet (:func:`gossip.certificate.heavier`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossip import certificate as cert
from protocols.errors import BadSignature, Malformed, RemoteProtocolError, Stale
from protocols.identity import Identity, PeerId
from protocols.messages import (
    Certificate,
    Outcome,
    PartResult,
    Plan,
    Prepare,
    Promise,
    Vote,
)

Ballot = tuple[int, int]
PartKey = tuple[int, int, PeerId]  # start, stop, owner

NONE: Ballot = (0, -1)  # below every ballot


@dataclass(frozen=True)
class Place:
    """Where in the chain a round stands."""

    run: bytes
    fragment: int
    round: int
    previous: bytes
    state: bytes
    work: int


@dataclass(frozen=True)
class Adopted:
    """Work by this plan from now on: send slices, merge, fetch what is known already."""

    plan: Plan


@dataclass(frozen=True)
class CastVote:
    """Send this vote to the whole roster."""

    vote: Vote


@dataclass(frozen=True)
class Decided:
    """The round is committed, and every part of it is held here."""

    certificate: Certificate


@dataclass(frozen=True)
class DecidedElsewhere:
    """A majority decided on something that is not held here: fetch it from these."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True)
class Remains:
    """What a new leader learnt from the promises it got."""

    ballot: Ballot
    roster: tuple[PeerId, ...]
    voted: Outcome | None  # has to be proposed again
    held: dict[PartKey, PartResult]
    promised: frozenset[PeerId]


Event = Adopted | CastVote | Decided | DecidedElsewhere


def key_of(result: PartResult) -> PartKey:
    """Part results are told apart by range and owner."""
    return (result.start, result.stop, result.owner)


@dataclass
class Agreement:
    """One member's part in deciding one round."""

    identity: Identity
    place: Place
    roster: tuple[PeerId, ...]
    promised: Ballot = NONE
    plan: Plan | None = None
    voted: tuple[Ballot, Outcome] | None = None
    certificate: Certificate | None = None
    held: dict[PartKey, PartResult] = field(default_factory=dict)
    _votes: dict[tuple[Ballot, bytes], dict[PeerId, bytes]] = field(default_factory=dict)
    _rosters: dict[int, tuple[PeerId, ...]] = field(default_factory=dict)  # by epoch
    _asked: Prepare | None = None
    _promises: dict[PeerId, Promise] = field(default_factory=dict)
    _reported_elsewhere: bool = False

    def __post_init__(self) -> None:
        self._rosters[0] = self.roster

    @property
    def me(self) -> PeerId:
        return self.identity.peer_id

    def owner_of(self, ballot: Ballot, roster: tuple[PeerId, ...]) -> PeerId:
        """Who may propose under a ballot."""
        order = self.order(roster)
        return order[ballot[1] % len(order)]

    def order(self, roster: tuple[PeerId, ...]) -> list[PeerId]:
        """The roster in leading order."""
        return cert.leader_order(self.place.run, self.place.fragment, self.place.round, roster)

    def roster_of(self, epoch: int) -> tuple[PeerId, ...]:
        """Who decides in an epoch."""
        return self._rosters[epoch]

    # --- proposing -------------------------------------------------------------------------

    def prepare(self, epoch: int, roster: tuple[PeerId, ...]) -> Prepare:
        """Stand for leader: the lowest ballot of mine above everything seen."""
        position = self.order(roster).index(self.me)
        number = position
        while (epoch, number) <= self.promised or number == 0:
            number += len(roster)
        self._asked = Prepare(
            self.place.fragment, self.place.round, epoch, number, self.place.previous, roster
        )
        self._promises = {}
        return self._asked

    def on_promise(self, sender: PeerId, promise: Promise) -> Remains | None:
        """Count a promise; the remains of the round once enough have promised.

        A promise for a higher ballot than asked for ends the candidacy.
        """
        asked = self._asked
        if asked is None or sender not in asked.roster:
            return None
        ballot = (asked.epoch, asked.ballot)
        if (promise.epoch, promise.ballot) != ballot:
            if (promise.epoch, promise.ballot) > ballot:
                self._asked = None
            return None
        self._promises[sender] = promise
        needed = len(asked.roster) if asked.epoch > 0 else cert.majority(asked.roster)
        if len(self._promises) < needed:
            return None
        self._asked = None
        voted: tuple[Ballot, Outcome] | None = None
        held: dict[PartKey, PartResult] = {}
        for given in self._promises.values():
            held.update({key_of(result): result for result in given.held})
            if given.voted is not None:
                at = (given.voted_epoch, given.voted_ballot)
                if voted is None or at > voted[0]:
                    voted = (at, given.voted)
        return Remains(
            ballot, asked.roster, voted[1] if voted else None, held, frozenset(self._promises)
        )

    # --- answering ---------------------------------------------------------------------------

    def on_prepare(self, sender: PeerId, prepare: Prepare) -> Promise | Certificate:
        """Promise, or say which higher ballot stands in the way, or that it is decided.

        Raises :class:`Stale` for another place in the chain, :class:`Malformed` for a roster
        or a ballot that is not the sender's.
        """
        if self.certificate is not None:
            return self.certificate
        if prepare.previous != self.place.previous:
            raise Stale("another place in the chain")
        ballot = (prepare.epoch, prepare.ballot)
        self._check_roster(prepare.epoch, prepare.roster)
        if sender != self.owner_of(ballot, prepare.roster):
            raise Malformed("the ballot is not the sender's")
        if ballot > self.promised:
            self.promised = ballot
            self._rosters[prepare.epoch] = prepare.roster
        voted_at, outcome = self.voted if self.voted else ((0, 0), None)
        return Promise(*self.promised, *voted_at, outcome, tuple(self.held.values()))

    def on_plan(self, sender: PeerId, plan: Plan) -> list[Event]:
        """Adopt a plan of the highest ballot seen; lower ones are ignored.

        Raises :class:`Stale` or :class:`Malformed` like :meth:`on_prepare`.
        """
        if self.certificate is not None:
            return []
        if (plan.previous, plan.state) != (self.place.previous, self.place.state):
            raise Stale("the plan builds on another state")
        ballot = (plan.epoch, plan.ballot)
        self._check_roster(plan.epoch, plan.roster)
        if sender != plan.leader or sender != self.owner_of(ballot, plan.roster):
            raise Malformed("the ballot is not the sender's")
        self._check_plan(plan)
        if ballot < self.promised or (self.plan is not None and ballot <= self._ballot()):
            return []
        self.promised, self.plan = ballot, plan
        self._rosters[plan.epoch] = plan.roster
        return [Adopted(plan), *self._vote_if_complete()]

    def on_held(self, result: PartResult) -> list[Event]:
        """The bytes of this part are held and match its digest."""
        if self.certificate is not None:
            return []
        self.held[key_of(result)] = result
        return self._vote_if_complete()

    def on_vote(self, vote: Vote) -> list[Event]:
        """Count somebody's vote.

        Raises :class:`Stale` or :class:`BadSignature`; a vote of a roster not known here is
        ignored, since the plan that names it is still on its way.
        """
        if self.certificate is not None:
            return []
        place = self.place
        if (vote.run, vote.fragment, vote.round) != (place.run, place.fragment, place.round):
            raise Stale("a vote for another round")
        roster = self._rosters.get(vote.epoch)
        if roster is not None and vote.voter not in roster:
            raise BadSignature("a vote from outside the roster")
        cert.check_vote(vote)
        slot = ((vote.epoch, vote.ballot), vote.outcome)
        if slot not in self._votes and len(self._votes) >= 64:
            raise RemoteProtocolError("votes for too many different outcomes")
        self._votes.setdefault(slot, {})[vote.voter] = vote.signature
        return self._count(slot)

    def missing(self) -> list[tuple[int, int, PeerId, PartResult | None]]:
        """Parts of the plan not held yet: start, stop, owner, and the result if it is fixed."""
        if self.plan is None:
            return []
        return [
            (part.start, part.stop, part.owner, part.result)
            for part in self.plan.parts
            if self._result_for(part.start, part.stop, part.owner, part.result) is None
        ]

    # --- inside --------------------------------------------------------------------------------

    def _ballot(self) -> Ballot:
        assert self.plan is not None
        return (self.plan.epoch, self.plan.ballot)

    def _check_roster(self, epoch: int, roster: tuple[PeerId, ...]) -> None:
        if len(set(roster)) != len(roster) or self.me not in roster:
            raise Malformed("a roster without me, or with doubled names")
        if epoch == 0 and roster != self.roster:
            raise Stale("not the roster in office")
        if epoch > 0 and not set(roster) <= set(self.roster):
            raise Malformed("a roster of strangers")

    def _check_plan(self, plan: Plan) -> None:
        at = 0
        for part in plan.parts:
            if part.start != at or part.stop <= part.start:
                raise Malformed("the parts do not cover the vector")
            at = part.stop
            if part.result is not None:
                self._check_result(plan, part.result)
                if (part.result.start, part.result.stop) != (part.start, part.stop):
                    raise Malformed("a result for another range")
        if plan.parts and not plan.contributors:
            raise Malformed("parts without contributors")

    def _check_result(self, plan: Plan, result: PartResult) -> None:
        if any(i.contributor >= len(plan.contributors) for i in result.included):
            raise Malformed("a result that counts an unknown contributor")
        if (result.fragment, result.round) != (self.place.fragment, self.place.round):
            raise Stale("a result of another round")
        cert.check_result(self.place.run, result)

    def _result_for(
        self, start: int, stop: int, owner: PeerId, fixed: PartResult | None
    ) -> PartResult | None:
        if fixed is None:
            return self.held.get((start, stop, owner))
        if not fixed.digest:  # nobody could complete it: there is nothing to hold
            return fixed
        mine = self.held.get(key_of(fixed))
        return fixed if mine is not None and mine.digest == fixed.digest else None

    def _vote_if_complete(self) -> list[Event]:
        plan = self.plan
        if plan is None or self._ballot() < self.promised:
            return []
        results = [self._result_for(p.start, p.stop, p.owner, p.result) for p in plan.parts]
        if any(result is None for result in results):
            return []
        complete = [result for result in results if result is not None]
        outcome = cert.outcome_of(plan, complete, self.place.work)
        if self.voted is not None and self.voted[0] == self._ballot():
            return []
        self.voted = (self._ballot(), outcome)
        vote = cert.sign_vote(
            self.identity,
            self.place.run,
            self.place.fragment,
            self.place.round,
            self._ballot(),
            cert.outcome_hash(outcome),
        )
        slot = (self._ballot(), vote.outcome)
        self._votes.setdefault(slot, {})[self.me] = vote.signature
        events: list[Event] = [CastVote(vote)]
        for known in list(self._votes):
            events += self._count(known)
        return events

    def _count(self, slot: tuple[Ballot, bytes]) -> list[Event]:
        (epoch, _), hash_ = slot
        roster = self._rosters.get(epoch)
        votes = self._votes[slot]
        if roster is None or self.certificate is not None:
            return []
        valid = {peer: sign for peer, sign in votes.items() if peer in roster}
        if len(valid) < cert.majority(roster):
            return []
        if self.voted is not None and cert.outcome_hash(self.voted[1]) == hash_:
            self.certificate = cert.certify(self.place.run, slot[0], roster, self.voted[1], valid)
            return [Decided(self.certificate)]
        if self._reported_elsewhere:
            return []
        self._reported_elsewhere = True
        return [DecidedElsewhere(tuple(valid))]
