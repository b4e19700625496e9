"""How the members of a round come to one outcome, whoever dies on the way. Sans-IO.

This is single-decree Paxos (Lamport, "Paxos Made Simple", 2001) with the certified roster of
the previous round as acceptors, and one twist: a member votes only when it holds the bytes of
every part, so a decided outcome can always be fetched from a majority.

- A *ballot* is (epoch, number). Number ``n`` belongs to the n-th peer of the leader order
  (modulo its length), so no two peers propose under one ballot.
- Ballot (0, 0) needs no promises: nothing can have been decided below it. Every other leader
  first asks the roster to promise; a majority must answer, and if one of them has voted, the
  vote with the highest ballot is what the new leader has to propose again.
- A plan fixes contributors and who merges which part. The merged bytes are not known yet, but
  every owner produces one result per part and list of contributors (its *basis*), so a ballot
  still stands for one outcome. A draft (:mod:`gossip.plans.weighing`) is not voted on; the one plan
  that follows it under its ballot is.
- When a majority is gone for good the survivors open a new *epoch* with themselves as roster;
  all of them must promise. That is a fork if the others live on behind a broken link; the
  chain with more work wins when they meet (:func:`gossip.plans.certificate.heavier`).

As in any Paxos, members may die, hang, come back and lose messages without two certificates of
one round in epoch 0. A member that lies about what it voted for, an owner that signs two results
for one part, or a leader that signs two plans under one ballot can cause two; no member can make
another one accept what is malformed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gossip.place import Place
from gossip.plans import certificate as cert
from gossip.plans.planning import Ballot
from gossip.plans.validity import (
    PartKey,
    Shape,
    VerifiedResults,
    check_place,
    check_plan,
    fixes,
    key_of,
)
from gossip.rounds.agreed import (
    Adopted,
    AgreementEvent,
    CastVote,
    Decided,
    DecidedElsewhere,
    Equivocated,
)
from protocols.errors import BadSignature, Malformed, Stale
from protocols.identity import Identity, PeerId
from protocols.messages import (
    MAX_PARTS,
    Certificate,
    Outcome,
    Part,
    PartResult,
    Plan,
    Prepare,
    Promise,
    Vote,
    Votes,
)

NONE: Ballot = (0, -1)  # below every ballot
LEAP = 2**20  # no honest candidate is this many candidacies or epochs ahead of everything seen
VOTES_KEPT = 8  # of one voter, for different outcomes or ballots
ROSTERS_KEPT = 32


@dataclass
class Agreement:
    """One member's part in deciding one round."""

    identity: Identity
    place: Place
    shape: Shape
    roster: tuple[PeerId, ...]  # in office: decides in epoch 0
    abstains: Callable[[], bool] = lambda: False  # votes for nothing, for now
    promised: Ballot = NONE
    plan: Plan | None = None
    basis: bytes = b""  # of the plan
    voted: tuple[Ballot, Outcome] | None = None
    certificate: Certificate | None = None
    held: dict[PartKey, PartResult] = field(default_factory=dict)
    known: VerifiedResults = field(default_factory=VerifiedResults)
    _votes: dict[tuple[Ballot, bytes], dict[PeerId, bytes]] = field(default_factory=dict)
    _rosters: dict[Ballot, tuple[PeerId, ...]] = field(default_factory=dict)  # of epochs above 0
    _reported_elsewhere: bool = False
    _liars: set[PeerId] = field(default_factory=set)
    _epochs: dict[PeerId, int] = field(default_factory=dict)  # of the others, where above 0
    _voted_hash: bytes = b""  # of the outcome voted for: every vote is compared with it
    _complete: int = 0  # this many of the plan's parts, from the first on, are known to be held

    @property
    def me(self) -> PeerId:
        return self.identity.peer_id

    @property
    def office(self) -> tuple[PeerId, ...]:
        """Who decides under the ballot promised last."""
        return self._roster_of(self.promised) or self.roster

    @property
    def formed(self) -> tuple[PeerId, ...]:
        """The newest roster known here to have formed: that of my plan, or the one in office.

        The roster of a candidate that I promised may get no promise but mine.
        """
        return self.roster if self.plan is None else self.plan.roster

    @property
    def awaits_plan(self) -> bool:
        """Whether I have promised a ballot that I have no plan of yet."""
        return self.promised > (NONE if self.plan is None else self._ballot())

    @property
    def beyond(self) -> set[PeerId]:
        """Members in a later epoch than I have promised: they take no part in mine any more."""
        return {peer for peer, epoch in self._epochs.items() if epoch > self.promised[0]}

    def heard(self, peer: PeerId, epoch: int) -> None:
        """A member says that it is in this epoch."""
        if epoch > self._epochs.get(peer, 0) and peer in self.roster:
            self._epochs[peer] = epoch

    def proposer_of(self, ballot: Ballot, roster: tuple[PeerId, ...]) -> PeerId:
        """Who may propose under a ballot."""
        order = self.order(roster)
        return order[ballot[1] % len(order)]

    def order(self, roster: tuple[PeerId, ...]) -> list[PeerId]:
        """The roster in leading order."""
        return cert.leader_order(self.place.run, self.place.fragment, self.place.round, roster)

    # --- answering ---------------------------------------------------------------------------

    def on_prepare(self, sender: PeerId, prepare: Prepare) -> Promise | Certificate:
        """Promise, or answer with the higher ballot promised before, or with the certificate.

        Raises :class:`Stale` for another place in the chain or a ballot that another roster
        has taken, :class:`Malformed` for a roster or a ballot that is not the sender's.
        """
        if self.certificate is not None:
            return self.certificate
        if prepare.previous != self.place.previous:
            raise Stale("another place in the chain")
        ballot = (prepare.epoch, prepare.ballot)
        self._check_candidate(sender, ballot, prepare.roster)
        if ballot > self.promised:
            self._promise(ballot, prepare.roster)
        voted_at, outcome = self.voted if self.voted else ((0, 0), None)
        held = () if outcome or self.plan is None else self._pertinent()
        return Promise(*self.promised, *voted_at, outcome, held)

    def on_plan(self, sender: PeerId, plan: Plan) -> list[AgreementEvent]:
        """Adopt a plan of the highest ballot seen; lower ones are ignored.

        Raises :class:`Stale` or :class:`Malformed` like :meth:`on_prepare`. In an epoch above 0
        everybody must have promised, so a plan whose ballot I have not promised is refused.
        """
        if self.certificate is not None:
            return []
        ballot = (plan.epoch, plan.ballot)
        if ballot < self.promised:  # that of my plan is no higher
            return []
        if self.plan is not None and ballot == self._ballot() and plan.draft >= self.plan.draft:
            return []  # known, or a second plan of this ballot; only a draft's final plan is news
        if sender != plan.leader:
            raise Malformed("somebody else's plan")
        check_place(plan, self.place)  # first: a plan for another place in the chain breaks no rule
        self._check_candidate(sender, ballot, plan.roster)
        if ballot[0] > 0 and ballot > self.promised:
            raise Stale("an epoch that I have not promised")
        check_plan(plan, self.place, self.shape, self.roster, self.known)
        self._promise(ballot, plan.roster)
        self.plan, self.basis = plan, cert.basis_of(plan.codec, plan.contributors)
        self._complete = 0
        return [Adopted(plan), *self.vote_if_complete()]

    def on_held(self, result: PartResult) -> list[AgreementEvent]:
        """The bytes of this part are held, decode, and match its digest."""
        if self.certificate is not None:
            return []
        key = key_of(result)
        if key not in self.held or fixes(self.plan, result):
            self.held[key] = result
        return self.vote_if_complete()

    def vote_if_complete(self) -> list[AgreementEvent]:
        """Vote as soon as every part of the plan is held, unless I abstain."""
        plan = self.plan
        if plan is None or plan.draft or self._ballot() < self.promised or self.abstains():
            return []
        if self.voted is not None and self.voted[0] == self._ballot():
            return []
        while self._complete < len(plan.parts):
            if self._result_for(plan.parts[self._complete]) is None:
                return []
            self._complete += 1
        results = [result for part in plan.parts if (result := self._result_for(part)) is not None]
        outcome = cert.outcome_of(plan, results, self.place.work)
        hash_ = cert.outcome_hash(outcome)  # first: what cannot be hashed is not voted for
        self.voted, self._voted_hash = (self._ballot(), outcome), hash_
        vote = cert.sign_vote(
            self.identity,
            self.place.run,
            self.place.fragment,
            self.place.round,
            self.place.previous,
            self._ballot(),
            self._voted_hash,
        )
        slot = (self._ballot(), vote.outcome)
        self._votes.setdefault(slot, {})[self.me] = vote.signature
        events: list[AgreementEvent] = [CastVote(vote)]
        for known in list(self._votes):
            events += self._count(known)
        return events

    def on_vote(self, vote: Vote) -> list[AgreementEvent]:
        """Count somebody's vote.

        Raises :class:`Stale` or :class:`BadSignature`. A vote under a ballot not known here is
        kept: the plan may be on its way.
        """
        if self.certificate is not None or vote.voter in self._liars:
            return []
        place, ballot = self.place, (vote.epoch, vote.ballot)
        there = (vote.run, vote.fragment, vote.round, vote.previous)
        if there != (place.run, place.fragment, place.round, place.previous):
            raise Stale("a vote for another round, or of another side of a fork")
        if vote.voter not in (self._roster_of(ballot) or self.roster):
            raise BadSignature("a vote from outside the roster")
        cert.check_vote(vote)
        theirs = sorted(slot for slot, votes in self._votes.items() if vote.voter in votes)
        if any(at == ballot and hash_ != vote.outcome for at, hash_ in theirs):
            self._liars.add(vote.voter)
            for known in theirs:
                self._forget_vote(known, vote.voter)
            return [Equivocated(vote.voter)]
        slot = (ballot, vote.outcome)
        self._votes.setdefault(slot, {})[vote.voter] = vote.signature
        if slot not in theirs and len(theirs) >= VOTES_KEPT:
            self._forget_vote(theirs[0], vote.voter)
        return self._count(slot)

    def on_votes(self, votes: Votes) -> list[AgreementEvent]:
        """Count votes that somebody has collected. Raises as :meth:`on_vote` does."""
        events: list[AgreementEvent] = []
        place = (self.place.run, votes.fragment, votes.round, votes.previous)
        slot = (votes.epoch, votes.ballot, votes.outcome)
        for signed in votes.votes:
            events += self.on_vote(Vote(*place, *slot, signed.voter, signed.signature))
        return events

    def collected(self) -> Votes | None:
        """The votes that decided the round; None where there is no certificate here."""
        if (done := self.certificate) is None:
            return None
        place = (done.outcome.fragment, done.outcome.round, done.outcome.previous)
        return Votes(*place, done.epoch, done.ballot, self._voted_hash, done.votes)

    def voted_for(self, head: bytes) -> bool:
        """Whether this is the outcome that I have voted for."""
        return self.voted is not None and self._voted_hash == head

    def missing(self) -> list[tuple[int, int, PeerId, PartResult | None]]:
        """Parts of the plan not held yet: start, stop, owner, and the result if it is fixed."""
        if self.plan is None:
            return []
        return [
            (part.start, part.stop, part.owner, part.result)
            for part in self.plan.parts[self._complete :]
            if self._result_for(part) is None
        ]

    # --- inside --------------------------------------------------------------------------------

    def _ballot(self) -> Ballot:
        assert self.plan is not None
        return (self.plan.epoch, self.plan.ballot)

    def _roster_of(self, ballot: Ballot) -> tuple[PeerId, ...] | None:
        """Who decides under a ballot; None where that is not known here."""
        return self.roster if ballot[0] == 0 else self._rosters.get(ballot)

    def _promise(self, ballot: Ballot, roster: tuple[PeerId, ...]) -> None:
        self.promised = ballot
        if ballot[0] > 0:
            self._rosters[ballot] = roster
            while len(self._rosters) > ROSTERS_KEPT:
                del self._rosters[min(self._rosters)]

    def _check_candidate(self, sender: PeerId, ballot: Ballot, roster: tuple[PeerId, ...]) -> None:
        epoch, number = ballot
        if len(set(roster)) != len(roster):
            raise Malformed("a roster with doubled names")
        if (epoch == 0 and roster != self.roster) or self.me not in roster:
            raise Stale("not the roster in office, or one without me")
        if not set(roster) <= set(self.roster):
            raise Malformed("a roster of strangers")
        if sender != self.proposer_of(ballot, roster):
            raise Malformed("the ballot is not the sender's")
        highest, reached = self.promised
        if epoch > highest + LEAP or number > LEAP + (reached if epoch == highest else 0):
            raise Malformed("a ballot out of all proportion")
        if (taken := self._roster_of(ballot)) is not None and taken != roster:
            raise Stale("another roster has taken this ballot")

    def _pertinent(self) -> tuple[PartResult, ...]:
        """The results held for the current plan's basis: a new leader can build on them."""
        return tuple(r for r in self.held.values() if r.basis == self.basis)[:MAX_PARTS]

    def _result_for(self, part: Part) -> PartResult | None:
        fixed = part.result
        if fixed is None:
            return self.held.get((part.start, part.stop, part.owner, self.basis))
        if not fixed.digest:  # the part is certified as empty: there is nothing to hold
            return fixed
        mine = self.held.get(key_of(fixed))
        return fixed if mine is not None and mine.digest == fixed.digest else None

    def _forget_vote(self, slot: tuple[Ballot, bytes], voter: PeerId) -> None:
        del self._votes[slot][voter]
        if not self._votes[slot]:
            del self._votes[slot]

    def _count(self, slot: tuple[Ballot, bytes]) -> list[AgreementEvent]:
        ballot, hash_ = slot
        roster, votes = self._roster_of(ballot), self._votes.get(slot, {})
        if roster is None or self.certificate is not None or len(votes) < cert.majority(roster):
            return []
        valid = {peer: sign for peer, sign in votes.items() if peer in roster}
        if len(valid) < cert.majority(roster):
            return []
        if self.voted is not None and self._voted_hash == hash_:
            self.certificate = cert.certify(self.place.run, ballot, roster, self.voted[1], valid)
            return [Decided(self.certificate)]
        if self._reported_elsewhere:
            return []
        self._reported_elsewhere = True
        return [DecidedElsewhere(tuple(valid))]
