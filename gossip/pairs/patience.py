"""How long an island waits for a partner in gossip, and whom it passes over. Sans-IO.

An answer is waited for a tenth of a usual round at most, or less where answers usually come sooner.
What is on its way is waited for while it moves, up to :attr:`PartnerPatience.longest_s`; a partner
that takes longer is put off, each time for twice as many rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from gossip.interval import Interval
from gossip.membership.trips import RoundTrip
from protocols.identity import PeerId

LEAST_ANSWER_S = 0.25
FIRST_ANSWER_S = 1.0  # before anything was measured
SHARE = 0.1  # of a round that a partner is waited for at most
# an exchange takes at most this many usual rounds, or this many seconds if that is longer: a peer
# whose letter moves byte by byte holds nobody up for longer
LONGEST_ROUNDS, LONGEST_S = 2.0, 60.0
ROUNDS_KNOWN = 9  # of which the median is usual
MOST_DOUBLINGS = 5  # of the rounds in which a partner that took longer is not chosen


@dataclass
class PartnerPatience:
    """Of one island, by how long its rounds and its partners' answers have taken."""

    _began: float | None = None  # when the newest round did
    _interval: Interval = field(default_factory=Interval)  # from one to the next
    _gaps: deque[float] = field(default_factory=partial(deque, maxlen=ROUNDS_KNOWN))
    _trained: float | None = None  # when the first inner steps of this process began, or soon after
    _first_s: float = 0.0  # which they took: what tells of a round before there was a gap
    _usual: RoundTrip | None = None  # seconds until an answer is here, of those waited for
    _slow: dict[PeerId, tuple[int, int]] = field(default_factory=dict)  # how often; until round

    @property
    def cycle_s(self) -> float:
        """Usual seconds from one round to the next; 0: not known yet."""
        return self._interval.usual_s

    @property
    def answer_s(self) -> float:
        """How long a partner is waited for at most."""
        if not self.cycle_s:
            return FIRST_ANSWER_S
        most = max(LEAST_ANSWER_S, SHARE * self.cycle_s)
        if self._usual is None:
            return most
        return min(most, max(LEAST_ANSWER_S, self._usual.longest))

    @property
    def longest_s(self) -> float:
        """How long an exchange takes at most, whatever still moves."""
        usual = median(self._gaps) if self._gaps else self._first_s
        return max(LONGEST_S, LONGEST_ROUNDS * usual)

    def training(self, now: float) -> None:
        """Inner steps are under way."""
        if self._trained is None:
            self._trained = now

    def begun(self, now: float) -> None:
        """The inner steps of a round are done."""
        if self._began is not None:
            gap = now - self._began
            self._interval.add(gap)
            self._gaps.append(gap)
        elif self._trained is not None:
            self._first_s = now - self._trained
        self._began = now

    def answered(self, peer: PeerId, took: float) -> None:
        """The partner that was waited for has answered."""
        if self._usual is None:
            self._usual = RoundTrip.first(took)
        else:
            self._usual.add(took)
        self._slow.pop(peer, None)

    def put_off(self, peer: PeerId, round_: int) -> None:
        """Open no exchange with it for some rounds, and for twice as many the next time."""
        times = self._slow.get(peer, (0, 0))[0] + 1
        self._slow[peer] = (times, round_ + 2 ** min(times, MOST_DOUBLINGS))

    def slow(self, round_: int) -> set[PeerId]:
        """With whom to open no exchange in a round."""
        return {peer for peer, (_, until) in self._slow.items() if round_ < until}

    def keep(self, known: Container[PeerId]) -> None:
        """Forget all but these."""
        self._slow = {peer: slow for peer, slow in self._slow.items() if peer in known}
