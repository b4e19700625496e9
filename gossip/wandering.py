"""An island's part in gossip: whom it meets after its inner steps, and how long it waits. Pure.

There are no rounds that all take part in. Each island counts its own; after the inner steps of one
it exchanges parameters with a partner that follows from the members and the round
(:mod:`gossip.pairing`), as often as ``exchanges`` says, takes its outer step and goes on. Events
and ``now`` come in, instructions go out; :mod:`gossip.roamer` carries them out.

- **Nobody is waited for in vain.** A partner is waited for only while it stands at the same round
  and expects to be ready within this island's patience, which follows from how late partners
  usually are. What is on its way is waited for as long as it moves.
- **What comes late counts.** A letter that nobody waited for is taken with the next exchange, at
  most ``max_staleness`` rounds old and with a weight that falls with its age, and is answered. So
  an island that is slower than the others gives and gets, too.
- **A partner that is gone costs one exchange**, or none: whoever lost its partner turns to another
  one that is ready.
- **Counters keep together.** A round is labelled with at least the median of those of the live
  islands, so partners of the slow and of newcomers follow from the same numbers as everybody's.

With ``one_way`` (push-sum) shares go to some neighbours, no answer is awaited, and no letter is
ever too old: its weight is part of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

from gossip.membership import Membership
from gossip.pairing import partner, successors
from gossip.trips import RoundTrip
from protocols.identity import PeerId
from protocols.messages import Announce

LEAST_PATIENCE_S = 1.0
FIRST_PATIENCE_S = 5.0  # before anything was measured
SHARE = 0.5  # of a round that a partner is waited for at most
TURNS = 2  # other partners that are tried where one is gone


@dataclass(frozen=True, slots=True)
class Habits:
    """How an island gossips."""

    seed: bytes  # the run's
    max_staleness: int = 2  # rounds that letters and partners may be away
    one_way: bool = False


@dataclass(frozen=True, slots=True)
class Stamp:
    """What is known of a letter that is here."""

    sender: PeerId
    round: int
    exchange: int
    number: int  # of all letters that came


@dataclass(frozen=True, slots=True)
class Post:
    """Send the parameters as they are now; ``awaited``: tell of the end."""

    to: PeerId
    round: int
    exchange: int
    awaited: bool


@dataclass(frozen=True, slots=True)
class Take:
    """Move the parameters towards those of these letters, by so much of the way; then tell."""

    letters: tuple[tuple[Stamp, float], ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Throw these letters away: they are too old."""

    letters: tuple[Stamp, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """All exchanges are through: take the outer step, as round ``round``."""

    round: int


Instruction = Post | Take | Drop | Finish


@dataclass(frozen=True, slots=True)
class Met:
    """One exchange as it ended."""

    round: int
    exchange: int
    partner: PeerId | None  # None: there was nobody
    outcome: str  # "mixed", "missed" (nothing came in time), "lost" (it is gone), "alone", "sent"
    seconds: float
    late: int = 0  # letters of others that were taken along


@dataclass
class Wandering:
    """One island's exchanges: so many a round as ``exchanges`` says; with ``one_way``, receivers."""

    me: PeerId
    habits: Habits
    membership: Membership
    round: int = 0  # the one that is under way, or was last
    exchanges: int = 1
    exchange: int = 0
    met: list[Met] = field(default_factory=list)  # of the round under way
    _phase: str = "training"  # then "meeting", "mixing", "finishing"
    _partner: PeerId | None = None
    _lost: set[PeerId] = field(default_factory=set)
    _turns: int = 0
    _posting: set[PeerId] = field(default_factory=set)
    _coming: set[PeerId] = field(default_factory=set)  # whose letter is on its way
    _held: dict[PeerId, list[Stamp]] = field(default_factory=dict)
    _told: dict[PeerId, int] = field(default_factory=dict)  # the round of our newest letter to it
    _since: float = 0.0  # when the exchange began
    _began: float | None = None  # when the round did
    _round_s: float = 0.0  # usual seconds from one to the next
    _usual: RoundTrip | None = None  # seconds until a partner's letter is here

    # --- for whoever owns this -------------------------------------------------------------------

    @property
    def resting(self) -> bool:
        """Whether no exchange is under way."""
        return self._phase == "training"

    @property
    def patience_s(self) -> float:
        """How long a partner is waited for at most."""
        most = max(LEAST_PATIENCE_S, SHARE * self._round_s) if self._round_s else FIRST_PATIENCE_S
        if self._usual is None:
            return most
        return min(most, max(LEAST_PATIENCE_S, self._usual.longest))

    def others(self, now: float) -> list[Announce]:
        """Live islands that take part."""
        return [a for a in self.membership.islands_alive(now) if a.status == "active"]

    def common_round(self, mine: int, now: float) -> int:
        """The median of the rounds of the live islands, this one at ``mine``; not before that."""
        return max(mine, median_low([mine, *(a.round for a in self.others(now))]))

    # --- events ----------------------------------------------------------------------------------

    def begin(self, place: int, exchanges: int, now: float) -> list[Instruction]:
        """The inner steps of the round at ``place`` are done."""
        if not self.resting:
            return []
        if self._began is not None:
            gap = now - self._began
            self._round_s += (0.3 if self._round_s else 1.0) * (gap - self._round_s)
        self._began = now
        self.round = self.common_round(place, now)
        self.exchanges, self.exchange, self.met = max(1, exchanges), 0, []
        return self._open(now)

    def on_coming(self, sender: PeerId) -> None:
        """A letter of this island's has begun to arrive."""
        self._coming.add(sender)

    def on_broken(self, sender: PeerId, now: float) -> list[Instruction]:
        """It has stopped to arrive."""
        self._coming.discard(sender)
        return self.tick(now)

    def on_letter(self, stamp: Stamp, now: float) -> list[Instruction]:
        """A letter is here."""
        self._coming.discard(stamp.sender)
        held = self._held.setdefault(stamp.sender, [])
        if not self.habits.one_way:
            held.clear()  # only the newest counts; of shares every one does
        held.append(stamp)
        if self._phase == "meeting" and stamp.sender == self._partner:
            took = now - self._since
            if self._usual is None:
                self._usual = RoundTrip.first(took)
            else:
                self._usual.add(took)
        return self.tick(now)

    def on_dropped(self, stamp: Stamp) -> None:
        """A letter was thrown away: there was no room for it any more."""
        held = self._held.get(stamp.sender, [])
        if stamp in held:
            held.remove(stamp)

    def on_posted(self, to: PeerId, now: float) -> list[Instruction]:
        """A letter that was awaited has arrived there."""
        self._posting.discard(to)
        return self.tick(now)

    def on_failed(self, to: PeerId, now: float) -> list[Instruction]:
        """It has not, and will not."""
        self._posting.discard(to)
        self._told.pop(to, None)
        if self._phase != "meeting" or self.habits.one_way or to != self._partner:
            return self.tick(now)
        self._lost.add(to)
        if not self._from(to) and self._turns < TURNS and now < self._since + self.patience_s:
            ready = [a.peer for a in self._near(now) if a.ready and a.peer not in self._lost]
            self._turns += 1
            again = self._choose(ready, self._turns)
            if again is not None:
                return self._turn_to(again)
        return self.tick(now)

    def on_taken(self, now: float) -> list[Instruction]:
        """The letters of a :class:`Take` are mixed in."""
        self.exchange += 1
        if self.habits.one_way or self.exchange >= self.exchanges:
            return self._finish()
        return self._open(now)

    def on_finished(self) -> None:
        """The outer step is taken."""
        self._phase = "training"
        self._partner = None

    def tick(self, now: float) -> list[Instruction]:
        """Go on where there is nothing to wait for any more."""
        if self._phase != "meeting" or self._posting or self._waits(now):
            return []
        return self._close(now)

    def wake_at(self, now: float) -> float:
        """When :meth:`tick` is due."""
        if self._phase != "meeting":
            return now + FIRST_PATIENCE_S
        return max(now, self._since + self.patience_s)

    # --- inside ----------------------------------------------------------------------------------

    def _open(self, now: float) -> list[Instruction]:
        self._phase, self._since = "meeting", now
        self._lost, self._turns, self._partner = set(), 0, None
        near = [a.peer for a in self._near(now) if a.exchanges > self.exchange]
        if self.habits.one_way:
            everybody = [a.peer for a in self.others(now)]
            to = successors(everybody, self.me, self.round, self.habits.seed, self.exchanges)
            self._posting = set(to)
            if to:
                return [Post(peer, self.round, 0, True) for peer in to]
            return self._close(now)
        chosen = self._choose(near)
        return self._close(now) if chosen is None else self._turn_to(chosen)

    def _choose(self, among: Sequence[PeerId], turn: int = 0) -> PeerId | None:
        meeting = self.exchange + 256 * turn
        return partner([*among, self.me], self.me, self.round, self.habits.seed, meeting)

    def _turn_to(self, peer: PeerId) -> list[Instruction]:
        self._partner = peer
        self._posting = {peer}
        self._told[peer] = self.round
        return [Post(peer, self.round, self.exchange, True)]

    def _near(self, now: float) -> list[Announce]:
        """Whom this round's partner may be among."""
        far = self.habits.max_staleness
        return [a for a in self.others(now) if abs(a.round - self.round) <= far]

    def _from(self, peer: PeerId) -> Stamp | None:
        """The newest letter of a peer that is not too old."""
        oldest = self.round - self.habits.max_staleness
        held = [stamp for stamp in self._held.get(peer, ()) if stamp.round >= oldest]
        return held[-1] if held else None

    def _waits(self, now: float) -> bool:
        """Whether the partner's letter is still worth waiting for."""
        peer = self._partner
        if peer is None or self._from(peer):
            return False
        if peer in self._coming:
            return True  # it moves, or the transport ends it
        if peer in self._lost or now >= self._since + self.patience_s:
            return False
        said = self.membership.announcement(peer)
        if said is None or said.round != self.round:
            return False  # it has been there already, or comes a round later
        late = 0.0 if said.ready else self.membership.eta(peer, now)
        return now + late <= self._since + self.patience_s

    def _close(self, now: float) -> list[Instruction]:
        """End an exchange with what is here."""
        taken = self._all() if self.habits.one_way else self._usable()
        used = {stamp for stamp, _ in taken}
        peers = {stamp.sender for stamp in used}
        self._note(now, len(taken) - (self._partner in peers), self._partner in peers)
        first: list[Instruction] = []
        if not self.habits.one_way:
            oldest = self.round - self.habits.max_staleness
            old = {s for held in self._held.values() for s in held if s.round < oldest}
            used |= old
            first += [Drop(tuple(old))] if old else []
            for peer in sorted(peers - {self._partner}):
                if self._told.get(peer, -1) < oldest:
                    self._told[peer] = self.round
                    first.append(Post(peer, self.round, self.exchange, False))
        self._held = {
            peer: left
            for peer, held in self._held.items()
            if (left := [stamp for stamp in held if stamp not in used])
        }
        self._phase = "mixing"
        return [*first, Take(tuple(taken))] if taken else [*first, *self.on_taken(now)]

    def _finish(self) -> list[Instruction]:
        self._phase = "finishing"
        return [Finish(self.round)]

    def _all(self) -> list[tuple[Stamp, float]]:
        return [(stamp, 1.0) for held in self._held.values() for stamp in held]

    def _usable(self) -> list[tuple[Stamp, float]]:
        """The partner's letter, and those that came late, with their shares of the mean.

        This island counts as 1, its partner too, and a late letter as 1 / (1 + rounds of age).
        """
        found: list[tuple[Stamp, float]] = []
        for peer in self._held:
            stamp = self._from(peer)
            if stamp is None:
                continue
            if peer == self._partner:
                found.insert(0, (stamp, 1.0))
            elif (stamp.round, stamp.exchange) <= (self.round, self.exchange):
                found.append((stamp, 1 / (1 + max(0, self.round - stamp.round))))
        whole = 1 + sum(weight for _, weight in found)
        return [(stamp, weight / whole) for stamp, weight in found]

    def _note(self, now: float, late: int, mixed: bool) -> None:
        peer = self._partner
        if self.habits.one_way:
            outcome = "sent"
        elif peer is None:
            outcome = "alone"
        else:
            outcome = "mixed" if mixed else "lost" if peer in self._lost else "missed"
        self.met.append(Met(self.round, self.exchange, peer, outcome, now - self._since, late))
