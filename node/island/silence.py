"""Whether a trainer hangs: it has something to do, and for very long nothing comes of it. Sans-IO.

Of several ranks the others notice one that hangs, in a collective call that does not end. Nobody
notices the only rank, or rank 0 where the others wait for it outside of such a call. What is slow
must not be taken for what hangs: ranks that start again lose what they have learnt since the last
merge. So nothing is expected of a trainer that rests, or waits for a round or for data, and it has
far longer than it ever took. What nobody has timed, as all up to the first step, which may compile,
has hours. People are told long before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from node.monitor.wording import duration
from node.trainer.channel import (
    Applied,
    Apply,
    Awaited,
    Begin,
    Command,
    InnerSteps,
    Report,
    Save,
    Shift,
    Shifted,
    Snapshot,
    Staged,
    StepDone,
)

SILENT_S = 3600.0  # at least: a machine that swaps, or whose disk is slow, does not hang
TIMES = 20.0  # the longest silence of this life so far
UNTIMED = 6.0  # times as long as that for what nobody has timed: the first step and evaluation
COMPILED = 4.0  # times as long as that, too, where torch compiles first
TOLD = 1 / 6  # of the time for what was timed: then people are told

Kind = Literal["begin", "apply", "evaluate", "shift", "checkpoint"]
DOES: dict[Kind, str] = {  # in words, first what takes longest
    "evaluate": "evaluates",
    "begin": "takes in what it begins with",
    "apply": "takes a round in",
    "shift": "moves by a guess",
    "checkpoint": "copies what a checkpoint is to have",
}


@dataclass(frozen=True)
class Silent:
    """Rank 0 has been silent for long: in a line for people."""

    text: str


@dataclass
class Silence:
    """For how long rank 0 has been silent with something to do. Of one life of the ranks.

    ``wait_s``: for which it waits for a round's outcome, before it goes on without; infinite where
    it does not. ``compiles``: before its first step.
    """

    wait_s: float = math.inf
    compiles: bool = False
    seconds: float = 0.0
    _longest: float = 0.0  # of the silences that ended
    _stepped: bool = False
    _evaluated: bool = False  # since it began
    _awaits_data: bool = False
    _target: int = 0  # inner steps; 0: it rests
    _out: set[int] = field(default_factory=set)  # fragments whose snapshots are not answered
    _asked: set[tuple[Kind, int]] = field(default_factory=set)  # and the fragment
    _builds: bool = True  # its model: it has yet to report anything
    _waits: float = 0.0  # seconds that were a wait for a round's outcome, and no silence
    _told: bool = False  # of this silence

    def sent(self, command: Command) -> None:
        """The daemon has told it so."""
        match command:
            case Begin():
                self._target = command.target_steps
                self._ask("begin")
            case Apply():
                self._target = command.target_steps
                self._ask("evaluate" if command.evaluate else "apply", command.fragment)
            case InnerSteps():
                self._target = command.target_steps
            case Shift():
                self._ask("shift", command.fragment)
            case Save():
                self._ask("checkpoint")

    def came(self, report: Report) -> None:
        """It has reported something."""
        if not self._builds:  # which says nothing of how long a step takes
            self._longest = max(self._longest, self.seconds)
        self._builds = False
        self.seconds, self._waits, self._told = 0.0, 0.0, False
        match report:
            case StepDone():
                self._stepped, self._awaits_data = True, False
            case Awaited():
                self._awaits_data = bool(report.ranks)
            case Snapshot():
                self._out.add(report.fragment)
            case Applied(fragment=None):
                self._answered("begin")
            case Applied(fragment=int(fragment)):
                self._evaluated |= ("evaluate", fragment) in self._asked
                self._answered("evaluate", fragment)
                self._answered("apply", fragment)
                self._out.discard(fragment)
            case Shifted():
                self._answered("shift", report.fragment)
            case Staged():
                self._answered("checkpoint")

    def waited(self, seconds: float) -> bool:
        """Nothing has come for so many more seconds; whether that is too long.

        As whoever looks has waited, not as a clock tells: that goes on in a machine that sleeps.
        """
        if self._out and not self._asked and self._waits < self.wait_s:
            self._waits += seconds
            return False
        works = self._builds or bool(self._asked) or self._target > 0
        self.seconds = self.seconds + seconds if works and not self._awaits_data else 0.0
        return self.seconds > self._limit

    def word(self) -> Silent | None:
        """What people are to be told now: once of each long silence, else nothing."""
        if self._told or self.seconds <= TOLD * self._usual:
            return None
        self._told = True
        return Silent(
            f"the trainer has said nothing for {duration(self.seconds)}: it {self._does}; after "
            f"{duration(self._limit)} it is taken to hang, and started again (E406)"
        )

    @property
    def _usual(self) -> float:
        return max(SILENT_S, TIMES * self._longest)

    @property
    def _limit(self) -> float:
        """Seconds after which it is taken to hang."""
        limit, evaluates = self._usual, any(kind == "evaluate" for kind, _ in self._asked)
        if not self._stepped or (evaluates and not self._evaluated):
            limit *= UNTIMED
        return limit * COMPILED if self.compiles and not self._stepped else limit

    @property
    def _does(self) -> str:
        asked = {kind for kind, _ in self._asked}
        step = f"takes {'an' if self._stepped else 'its first'} inner step"
        does = next((words for kind, words in DOES.items() if kind in asked), step)
        does = "builds its model" if self._builds else does
        return f"{does}, and may compile" if self.compiles and not self._stepped else does

    def _ask(self, kind: Kind, fragment: int = 0) -> None:
        self._asked.add((kind, fragment))

    def _answered(self, kind: Kind, fragment: int = 0) -> None:
        self._asked.discard((kind, fragment))
