"""One round at one member, from the first "ready" to the certificate. Sans-IO.

Events and ``now`` go in, instructions come out; :mod:`gossip.driver` carries them out. What is
decided and why it cannot be decided twice is :mod:`gossip.agreement`; what a plan contains is
:mod:`gossip.planning`; this file is about *when*: when a leader proposes, when a silent one is
passed over, when the survivors stop waiting for a majority.

Somebody always stands up: the live members of the roster, in the round's leading order, each
wait a little longer than the one before. Two who stand up at once cost time, never agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gossip.agreement import (
    NONE,
    Adopted,
    Agreement,
    CastVote,
    Decided,
    DecidedElsewhere,
    Event,
    PartKey,
    Place,
    Remains,
    key_of,
)
from gossip.certificate import majority
from gossip.membership import Liveness, Membership
from gossip.planning import Rules, fresh_plan, renewed_plan, repeated_plan
from protocols.errors import RemoteRefused
from protocols.identity import Identity, PeerId
from protocols.messages import (
    Announce,
    Certificate,
    Outcome,
    PartResult,
    Plan,
    Prepare,
    Promise,
    Suspect,
    Vote,
)


@dataclass(frozen=True)
class Send:
    """Send a control message; a reply that is a message comes back as an event."""

    to: PeerId
    message: Plan | Prepare | Vote | Suspect


@dataclass(frozen=True)
class Work:
    """Move tensors by this plan."""

    plan: Plan


@dataclass(frozen=True)
class Commit:
    """The round is committed; every part is held here."""

    certificate: Certificate


@dataclass(frozen=True)
class CatchUp:
    """The round is committed without us; these hold all of it."""

    peers: tuple[PeerId, ...]


Instruction = Send | Work | Commit | CatchUp


@dataclass
class Round:
    """The state of one round. Call :meth:`tick` at :meth:`wake_at`, or after any event."""

    identity: Identity
    place: Place
    roster: tuple[PeerId, ...]
    membership: Membership
    rules: Rules
    opened: float
    round_s: float  # usual seconds from round to round
    myself: Callable[[], Announce]  # this node's own announcement as of now
    abstain_until: float = 0.0  # a restarted member may have promised things it forgot
    agreement: Agreement = field(init=False)
    _gone: set[PeerId] = field(default_factory=set)  # found not to deliver in this round
    _lost: set[PartKey] = field(default_factory=set)  # merged parts that nobody has any more
    _quorum_since: float | None = None
    _due_since: float | None = None  # since when a leader ought to have acted
    _stood_at: float | None = None
    _told: frozenset[PeerId] = frozenset()
    _lost_since: float | None = None
    _voted_at: float = 0.0
    _incarnations: dict[PeerId, int] = field(default_factory=dict)
    _finished: bool = False

    def __post_init__(self) -> None:
        self.agreement = Agreement(self.identity, self.place, self.roster)

    @property
    def me(self) -> PeerId:
        return self.identity.peer_id

    @property
    def finished(self) -> bool:
        """Committed, or handed over to catching up."""
        return self._finished

    # --- events ----------------------------------------------------------------------------------

    def on_message(
        self, sender: PeerId, message: Plan | Promise | Vote | Suspect | Certificate, now: float
    ) -> list[Instruction]:
        """A control message, or the reply to one. Raises RemoteProtocolError for bad ones."""
        if self._finished:
            return []
        match message:
            case Plan():
                if now < self.abstain_until:
                    return []
                out = self._carry_out(self.agreement.on_plan(sender, message), now)
            case Vote():
                out = self._carry_out(self.agreement.on_vote(message), now)
            case Promise():
                remains = self.agreement.on_promise(sender, message)
                out = [] if remains is None else self._lead(remains, now)
            case Suspect():
                if (message.epoch, message.ballot) == self._ballot():
                    self._gone |= set(message.peers) - {self.me, sender}
                out = []
            case Certificate():
                self._finished = True
                return [CatchUp((sender,))]
        return out + self.tick(now)

    def on_prepare(self, sender: PeerId, prepare: Prepare, now: float) -> Promise | Certificate:
        """Answer a candidate. Raises RemoteProtocolError, or RemoteRefused to decline."""
        if now < self.abstain_until:
            raise RemoteRefused("abstaining", "restarted during this round")
        if prepare.epoch > self._epoch() and self._majority_alive(now):
            raise RemoteRefused("majority-alive", "no reason to reform the roster")
        answer = self.agreement.on_prepare(sender, prepare)
        self._due_since = None if isinstance(answer, Certificate) else now
        return answer

    def on_held(self, result: PartResult, now: float) -> list[Instruction]:
        """The bytes of a merged part have arrived and match its digest."""
        return [] if self._finished else self._carry_out(self.agreement.on_held(result), now)

    def on_lost(self, result: PartResult, now: float) -> list[Instruction]:
        """A part that the plan takes as merged is not to be had from anybody."""
        if self._finished:
            return []
        self._lost.add(key_of(result))
        return self.tick(now)

    def on_fault(self, peer: PeerId, now: float) -> list[Instruction]:
        """A peer did not deliver what the plan asked of it."""
        if self._finished or peer == self.me or peer in self._gone:
            return []
        self._gone.add(peer)
        return self.tick(now)

    # --- time ------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Instruction]:
        """Do what is due at ``now``."""
        if self._finished or now < self.abstain_until:
            return []
        if self.me not in self.roster:
            return []
        if not self._majority_alive(now):
            return self._reform(now)
        self._lost_since = None
        if not self._leader_is_due(now):
            self._due_since = None
            return []
        if self._due_since is None:
            self._due_since = now
        return self._tell_leader() + self._stand_if_my_turn(now)

    def wake_at(self, now: float) -> float:
        """When :meth:`tick` should run next if nothing happens before."""
        step = self._patience() / 4
        if self._quorum_since is not None and self.agreement.plan is None:
            step = min(step, max(0.01, self.rules.grace_s(self.round_s) / 8))
        return now + min(step, 0.25)

    # --- is it time to lead? ---------------------------------------------------------------------

    def _leader_is_due(self, now: float) -> bool:
        plan = self.agreement.plan
        if plan is None:
            return self.agreement.promised > NONE or self._should_begin(now)
        if self.agreement.promised > (plan.epoch, plan.ballot):
            return True  # promised to somebody who has not come up with a plan
        if not self.agreement.missing():  # all is held and voted for: votes may have been lost
            return now - self._voted_at > 2 * self._patience()
        return self._cannot_complete(now)

    def _cannot_complete(self, now: float) -> bool:
        """Whether an open part of the plan waits for somebody, or something, that is gone."""
        for _, _, owner, fixed in self.agreement.missing():
            if fixed is not None:
                if key_of(fixed) in self._lost:
                    return True
            elif owner in self._gone or self._liveness(owner, now) is not Liveness.ALIVE:
                return True
        return False

    def _should_begin(self, now: float) -> bool:
        ready, late = self._ready_and_late(now)
        if not ready or len(ready) < self.rules.quorum * (len(ready) + len(late)):
            self._quorum_since = None
            return False
        if self._quorum_since is None:
            self._quorum_since = now
        left = self._quorum_since + self.rules.grace_s(self.round_s) - now
        return left <= 0 or not any(self._eta(announce, now) <= left * 1.25 for announce in late)

    def _ready_and_late(self, now: float) -> tuple[list[Announce], list[Announce]]:
        """Live members of the roster at this place of the chain, ready and not ready."""
        ready, late = [], []
        for announce in self._members(now):
            if announce.ready and announce.state == self.place.state:
                ready.append(announce)
            elif announce.status == "active":
                late.append(announce)
        return ready, late

    def _eta(self, announce: Announce, now: float) -> float:
        mine = announce.peer == self.me
        return announce.eta if mine else self.membership.eta(announce.peer, now)

    def _members(self, now: float) -> list[Announce]:
        """Announcements of the live members who stand at this place of the chain, mine included."""
        here = (self.place.round, self.place.previous)
        found = []
        for peer in self._office():
            announce = self.myself() if peer == self.me else self.membership.announcement(peer)
            if (
                announce is not None
                and (announce.round, announce.head) == here
                and peer not in self._gone
                and self._liveness(peer, now) is Liveness.ALIVE
            ):
                found.append(announce)
        return found

    # --- standing and leading --------------------------------------------------------------------

    def _tell_leader(self) -> list[Instruction]:
        """Report those who do not deliver to the leader of the plan, once each."""
        plan = self.agreement.plan
        fresh = frozenset(self._gone) - self._told
        if plan is None or plan.leader == self.me or plan.leader in self._gone or not fresh:
            return []
        self._told |= fresh
        peers = tuple(sorted(fresh))
        return [
            Send(plan.leader, Suspect(plan.fragment, plan.round, plan.epoch, plan.ballot, peers))
        ]

    def _stand_if_my_turn(self, now: float) -> list[Instruction]:
        assert self._due_since is not None
        office = self._office()
        order = [
            peer
            for peer in self.agreement.order(office)
            if peer not in self._gone and self._liveness(peer, now) is Liveness.ALIVE
        ]
        plan = self.agreement.plan
        if plan is not None and plan.leader in order:  # who leads goes first in repairing
            order.remove(plan.leader)
            order.insert(0, plan.leader)
        turn = order.index(self.me) if self.me in order else len(order)
        if now < self._due_since + turn * self._patience():
            return []
        if self._stood_at is not None and now < self._stood_at + 2 * self._patience():
            return []
        self._stood_at = now
        if (
            plan is None
            and self.agreement.promised == NONE
            and self.agreement.owner_of((0, 0), self.roster) == self.me
        ):
            return self._lead(Remains((0, 0), self.roster, None, {}, frozenset()), now)
        return self._stand(self._epoch(), office, now)

    def _stand(self, epoch: int, roster: tuple[PeerId, ...], now: float) -> list[Instruction]:
        prepare = self.agreement.prepare(epoch, roster)
        out: list[Instruction] = [Send(peer, prepare) for peer in roster if peer != self.me]
        mine = self.agreement.on_prepare(self.me, prepare)
        if isinstance(mine, Promise):
            remains = self.agreement.on_promise(self.me, mine)
            if remains is not None:  # a roster of one
                out += self._lead(remains, now)
        return out

    def _lead(self, remains: Remains, now: float) -> list[Instruction]:
        plan = self._compose(remains, now)
        if plan is None:
            return []
        self._due_since = self._stood_at = None  # should this plan fail as well, stand at once
        out: list[Instruction] = [Send(peer, plan) for peer in plan.roster if peer != self.me]
        return out + self._carry_out(self.agreement.on_plan(self.me, plan), now)

    def _compose(self, remains: Remains, now: float) -> Plan | None:
        if remains.voted is not None:
            return repeated_plan(self.identity, self.place, remains, self._patience())
        gone = {
            peer
            for peer in remains.roster
            if peer in self._gone or self._liveness(peer, now) is not Liveness.ALIVE
        }
        gone |= set(self.roster) - set(remains.roster)
        next_roster = self._next_roster(remains, now)
        if self.agreement.plan is not None:
            live = [peer for peer in remains.roster if peer not in gone]
            return renewed_plan(
                self.identity, self.place, self.agreement.plan, remains, gone, live, next_roster
            )
        ready, _ = self._ready_and_late(now)
        ready = [announce for announce in ready if announce.peer in remains.roster]
        if not ready:
            return None
        members = [a for a in self._members(now) if a.peer in remains.roster]
        return fresh_plan(
            self.identity,
            self.place,
            self.rules,
            ballot=remains.ballot,
            roster=remains.roster,
            ready=ready,
            members=members,
            next_roster=next_roster,
        )

    def _next_roster(self, remains: Remains, now: float) -> set[PeerId]:
        """Who decides the next round: the old ones but for the dead, and those who joined."""
        reformed = remains.ballot[0] > 0
        stay = {
            peer
            for peer in remains.roster
            if self._liveness(peer, now)
            in ((Liveness.ALIVE,) if reformed else (Liveness.ALIVE, Liveness.SUSPECT))
        }
        newcomers = {
            announce.peer
            for announce in self.membership.islands_alive(now)
            if announce.peer not in stay
            and announce.head == self.place.previous
            and announce.state == self.place.state
        }
        if self.myself().status == "leaving":
            stay.discard(self.me)
        return (stay | newcomers) or {self.me}

    # --- without a majority ----------------------------------------------------------------------

    def _reform(self, now: float) -> list[Instruction]:
        """Go on with those who are left, once it is certain enough that the rest is gone."""
        if self._lost_since is None:
            self._lost_since = now
        lost_for = now - self._lost_since
        office = self._office()
        left = [p for p in office if self._liveness(p, now) is Liveness.LEFT]
        alive = self._able(now)
        enough = len(alive) >= self.rules.quorum * (len(office) - len(left))
        if lost_for < (self._patience() if enough else self.rules.alone_after_s):
            return []
        if self.agreement.plan is None and not self._ready_and_late(now)[0]:
            return []  # nobody has anything to contribute yet
        order = [peer for peer in self.agreement.order(office) if peer in alive]
        turn = order.index(self.me)
        if now < self._lost_since + (1 + turn) * self._patience():
            return []
        if self._stood_at is not None and now < self._stood_at + 2 * self._patience():
            return []
        self._stood_at = now
        return self._stand(self._epoch() + 1, alive, now)

    # --- small questions -------------------------------------------------------------------------

    def _carry_out(self, events: Sequence[Event], now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for event in events:
            match event:
                case Adopted(plan):
                    self._due_since = None
                    self._lost.clear()
                    self._gone -= {c.peer for c in plan.contributors if c.active}
                    self._gone -= {part.owner for part in plan.parts if part.result is None}
                    out.append(Work(plan))
                case CastVote(vote):
                    self._voted_at = now
                    roster = self._office()
                    out += [Send(peer, vote) for peer in roster if peer != self.me]
                case Decided(certificate):
                    self._finished = True
                    out.append(Commit(certificate))
                case DecidedElsewhere(peers):
                    self._finished = True
                    out.append(CatchUp(peers))
        return out

    def _liveness(self, peer: PeerId, now: float) -> Liveness:
        """As the membership sees it; who restarted during this round is out of it for good.

        A restarted process has forgotten what it promised, so it must not be counted on.
        """
        announce = self.membership.announcement(peer)
        if announce is not None and announce.status != "leaving":
            known = self._incarnations.setdefault(peer, announce.incarnation)
            if announce.incarnation != known:
                return Liveness.DEAD
        return self.membership.liveness(peer, now)

    def _able(self, now: float) -> tuple[PeerId, ...]:
        """Those in office who are alive and able to vote (a joining member abstains)."""
        return tuple(
            peer
            for peer in self._office()
            if self._liveness(peer, now) is Liveness.ALIVE
            and (peer == self.me or self._status(peer) == "active")
        )

    def _status(self, peer: PeerId) -> str:
        announce = self.membership.announcement(peer)
        return "" if announce is None else announce.status

    def _majority_alive(self, now: float) -> bool:
        return len(self._able(now)) >= majority(self._office())

    def _office(self) -> tuple[PeerId, ...]:
        return self.agreement.roster_of(self._epoch())

    def _epoch(self) -> int:
        return self.agreement.promised[0]

    def _ballot(self) -> tuple[int, int]:
        plan = self.agreement.plan
        return NONE if plan is None else (plan.epoch, plan.ballot)

    def _patience(self) -> float:
        plan = self.agreement.plan
        return self.rules.patience_s if plan is None else plan.patience_s


__all__ = ["CatchUp", "Commit", "Instruction", "Outcome", "Round", "Send", "Work"]
