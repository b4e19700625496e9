"""How fast an island trains and merges, and how many inner steps it takes to arrive with others."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossip.plans.estimating import fastest_of
from node.trainer.channel import StepDone

SAME_SPEED = 0.9  # islands this close to the fastest take as many inner steps as it does
MEMORY = 20.0  # inner steps after which what was measured counts a third
OUTAGE = 20.0  # times the mean: a step that took longer tells of an outage, not of a speed


def inner_steps(target: int, mine: float, speeds: list[float]) -> int:
    """H of this island, so that all arrive together: ⌊H · v / v_max⌋ (2401.09135, section 5).

    ``mine`` and ``speeds`` are inner steps a second, zero while unknown.
    """
    fastest = fastest_of([mine, *speeds])
    if mine <= 0 or fastest <= 0 or mine >= SAME_SPEED * fastest:
        return target
    return max(1, math.floor(target * mine / fastest))


@dataclass
class Usual:
    """What a duration usually is, and how much it varies (as round trips in RFC 6298)."""

    mean: float = 0.0
    deviation: float = 0.0

    def add(self, seconds: float) -> None:
        """Take in one more duration."""
        if not self.mean:
            self.mean = seconds
            return
        self.deviation += 0.25 * (abs(seconds - self.mean) - self.deviation)
        self.mean += 0.25 * (seconds - self.mean)

    @property
    def most(self) -> float:
        """What it seldom exceeds."""
        return self.mean + 2 * self.deviation


@dataclass
class Pace:
    """How fast this island trains, and how it spends its time.

    Speeds are steps over seconds and not a mean of single steps' speeds: on a machine that is
    taken away now and then most steps are quick, and the few that are not are where the time goes.
    """

    steps_per_second: float = 0.0
    tokens_per_second: float = 0.0
    loss: float = 0.0
    step: int = 0
    position: int = 0  # in the learning rate's schedule
    tokens: int = 0
    busy_s: float = 0.0  # in inner steps, since the last round
    last_s: float = 0.0  # in the newest one
    halved: int = 0  # times the micro-batch was halved, since the ranks' start
    _timed: int = 0
    _steps: float = 0.0  # these three of late
    _tokens: float = 0.0
    _seconds: float = 0.0

    @property
    def settled(self) -> bool:
        """Whether the speed is not that of a first step, which compiled."""
        return self._timed > 1

    @property
    def step_s(self) -> float:
        """Seconds that an inner step may well take: as usual, or as the newest one."""
        usual = 1 / self.steps_per_second if self.steps_per_second else 0.0
        return max(self.last_s, usual)

    @property
    def said(self) -> dict[str, float]:
        """What other islands are told of it."""
        return {
            "steps_per_second": self.steps_per_second,
            "tokens_per_second": self.tokens_per_second,
            "loss": self.loss,
            "total_tokens": self.tokens,
            "position": self.position,
        }

    def take_busy(self) -> float:
        """Seconds in inner steps since the last time that they were asked for."""
        busy, self.busy_s = self.busy_s, 0.0
        return busy

    def add(self, done: StepDone) -> None:
        """Count an inner step."""
        self.step, self.tokens = done.step, self.tokens + done.tokens
        self.position = done.position
        self.busy_s += done.seconds
        self.last_s = done.seconds
        self.halved = done.halved
        if done.loss is not None:
            self.loss = done.loss
        if done.seconds > 0:
            self._time(done.seconds, done.tokens)

    def _time(self, seconds: float, tokens: int) -> None:
        self._timed += 1
        if self._timed == 2:  # the first step compiled: it counted only until now
            self._steps = self._tokens = self._seconds = 0.0
        if self._steps:
            seconds = min(seconds, OUTAGE * self._seconds / self._steps)
        kept = 1 - 1 / MEMORY
        self._steps = kept * self._steps + 1
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + seconds
        self.steps_per_second = self._steps / self._seconds
        self.tokens_per_second = self._tokens / self._seconds
