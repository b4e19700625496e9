"""What a node's process has seen so far: of its own training, and of the rounds. From events."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import Any

from node.monitor.alarms import RISEN_TIMES
from node.monitor.event_log import KEPT_ROUNDS
from node.monitor.events import (
    ClockPut,
    DataAwaited,
    DataCame,
    Problem,
    Record,
    RoundDone,
    RoundFailed,
    Step,
    Validation,
)
from node.monitor.plain import table
from protocols.bounds import MAX_FRAGMENTS

TOLD_ISLANDS = 16  # newest rounds that are told with each island's figures: there may be hundreds
KEPT_STEPS = 1024


class Training:
    """The inner steps of this island."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.steps: deque[tuple[int, float | None]] = deque(maxlen=KEPT_STEPS)  # step, loss
        self.began: float | None = None  # when it took its first inner step
        self.tokens = 0  # trained since the start
        self.lost_steps = 0  # inner steps in a row that were not finite
        self.awaited: DataAwaited | None = None  # data that the trainer waits for
        self.out_of_memory = 0  # times

    def take(self, record: Record) -> None:
        """Take one event in, whatever it is of."""
        match record.event:
            case Step() as step:
                self.step = step
                self.began = record.time if self.began is None else self.began
                self.steps.append((step.step, step.loss))
                self.lost_steps = 0 if step.finite else self.lost_steps + 1
                self.tokens += step.tokens
                self.awaited = None
            case DataAwaited() as awaited:
                self.awaited = awaited
            case DataCame():
                self.awaited = None
            case Problem(code="E401"):
                self.out_of_memory += 1
            case ClockPut(seconds=seconds) if self.began is not None:
                self.began += seconds
            case _:
                pass

    @property
    def step_s(self) -> float:
        """Seconds of the newest inner step; 0 before the first one."""
        return self.step.seconds if self.step is not None else 0.0


class Rounds:
    """The rounds that this node has come through."""

    def __init__(self) -> None:
        self.newest: deque[tuple[float, RoundDone]] = deque(maxlen=KEPT_ROUNDS)  # with their time
        self.fragments: dict[int, tuple[float, RoundDone]] = {}  # the newest round of each
        self.outcomes: Counter[str] = Counter()
        self.phase_seconds: dict[str, float] = {}
        self.sent_bytes = 0
        self.received_bytes = 0
        self.raw_bytes = 0
        self.validation_loss: float | None = None  # the newest: not every round has one
        self.validated: deque[float] = deque(maxlen=RISEN_TIMES)  # the newest of rounds
        self.lowest: tuple[int, float] | None = None  # validation loss, and in which round

    def take(self, record: Record) -> None:
        """Take one event in, whatever it is of."""
        match record.event:
            case RoundDone() as done:
                self._add(record.time, done)
            case RoundFailed():
                self.outcomes["failed"] += 1
            case Validation(validation_loss=loss):
                self.validation_loss = loss
            case ClockPut(seconds=seconds):
                later = [(when + seconds, done) for when, done in self.newest]
                self.newest = deque(later, self.newest.maxlen)
                for fragment, (when, done) in self.fragments.items():
                    self.fragments[fragment] = (when + seconds, done)
            case _:
                pass

    def _add(self, when: float, done: RoundDone) -> None:
        self.newest.append((when, done))
        if done.fragment < MAX_FRAGMENTS:
            self.fragments[done.fragment] = (when, done)
        if (loss := done.validation_loss) is not None:
            self.validation_loss = loss
            self.validated.append(loss)
            self.remember((done.round, loss))
        self.outcomes[done.outcome] += 1
        self.sent_bytes += done.sent_bytes
        self.received_bytes += done.received_bytes
        self.raw_bytes += done.raw_bytes
        for phase, seconds in done.phases.items():
            self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + seconds

    def remember(self, lowest: tuple[int, float] | None) -> None:
        """A round and its validation loss, maybe the lowest one; also one of before a restart."""
        if lowest is not None and (self.lowest is None or lowest[1] < self.lowest[1]):
            self.lowest = lowest

    def last_whole(self) -> tuple[float, RoundDone] | None:
        """The newest round and its time; with fragments, that of fragment 0, which tells of all."""
        whole = (one for one in reversed(self.newest) if not one[1].fragment)
        return next(whole, self.newest[-1] if self.newest else None)

    def plain(self, limit: int = KEPT_ROUNDS) -> list[dict[str, Any]]:
        """The newest ones as JSON values, oldest first, each with its ``time``.

        Those before the last :data:`TOLD_ISLANDS` are without what each island did.
        """
        chosen = list(self.newest)[-limit:]
        older = max(0, len(chosen) - TOLD_ISLANDS)
        chosen[:older] = [(when, replace(done, islands={})) for when, done in chosen[:older]]
        return [table(done) | {"time": when} for when, done in chosen]
