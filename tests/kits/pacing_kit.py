"""A simulated link, and a sender on it that finds out what it carries."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from protocols.lanes.pacing import Pacer

STEP_S = 0.005
QUEUE_S = 0.05  # of the link's speed, then packets are dropped


@dataclass
class Wire:
    """A link with a queue, a sender that always has something to send, and acknowledgements."""

    speed: Callable[[float], float]  # bytes a second, by the time
    jitter: float = 0.0  # seconds by which acknowledgements are late at most
    spare: float = 0.0  # bytes that pass at any speed after a pause: a token bucket
    pacer: Pacer = field(default_factory=Pacer)
    now: float = 0.0
    queued: float = 0.0
    arrived: float = 0.0
    queues: list[float] = field(default_factory=list)  # seconds of the link, from step to step
    tokens: float = 0.0
    alone: str = ""  # all is for this one of several peers
    tells: bool = False  # the system tells what is under way
    others: Callable[[float], float] = lambda now: 0.0  # seconds behind what others send
    away: float = 0.0  # seconds of the shortest round trip, which the system tells
    given: float = 0.0
    _late: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=200))
    _random: random.Random = field(default_factory=lambda: random.Random(1))

    def play(self, seconds: float, *, wanting: bool = True) -> float:
        """So much more time; returns the share of the link that was used."""
        before, could, end = self.arrived, 0.0, self.now + seconds
        while self.now < end - STEP_S / 2:
            speed = self.speed(self.now)
            could += speed * STEP_S
            offered = min(self.pacer.rate, 4 * speed) * STEP_S if wanting else 0.0
            taken = min(offered, max(QUEUE_S * speed - self.queued, 0.0))
            self.queued += taken
            self.given += taken
            gone = min(self.queued, speed * STEP_S)
            self.queued -= gone
            self.arrived += gone
            self.now += STEP_S
            self._late.append((self.now, self.arrived))
            self.queues.append(self.queued / speed)
            if round(self.now / STEP_S) % 5 == 0:
                late = self._random.uniform(0, self.jitter) + self.others(self.now)
                until = self.now - self.away - late
                seen = [count for when, count in self._late if when <= until]
                known = int(seen[-1]) if seen else 0
                way = int(self.given) - known
                stands = way if self.tells else None
                self.pacer.note(
                    self.now,
                    known,
                    wanting,
                    way,
                    alone=self.alone,
                    stands=stands,
                    round_trip=self.away,
                )
        return (self.arrived - before) / could

    def body(self, count: float, pause: float = 1.0, source: float = inf) -> float:
        """A body of ``count`` bytes, made at ``source`` bytes a second; seconds that it took."""
        began, left = self.now, count
        while left > 0 or self.queued > 1e-6:
            offered = min(left, min(self.pacer.rate, source) * STEP_S)
            left -= offered
            self.queued += offered
            gone = min(self.queued, self.speed(self.now) * STEP_S + self.tokens)
            self.tokens = min(self.tokens + self.speed(self.now) * STEP_S - gone, self.spare)
            self.queued -= gone
            self.arrived += gone
            self.now += STEP_S
            unsent = self.queued > QUEUE_S * self.speed(self.now)
            wanting = unsent or (left > 0 and source == inf)
            self.pacer.note(self.now, int(self.arrived), wanting, math.ceil(self.queued))
        self.pacer.note(self.now, int(self.arrived), False, 0)
        took = self.now - began
        self.now += pause
        self.tokens = min(self.tokens + pause * self.speed(self.now), self.spare)
        return took
