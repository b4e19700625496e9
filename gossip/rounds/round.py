"""One round at one member, from the first "ready" to the certificate. Sans-IO.

Events and ``now`` go in, instructions come out; :mod:`gossip.chain.chain` carries them out. What is
decided and why it cannot be decided twice is :mod:`gossip.rounds.agreement`; what a plan contains
is :mod:`gossip.plans.planning`; this file is about *when*: when a leader proposes, when a silent
one is passed over. When the survivors stop waiting for a majority is
:mod:`gossip.rounds.reforming`.

Somebody always stands up (:mod:`gossip.rounds.election_timer`): the live members of the roster, in
the round's leading order, each a little later than the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gossip.membership.members import Membership
from gossip.place import Place
from gossip.plans.planning import Ballot, Remains
from gossip.plans.rules import PATIENCE_S, Rules
from gossip.plans.validity import key_of
from gossip.rounds.agreed import (
    Adopted,
    AgreementEvent,
    CastVote,
    Decided,
    DecidedElsewhere,
    Equivocated,
)
from gossip.rounds.agreement import NONE, Agreement
from gossip.rounds.candidacies import Candidacies
from gossip.rounds.company import BELIEVED, Company
from gossip.rounds.drafting import Drafting
from gossip.rounds.earlier import Earlier
from gossip.rounds.election_timer import ElectionTimer
from gossip.rounds.gathering import Gathering
from gossip.rounds.holding import Holding
from gossip.rounds.instructions import Accuse, CatchUp, Commit, FollowPlan, Instruction, Send
from gossip.rounds.leadership import Leadership
from gossip.rounds.proposer import Proposer
from gossip.rounds.prospects import Prospects
from gossip.rounds.referral import Referral
from gossip.rounds.reforming import Reforming
from gossip.rounds.succession import Succession
from gossip.rounds.telling import Telling
from gossip.rounds.trial import Trial
from protocols.errors import BadSignature, Contradiction, Malformed, RemoteRefused
from protocols.identity import Identity, PeerId
from protocols.messages import (
    Announce,
    Certificate,
    Gram,
    Outcome,
    PartResult,
    Plan,
    Prepare,
    Promise,
    Suspect,
    Vote,
    Votes,
)


@dataclass
class Round:
    """The state of one round. Call :meth:`tick` at :meth:`wake_at`, or after any event."""

    identity: Identity
    place: Place
    roster: tuple[PeerId, ...]
    membership: Membership
    rules: Rules
    opened: float
    earlier: Earlier
    myself: Callable[[], Announce]  # this node's own announcement as of now
    abstain_until: float = 0.0  # just started: until then only listen
    forgot: bool = False  # restarted: may have promised or voted in this round and forgotten it
    holding: Holding = field(default_factory=Holding)  # how long earlier rounds were held back
    changes_sides: Callable[[], bool] = lambda: False  # of a fork: decides nothing meanwhile
    trial: Trial | None = None  # limits who comes into office; None: no limit
    gathering: Gathering = field(default_factory=Gathering)  # whom a run's creator waits for
    agreement: Agreement = field(init=False)
    proposer: Proposer = field(init=False)
    company: Company = field(init=False)
    telling: Telling = field(init=False)
    leadership: Leadership = field(init=False)
    candidacies: Candidacies = field(init=False)
    succession: Succession = field(init=False)
    finished: bool = field(init=False, default=False)  # committed here
    _drafting: Drafting = field(init=False)
    _prospects: Prospects = field(init=False)
    _reforming: Reforming = field(init=False)
    _referral: Referral = field(init=False)
    _election: ElectionTimer = field(default_factory=ElectionTimer)
    _stands_back: bool = False  # decided nothing so far, as ``changes_sides`` was true
    _voted_at: float = 0.0
    _usual_patience: float = 0.0  # seconds, from the round trips when the round began

    def __post_init__(self) -> None:
        self._usual_patience = self.membership.stillness_s(self.roster, PATIENCE_S)
        self.agreement = Agreement(
            self.identity, self.place, self.rules.shape, self.roster,
            lambda: self.changes_sides() or self.succession.withheld,
        )  # fmt: skip
        self.proposer = Proposer(self.agreement)
        self.company = Company(
            self.agreement, self.membership, self.myself, self.forgot, self.rules.clients,
            trial=self.trial,
        )  # fmt: skip
        self.candidacies = Candidacies(self.agreement, self.company)
        self.succession = Succession(self.agreement, self.company)
        self.telling = Telling(self.agreement, self.company)
        self.leadership = Leadership(
            self.identity, self.rules, self.company, self.opened, self.earlier, self.holding,
            self.gathering,
        )  # fmt: skip
        self._drafting = Drafting(self.agreement, self.rules.mix)
        self._prospects = Prospects(self.agreement, self.company, self._drafting, self.succession)
        self._reforming = Reforming(self.company, self.leadership, self.rules, self._election)
        self._referral = Referral(self.place, self.rules.shape, self.roster)

    @property
    def me(self) -> PeerId:
        return self.identity.peer_id

    # --- events ----------------------------------------------------------------------------------

    def on_news(self, announce: Announce) -> None:
        """A peer has announced its place in the chain."""
        if (announce.round, announce.head) == (self.place.round, self.place.previous):
            self.agreement.heard(announce.peer, announce.epoch)

    def on_message(
        self,
        sender: PeerId,
        message: Plan | Promise | Vote | Votes | Suspect | Gram | Certificate,
        now: float,
    ) -> list[Instruction]:
        """A control message, or the reply to one. Raises RemoteProtocolError for bad ones."""
        if self.finished:
            return []
        match message:
            case Plan():
                if now < self.abstain_until or (self.forgot and message.epoch == 0):
                    return []
                out = self._instructions(self._judged_plan(sender, message, now), now)
            case Vote():  # a vote makes nothing else due
                return self._instructions(self.agreement.on_vote(message), now)
            case Votes():
                return self._instructions(self.agreement.on_votes(message), now)
            case Promise(voted=Outcome() as voted) if not self.succession.bears(
                message.voted_epoch, voted, now, self._patience()
            ):  # I would have to propose its roster: the others' promises may suffice
                self.proposer.set_aside(sender, message, now)
                self.company.hearing.heard(sender)
                return []
            case Promise():
                out = self._on_promise(sender, message, now)
            case Suspect():
                self.company.reported(sender, message, now)
                return []  # a report makes nothing due at once
            case Gram():
                out = self._on_gram(sender, message, now)
            case Certificate():
                return self._referral.shown(sender, message, now, self._patience())
        return out + self.tick(now)

    def _judged_plan(self, sender: PeerId, plan: Plan, now: float) -> list[AgreementEvent]:
        """Adopt a plan. The sender of one that breaks the rules is faulty: it leads no more."""
        before, ballot = self.agreement.promised, (plan.epoch, plan.ballot)
        if ballot > before:
            self.candidacies.check(sender, ballot, now, self._patience())
        try:
            events = self.agreement.on_plan(sender, plan)
        except (Malformed, BadSignature):
            if sender in self.roster:
                self.company.faulty.add(sender)
            raise
        self.candidacies.followed(sender, before, now)
        if self.succession.judge(now, self._patience()):
            events += self.agreement.vote_if_complete()
        return [self._bounded(e, now) if isinstance(e, Adopted) else e for e in events]

    def _bounded(self, adopted: Adopted, now: float) -> Adopted:
        """Limit the plan's waits to what I find reasonable: nobody votes on them."""
        self.agreement.plan = self.leadership.bounded(adopted.plan, now)
        return Adopted(self.agreement.plan)

    def on_prepare(self, sender: PeerId, prepare: Prepare, now: float) -> Promise | Certificate:
        """Answer a candidate. Raises RemoteProtocolError, or RemoteRefused to decline."""
        if now < self.abstain_until or (self.forgot and prepare.epoch == 0):
            raise RemoteRefused("abstaining", "restarted during this round")
        self.agreement.heard(sender, prepare.epoch)
        self.company.hearing.heard(sender)  # whether I follow it or not
        before, ballot = self.agreement.promised, (prepare.epoch, prepare.ballot)
        self.candidacies.check(sender, ballot, now, self._patience())
        answer = self.agreement.on_prepare(sender, prepare)
        self.candidacies.followed(sender, before, now)
        if isinstance(answer, Certificate):
            self._election.not_due()
        elif self.agreement.promised > before:  # a repeated request delays nobody any further
            self._election.put_off(now)
        return answer

    def _on_promise(self, sender: PeerId, promise: Promise, now: float) -> list[Instruction]:
        """Count a promise, and lead once they are enough."""
        voted = promise.voted
        if voted is not None and self.leadership.disregards(sender, voted, now):
            return []
        remains = self.proposer.on_promise(sender, promise)
        self.company.hearing.heard(sender)
        self.leadership.note_held(sender, promise)
        return [] if remains is None else self._lead(remains, now)

    def _count_those_aside(self, now: float) -> list[Instruction]:
        """Lead by promises that I would rather do without, if it cannot be helped."""
        patience, out = self._patience(), list[Instruction]()
        if self.succession.has_no_choice(now, patience):
            for sender, promise in self.proposer.aside_since(now - patience):
                out += self._on_promise(sender, promise, now)
        return out

    def on_products(self, gram: Gram, now: float) -> list[Instruction]:
        """All slices of a draft's part that I own are in; ``gram`` has their inner products."""
        plan = self.agreement.plan
        if self.finished or plan is None or not plan.draft:
            return []
        if plan.leader != self.me:
            return [Send(plan.leader, gram)]
        return self._on_gram(self.me, gram, now)

    def _on_gram(self, sender: PeerId, gram: Gram, now: float) -> list[Instruction]:
        """An owner sends the leader of a draft the inner products of its part."""
        final = self._drafting.add(sender, gram)
        if final is None:
            return []
        at_fault = self._drafting.at_fault(self.company, now)
        self.company.faulty |= at_fault
        return [] if at_fault else self._propose(final, now)

    def on_held(self, result: PartResult, now: float) -> list[Instruction]:
        """The bytes of a merged part have arrived and match its digest."""
        return [] if self.finished else self._instructions(self.agreement.on_held(result), now)

    def on_lost(self, result: PartResult, now: float) -> list[Instruction]:
        """Nobody can supply a part that the plan takes as merged."""
        if self.finished:
            return []
        self._prospects.lost.add(key_of(result))
        self.leadership.lost.add(key_of(result))
        return self.tick(now)

    def on_fault(self, peer: PeerId, now: float) -> list[Instruction]:
        """A peer did not deliver what the plan asked of it."""
        if self.finished or peer == self.me:
            return []
        self.company.doubt(peer, now)
        return self.tick(now)

    def on_declined(self, peer: PeerId, now: float) -> list[Instruction]:
        """An owner refuses the slice that the plan asks me to send it."""
        if self.finished:
            return []
        self.company.declined(peer, now)
        return self.tick(now)

    def on_unpromised(self, peer: PeerId) -> None:
        """A peer has refused what I told it or asked of it."""
        self.company.hearing.heard(peer)

    def on_refused(self, peer: PeerId) -> None:
        """What a peer sent me came late or is useless; it may still serve others well."""
        self.company.refused(peer)

    # --- time ------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Instruction]:
        """Do what is due at ``now``."""
        if self.finished or now < self.abstain_until or self.me not in self.roster:
            return []
        if self.myself().status == "leaving":
            return []  # it still answers and votes while others count on it, but starts nothing
        if self.changes_sides():
            self._election.not_lost()
            self.leadership.quorum_since, self._stands_back = None, True
            return []
        if self._stands_back:  # the move came to nothing: vote for what has arrived meanwhile
            self._stands_back = False
            return self._instructions(self.agreement.vote_if_complete(), now)
        self.company.listen(now, self._patience())
        self.company.judge(now, self._patience())
        if self.succession.judge(now, self._patience()):
            return self._instructions(self.agreement.vote_if_complete(), now)
        if not self.company.majority_alive(now):
            return [] if self._reforming.awaits_votes(now) else self._reform(now)
        self._election.not_lost()
        if self.forgot and self._epoch() == 0:
            return []
        if out := self._count_those_aside(now):
            return out
        accused, overdue = self.company.accused(now, self._patience()), self._drafting.overdue(now)
        told = self.telling.suspects(accused, lambda: self.leadership.leaders(now, overdue))
        if not self._leader_is_due(now):
            self._election.not_due()
            return told
        self._election.due(now)
        return told + self._stand_if_my_turn(now)

    @property
    def doubt_s(self) -> float:
        """Seconds to wait before anybody is blamed for what has not come."""
        return BELIEVED * self._patience()

    def knows(self, ballot: Ballot) -> bool:
        """Whether my plan is at least as new as ``ballot``."""
        plan = self.agreement.plan
        return plan is not None and (plan.epoch, plan.ballot) >= ballot

    def awaits(self, head: bytes, now: float) -> bool:
        """Whether a peer at ``head`` is ahead only by votes that are still on their way to me."""
        return self.telling.awaited(head, self._voted_at, now, self._patience())

    def wake_at(self, now: float) -> float:
        """When :meth:`tick` should run next if nothing happens before."""
        step = self._patience() / (8 if self.company.failures else 4)
        if self.leadership.quorum_since is not None and self.agreement.plan is None:
            step = min(step, max(0.01, self.rules.grace_s(self.earlier.round_s) / 8))
        return now + min(step, 0.25)

    # --- standing and leading --------------------------------------------------------------------

    def _leader_is_due(self, now: float) -> bool:
        plan = self.agreement.plan
        if plan is None:
            return self.agreement.promised > NONE or self.leadership.due(now)
        return self._prospects.failed(plan, self._voted_at, self._patience(), now)

    def _stand_if_my_turn(self, now: float) -> list[Instruction]:
        office = self.agreement.office
        order = self.leadership.leaders(now, self._drafting.overdue(now))
        turn = order.index(self.me) if self.me in order else len(order)
        if not self._election.my_turn(turn, now, self._patience()):
            return []
        self._prospects.doubt_candidate(now)
        if (
            self.agreement.plan is None
            and self.agreement.promised == NONE
            and self.agreement.proposer_of((0, 0), self.roster) == self.me
        ):
            return self._lead(Remains((0, 0), self.roster, None, {}), now)
        if not self.company.intact(now):
            return self._stand(self._epoch() + 1, self.company.able(now), now)
        return self._stand(self._epoch(), office, now)

    def _stand(self, epoch: int, roster: tuple[PeerId, ...], now: float) -> list[Instruction]:
        prepare = self.proposer.prepare(epoch, roster)
        self.company.asks([peer for peer in roster if peer not in self.proposer.promises], now)
        out: list[Instruction] = [Send(peer, prepare) for peer in roster if peer != self.me]
        mine = self.agreement.on_prepare(self.me, prepare)
        if isinstance(mine, Promise):
            remains = self.proposer.on_promise(self.me, mine)
            if remains is not None:  # a roster of one
                out += self._lead(remains, now)
        return out

    def _reform(self, now: float) -> list[Instruction]:
        survivors = self._reforming.survivors(now, self._patience())
        return [] if survivors is None else self._stand(self._epoch() + 1, survivors, now)

    def _lead(self, remains: Remains, now: float) -> list[Instruction]:
        plan = self.leadership.compose(remains, now, self._patience())
        if plan is None:
            return []
        self._drafting.lead(plan)
        return self._propose(plan, now)

    def _propose(self, plan: Plan, now: float) -> list[Instruction]:
        self._election.leading()
        self.succession.approve(plan)
        return self.telling.all(plan) + self._instructions(
            self.agreement.on_plan(self.me, plan), now
        )

    # --- small questions -------------------------------------------------------------------------

    def _instructions(self, events: Sequence[AgreementEvent], now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for event in events:
            match event:
                case Adopted(plan):
                    self._election.not_due()
                    self._prospects.lost.clear()
                    self.leadership.begun(now)
                    self.company.adopted(plan)
                    self.telling.replanned()
                    self.succession.replanned()
                    self._drafting.adopted(plan, now)
                    out.append(FollowPlan(plan))
                case CastVote(vote):
                    self._voted_at = now
                    out += self.telling.vote(vote)
                case Decided(certificate):
                    self.finished = True
                    out += self.telling.decided(now)
                    out.append(Commit(certificate))
                case DecidedElsewhere(peers):
                    out.append(CatchUp(peers))
                case Equivocated(peer):
                    self.membership.expel(peer)
                    why = "voted for two outcomes under one ballot: expelled"
                    out.append(Accuse(peer, Contradiction(why)))
        return out

    def _epoch(self) -> int:
        return self.agreement.promised[0]

    def _patience(self) -> float:
        plan = self.agreement.plan
        return self._usual_patience if plan is None else plan.patience_s
