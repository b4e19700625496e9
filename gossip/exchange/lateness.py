"""When to stop waiting: an owner for a contributor, everybody else for an owner.

Both are judged by what has moved, beside what the others have moved meanwhile, and by the seconds
that the bytes need on the links as they were announced (``expected``). Whoever keeps to the speed
that it has announced is never late: nothing is held against a transfer that moves before
``expected`` seconds have passed, nor after them while it will end within as many again. Whoever
trickles is: what counts is when a transfer would end at its pace, not that it moves.

Announced speeds may be wrong, and before the first round they are a guess. So where several are
waited for, and even the fastest of them need longer than ``expected``, that longer time takes its
place: on links that are all slower than thought nobody is late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import inf

from gossip.plans.estimating import step_s
from protocols.errors import Late
from protocols.identity import PeerId

SLACK = 1.0  # times the expected seconds: a slice may be in this much later than half of the others


@dataclass
class TransferPace:
    """How fast one transfer has moved, of late (``window_s``) and all in all."""

    started: float
    window_s: float
    _seen: deque[tuple[float, int]] = field(default_factory=deque)  # when, and bytes by then

    def note(self, now: float, count: int) -> None:
        """``count`` bytes are here now."""
        seen = self._seen
        if not seen or seen[-1][1] != count:
            seen.append((now, count))
        while len(seen) > 2 and seen[1][0] <= now - self.window_s:
            seen.popleft()

    @property
    def since(self) -> float:
        """When it moved last; when it was first looked at, if it never has."""
        return self._seen[-1][0]

    @property
    def count(self) -> int:
        """Bytes that are here."""
        return self._seen[-1][1]

    def end(self, now: float, size: int) -> float:
        """When all of ``size`` bytes would be here at this pace; never, where nothing is yet."""
        (before, had), count = self._seen[0], self.count
        average = count / max(now - self.started, 1e-9)
        rate = max(average, (count - had) / max(now - before, 1e-9))
        return now + (size - count) / rate if rate else inf


def usual_s(started: float, ends: Sequence[float], expected_s: float) -> float:
    """Seconds that transfers take which end at ``ends`` (inf: never), by the fastest quarter.

    At least ``expected_s``; and just that, where so few move or there is but one.
    """
    if len(ends) < 2:
        return expected_s
    end = sorted(ends)[(len(ends) - 1) // 4]
    return max(expected_s, end - started) if end < inf else expected_s


def relay_patience_s(patience_s: float, expected_s: float) -> float:
    """How long a relay may stand still: it may itself be waiting for a member that trickles.

    Such a member is found out once the expected seconds are over, and a silent one sooner; a relay
    of whom nothing comes is late after twice this time.
    """
    return 1.25 * patience_s + expected_s / 2


def passing_patience_s(patience_s: float, expected_s: float) -> float:
    """The patience of members with relays that pass on what owners may be waiting for."""
    return 2 * patience_s + expected_s


def owner_patience_s(patience_s: float, expected_s: float) -> float:
    """The patience of members with owners that have to wait for relays.

    And after that for members that a relay has given up: maybe only their link to it failed.
    """
    return 3 * patience_s + expected_s


def merged_patience_s(patience_s: float, expected_s: float) -> float:
    """How long a merged part may stand still on its way: its owner may wait for others."""
    return 2 * patience_s + 3 * expected_s


@dataclass
class Lateness:
    """Which contributors an owner need not wait for, ``size`` bytes being expected of each.

    Late is one that has begun and stood still for ``patience_s``, one of whom nothing has come in
    twice that time while others' slices move, one that at its pace would be in more than
    ``expected_s`` and ``patience_s`` after half of the others, and all after three times
    ``expected_s`` and ``patience_s``. Where even the fastest need longer than ``expected_s``,
    what they need counts instead (:func:`usual_s`). A ``doubtful`` one is late as soon as half of
    the others are in, half of ``patience_s`` is over, and nothing of it has come.
    """

    started: float
    patience_s: float
    expected_s: float
    size: int
    doubtful: Set[PeerId] = frozenset()
    what: str = "its slice"  # that is waited for, in words
    _paces: dict[PeerId, TransferPace] = field(default_factory=dict)
    _ends: dict[PeerId, float] = field(default_factory=dict)  # when each whole slice was in
    _half: float | None = None  # when half of the contributors were in
    _usual_s: float = field(init=False)  # by what has moved

    def __post_init__(self) -> None:
        self._usual_s = self.expected_s

    @property
    def deadline(self) -> float:
        """All who are not in by then are late."""
        return self.started + self.patience_s + 3 * self._usual_s

    def late(
        self, now: float, waiting: Set[PeerId], arrived: Mapping[PeerId, int], whole: int
    ) -> dict[PeerId, Late]:
        """Who of ``waiting`` is late, and why; to be asked several times in ``patience_s``.

        ``arrived`` are the bytes of each so far, ``whole`` is the number of slices that are in.
        """
        self._note(now, waiting, arrived)
        if self._half is None and whole and whole >= len(waiting):
            self._half = now
        found = {}
        for peer in waiting:
            why = self._why(now, peer, any(arrived.get(p) for p in arrived if p != peer))
            if why:
                found[peer] = Late(f"{self.what} {why}")
        return found

    def _note(self, now: float, waiting: Set[PeerId], arrived: Mapping[PeerId, int]) -> None:
        for peer in waiting:
            pace = self._paces.setdefault(peer, TransferPace(self.started, self.patience_s))
            pace.note(now, arrived.get(peer, 0))
        for peer in self._paces.keys() - waiting:
            del self._paces[peer]
            if arrived.get(peer, 0) >= self.size:  # else it was given up on
                self._ends[peer] = now
        going = (pace.end(now, self.size) for pace in self._paces.values())
        self._usual_s = usual_s(self.started, [*self._ends.values(), *going], self.expected_s)

    def _why(self, now: float, peer: PeerId, others_move: bool) -> str:
        pace = self._paces[peer]
        if now >= self.deadline:
            return "came too late"
        if pace.count and now >= pace.since + self.patience_s:
            return "stands still"
        waited = now - self.started
        doubted = peer in self.doubtful and self._half is not None and waited >= self.patience_s / 2
        if not pace.count and (doubted or (others_move and waited >= 2 * self.patience_s)):
            return "does not come"
        over = self.started + self.expected_s
        if self._half is None or now < over or not pace.count:
            return ""
        slack = SLACK * self._usual_s
        allowed = max(self._half, over) + slack + self.patience_s
        return "would come too late" if pace.end(now, self.size) > allowed else ""


@dataclass
class Overdue:
    """Whether to give up waiting for an owner's part of ``elements`` elements, ``size`` bytes.

    An owner may be waiting for a contributor, so a part that does not move says nothing as long
    as the other owners wait as well: it is overdue when it has stood still for one and a half
    times ``patience_s`` and two chunks' time, another part is here, and ``expected_s`` is over.
    Where no other part comes either an owner has until all its contributors are late.

    A part that moves, but would not be here within ``expected_s`` more, is overdue as well: once
    its owner has had ``patience_s`` to catch up, since it may have waited for somebody that it has
    given up on just now. Where even the fastest parts need longer than ``expected_s``, what they
    need counts instead (:func:`usual_s`).
    """

    started: float
    patience_s: float
    expected_s: float
    elements: int
    size: int
    _pace: TransferPace = field(init=False)
    _other: float | None = None  # when another part was here

    def __post_init__(self) -> None:
        self._pace = TransferPace(self.started, self.patience_s)
        self._pace.note(self.started, 0)

    def end(self, now: float) -> float:
        """When all of it would be here at its pace; never, where nothing has come."""
        return self._pace.end(now, self.size)

    @property
    def end_when_it_moved(self) -> float:
        """The same, as last computed while it moved: standing still does not postpone it."""
        return self._pace.end(self._pace.since, self.size)

    def left(self, now: float, moved: int, others: bool, usual: float = 0.0) -> float:
        """Seconds until it is overdue, if nothing changes; to be asked often in ``patience_s``.

        ``moved`` are the bytes of it that came, ``others`` whether any other part is here, and
        ``usual`` seconds what parts take at their pace, where that is known.
        """
        self._pace.note(now, moved)
        usual = max(usual, self.expected_s)
        if others and self._other is None:
            self._other = now
        few = 2 * step_s(usual, self.elements)
        still = self._pace.since + 1.5 * self.patience_s + few
        at_last = self.started + 2.5 * self.patience_s + 4 * usual
        excused = judged = at_last
        if self._other is not None:
            over = max(self._other, self.started + self.expected_s)
            excused = min(at_last, over + self.patience_s / 2 + few)
            judged = min(at_last, excused + self.patience_s)
        trickles = moved > 0 and self.end(max(now, judged)) > judged + SLACK * usual
        return min(max(still, excused), judged if trickles else inf) - now
