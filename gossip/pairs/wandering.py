"""Which island one meets after its inner steps in gossip, and how long it waits. Sans-IO.

There are no rounds that all take part in, and islands need not be ready at the same time. Each
counts its own rounds; after the inner steps of one it exchanges parameters with a partner, as often
as ``exchanges`` says, takes its outer step and goes on. Events and ``now`` come in, instructions go
out; :mod:`gossip.pairs.roamer` carries them out.

An exchange is two letters, an opening and its answer, whenever they come, and moves both islands
by the same difference: each adds half of *the other's letter less its own of this exchange*. So
what one gains the other gives, the mean of all stays, and a late answer takes nothing back of what
was learnt meanwhile. The share is always a half, however many others have written: the partner
cannot know of them, and would move by a different share. Three halves would throw an island past
all others, so openings are taken up to two letters at once, and further ones are answered
afterwards, with the parameters as they are then. Answers are all taken, however many are late: by
what each moves is settled, both letters being written, and would add up to the same one by one. So
whoever gets three or more may stand beyond the others for a while; to leave one out would move the
mean, as its sender has moved already.

- Whom an island opens an exchange with follows from the members and the median of their rounds
  (:mod:`gossip.pairs.pairing`): islands that are ready at about the same time choose each other.
- An island that finds an opening when it is ready answers that instead of opening another exchange,
  so that it sends one letter a round.
- It waits for an answer only while that is worth it, by how late answers usually are
  (:mod:`gossip.pairs.patience`) and when the partner says that it will be ready. Later answers are
  taken with the next exchange, up to ``max_staleness`` rounds late; so slow islands give and get,
  too.
- A partner that is gone costs one exchange, or none: another one is chosen. If it did receive the
  opening, and answers, that counts like any late answer.

With ``one_way`` (push-sum) shares go to some neighbours, no answer is awaited, and no letter is
ever too old: its weight is part of the sum. Whether a share came is not always known at once: it
counts as gone until that is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Literal

from gossip.membership.members import Membership
from gossip.pairs.meeting import (
    Drop,
    Finish,
    Habits,
    Instruction,
    Key,
    MeetingOutcome,
    Met,
    Post,
    Stamp,
    Take,
    Taken,
    replaced,
)
from gossip.pairs.pairing import partner, successors
from gossip.pairs.patience import PartnerPatience
from protocols.identity import PeerId
from protocols.messages import Announce

MOST_MORE = 8  # exchanges that a round has beyond its own, to answer openings that keep coming
AT_ONCE = 2  # letters by a half each, up to which openings are taken: more would lead past all
TURNS = 2  # other partners that are tried where one is gone
LOOK_S = 5.0  # between two looks where nothing is due

Phase = Literal["training", "meeting", "mixing", "finishing"]


@dataclass
class Wandering:
    """One island's exchanges: ``exchanges`` a round; one way, that many receivers of shares."""

    me: PeerId
    habits: Habits
    membership: Membership
    round: int = 0  # the one that is under way, or was last
    exchanges: int = 1
    exchange: int = 0
    own: int = 0  # rounds that were begun here: the count leaps where this island is behind
    met: list[Met] = field(default_factory=list)  # of the round under way
    # peers that may have a share of ours, or not: until that is known they get no other
    owed: set[PeerId] = field(default_factory=set)
    patience: PartnerPatience = field(default_factory=PartnerPatience)
    _phase: Phase = "training"
    _label: int = 0  # the round from which partners follow
    _partner: PeerId | None = None
    _lost: set[PeerId] = field(default_factory=set)
    _posting: set[PeerId] = field(default_factory=set)
    _coming: set[PeerId] = field(default_factory=set)  # whose letter is on its way
    _held: dict[PeerId, list[Stamp]] = field(default_factory=dict)
    _begun: deque[int] = field(default_factory=deque)  # own rounds to whose letters answers count
    _opened: dict[PeerId, Key] = field(default_factory=dict)  # our letters not answered yet
    _failed: dict[PeerId, Key] = field(default_factory=dict)  # failed, but may have arrived
    _since: float = 0.0  # when the exchange began
    _moving_s: float = 0.0  # of it, while a letter that it waits for was on its way
    _seen: float = 0.0  # until when that was counted

    # --- for whoever owns this -------------------------------------------------------------------

    @property
    def resting(self) -> bool:
        """Whether no exchange is under way."""
        return self._phase == "training"

    @property
    def needed(self) -> set[Key]:
        """Letters of this island's that answers may still come to."""
        return {*self._opened.values(), *self._failed.values()}

    @property
    def in_doubt(self) -> set[PeerId]:
        """Who may have a share of this island's by now, or not."""
        return self.owed | self._posting if self.habits.one_way else set()

    def counts(self, answer: Stamp) -> bool:
        """Whether it answers a letter of this island's to which answers may still come."""
        sender = answer.sender
        return answer.answers in (self._opened.get(sender), self._failed.get(sender))

    def others(self, now: float) -> list[Announce]:
        """Live islands that take part."""
        return [a for a in self.membership.members_alive(now) if a.status == "active"]

    # --- events ----------------------------------------------------------------------------------

    def begin(self, place: int, exchanges: int, now: float) -> list[Instruction]:
        """The inner steps of the round at ``place`` are done.

        An island that is behind the median of the others counts on from there, so that all end
        together. Its own count has no say in that: one of two would never be behind.
        """
        if not self.resting:
            return []
        self.patience.begun(now)
        rounds = [announce.round for announce in self.others(now)]
        self._label = median_low([place, *rounds])  # of all, and so the same for all
        # who has just trained for round r is not behind others that train for r + 1 already
        self.round = max(place, median_low(rounds) - 1) if rounds else place
        least = 0 if self.habits.one_way else 1  # who gives nothing away may receive
        self.exchanges, self.exchange, self.met = max(least, exchanges), 0, []
        # by how many were begun: the number of one far slower than the median leaps from each to
        # the next, and its partners have moved by their answers all the same
        self._begun.append(self.round)
        self.own += 1
        if len(self._begun) > self.habits.max_staleness + 1:
            self._begun.popleft()
        oldest = self._begun[0]
        self._opened = {peer: key for peer, key in self._opened.items() if key[0] >= oldest}
        self._failed = {peer: key for peer, key in self._failed.items() if key[0] >= oldest}
        self.patience.keep(self.membership.islands)
        return self._open(now)

    def on_coming(self, sender: PeerId, now: float) -> None:
        """A letter of this island's has begun to arrive."""
        self._count_moving(now)
        self._coming.add(sender)

    def on_broken(self, sender: PeerId, now: float) -> list[Instruction]:
        """It has stopped arriving."""
        self._count_moving(now)
        self._coming.discard(sender)
        return self.tick(now)

    def on_letter(self, stamp: Stamp, now: float) -> list[Instruction]:
        """A letter is here."""
        self._count_moving(now)
        self._coming.discard(stamp.sender)
        held = self._held.setdefault(stamp.sender, [])
        gone = [] if self.habits.one_way else replaced(held, stamp, self.counts)  # shares all count
        held.append(stamp)
        for one in gone:
            held.remove(one)
        if self._phase == "meeting" and stamp.sender == self._partner and stamp in self._fresh():
            self.patience.answered(stamp.sender, now - self._since)
        return self.tick(now)

    def on_dropped(self, stamp: Stamp) -> None:
        """A letter was thrown away: there was no room for it any more."""
        held = self._held.get(stamp.sender, [])
        if stamp in held:
            held.remove(stamp)

    def on_posted(self, to: PeerId, now: float) -> list[Instruction]:
        """A letter that was awaited has arrived there."""
        self._count_moving(now)
        self._posting.discard(to)
        return self.tick(now)

    def on_failed(self, to: PeerId, now: float) -> list[Instruction]:
        """A letter that was awaited has not arrived there, and will not."""
        self._count_moving(now)
        self._posting.discard(to)
        if (key := self._opened.pop(to, None)) is not None:
            self._failed[to] = key  # should it be answered, the other has moved
        if self._phase == "meeting":
            self._lost.add(to)
            if self._overdue(now):
                self.patience.put_off(to, self.own)
        if self._phase != "meeting" or self.habits.one_way or to != self._partner:
            return self.tick(now)
        if not self._held.get(to) and len(self._lost) <= TURNS:
            chosen = self._choose(now)
            if chosen is not None:
                return self._turn_to(chosen)
        return self.tick(now)

    def on_taken(self, now: float) -> list[Instruction]:
        """The letters of a :class:`Take` are mixed in."""
        self.exchange += 1
        more = self.exchange < self.exchanges + MOST_MORE  # else they wait for the next round
        if not self.habits.one_way and more and self._waiting():
            self._start(now)
            return self._close(now)
        if self.habits.one_way or self.exchange >= self.exchanges:
            self._phase = "finishing"
            return [Finish(self.round)]
        return self._open(now)

    def on_finished(self) -> None:
        """The outer step is taken."""
        self._phase = "training"
        self._partner = None

    def tick(self, now: float) -> list[Instruction]:
        """Go on where there is nothing to wait for any more."""
        self._count_moving(now)
        if self._phase != "meeting" or self._posting or self._waits(now):
            return []
        if self._partner in self._coming and self._overdue(now):
            self.patience.put_off(self._partner, self.own)
        return self._close(now)

    def wake_at(self, now: float) -> float:
        """When :meth:`tick` is due."""
        if self._phase != "meeting" or self._moves():
            return now + LOOK_S  # events tell of all ends
        return max(now, self._since + self.patience.answer_s)

    # --- inside ----------------------------------------------------------------------------------

    def _open(self, now: float) -> list[Instruction]:
        self._phase, self._lost = "meeting", set()
        self._start(now)
        if self.habits.one_way:
            everybody = [a.peer for a in self.others(now) if a.peer not in self.owed]
            to = successors(everybody, self.me, self._label, self.habits.seed, self.exchanges)
            self._posting = set(to)
            if to:
                return [Post(peer, self.round, 0, None, True) for peer in to]
            return self._close(now)
        if self._waiting():
            return self._close(now)
        chosen = self._choose(now)
        return self._close(now) if chosen is None else self._turn_to(chosen)

    def _start(self, now: float) -> None:
        """An exchange begins, with nobody yet."""
        self._since, self._partner = now, None
        self._moving_s, self._seen = 0.0, now

    def _choose(self, now: float) -> PeerId | None:
        """Whom to open an exchange with; nobody who owes us an answer, or was just tried."""
        out = self._lost | self._opened.keys() | self.patience.slow(self.own)
        among: Sequence[PeerId] = [a.peer for a in self.others(now)]
        for turn in range(TURNS + 2):
            chosen = partner(
                [*among, self.me],
                self.me,
                self._label,
                self.habits.seed,
                self.exchange + 256 * turn,
            )
            if chosen is not None and chosen not in out:
                return chosen
        return None

    def _turn_to(self, peer: PeerId) -> list[Instruction]:
        self._partner = peer
        self._posting = {peer}
        self._opened[peer] = (self.round, self.exchange)
        return [Post(peer, self.round, self.exchange, None, True)]

    def _fresh(self) -> list[Stamp]:
        """Letters that can be taken: openings, and answers to letters that are still known."""
        found = []
        for held in self._held.values():
            for stamp in held:
                said = self.membership.announcement(stamp.sender)
                age = said.round - stamp.round if said is not None else 0
                if stamp.answers is None:  # both may have opened one at the same time
                    good = age <= self.habits.max_staleness
                else:
                    good = self.counts(stamp)
                if good:
                    found.append(stamp)
        return found

    def _waiting(self) -> list[Stamp]:
        """Openings of others, to be answered.

        A peer that opens an exchange while we have opened one with it meets us in that one, unless
        its answer is here as well.
        """
        fresh = self._fresh()
        answered = {
            s.sender for s in fresh if s.answers and s.answers == self._opened.get(s.sender)
        }
        met = self._opened.keys() - answered
        return [stamp for stamp in fresh if not stamp.answers and stamp.sender not in met]

    def _waits(self, now: float) -> bool:
        """Whether the partner's answer is still worth waiting for."""
        peer = self._partner
        if peer is None or any(stamp.sender == peer for stamp in self._fresh()):
            return False
        if peer in self._coming and not self._overdue(now):
            return True  # it moves, or the transport ends it
        until = self._since + self.patience.answer_s
        said = self.membership.announcement(peer)
        if peer in self._lost or now >= until or said is None:
            return False
        late = 0.0 if said.ready else self.membership.eta(peer, now)
        return now + late <= until

    def _overdue(self, now: float) -> bool:
        """Whether the exchange has taken the longest that it may."""
        return now >= self._since + self.patience.longest_s

    def _close(self, now: float) -> list[Instruction]:
        """End an exchange with what is here."""
        held = [stamp for stamps in self._held.values() for stamp in stamps]
        taking, later = held, list[Stamp]()
        if not self.habits.one_way:
            later = self._waiting()
            taking = [stamp for stamp in self._fresh() if stamp not in later]
            room = max(0, AT_ONCE - len(taking))
            taking, later = taking + later[:room], later[room:]
        self._note(now, {stamp.sender for stamp in taking})
        self._held = {stamp.sender: [stamp] for stamp in later}
        self._phase = "mixing"
        old = tuple(stamp for stamp in held if stamp not in taking and stamp not in later)
        first: list[Instruction] = [Drop(old)] if old else []
        taken = []
        for stamp in taking:
            if stamp.answers is not None and stamp.answers == self._failed.get(stamp.sender):
                taken.append(Taken(stamp, self._failed.pop(stamp.sender)))
                continue
            mine = self._opened.pop(stamp.sender, None)
            if mine is None and not self.habits.one_way:
                theirs = (stamp.round, stamp.exchange)
                first.append(Post(stamp.sender, self.round, self.exchange, theirs, False))
            mine = mine or (self.round, self.exchange)
            taken.append(Taken(stamp, mine))
        return [*first, Take(tuple(taken))] if taken else [*first, *self.on_taken(now)]

    def _moves(self) -> bool:
        """Whether a letter is on its way that the exchange waits for, however long that takes."""
        return bool(self._posting) or self._partner in self._coming

    def _count_moving(self, now: float) -> None:
        if self._phase == "meeting" and self._moves():
            self._moving_s += now - self._seen
        self._seen = now

    def _note(self, now: float, took: set[PeerId]) -> None:
        peer = self._partner
        outcome: MeetingOutcome
        if self.habits.one_way:
            outcome = "sent"
        elif peer in took:
            outcome = "mixed"
        elif peer is not None and peer not in self._lost:
            outcome = "open"
        elif took:
            outcome = "answered"
        else:
            outcome = "alone" if peer is None else "lost"
        others = tuple(sorted(took - {peer, self.me}))  # own: a share that came back
        # who does not take all of a letter in the longest time has a link to tell of
        gone = self._lost and not self._overdue(now)
        moving_s = None if gone else self._moving_s
        seconds = now - self._since
        self.met.append(Met(self.round, self.exchange, peer, outcome, seconds, moving_s, others))
