"""Whether a trainer hangs: it has something to do, and for very long nothing comes of it. Sans-IO.

Of several ranks the others notice one that hangs, in a collective call that does not end. Nobody
notices the only rank, or rank 0 where the others wait for it outside of such a call. What is slow
must not be taken for what hangs: ranks that start again lose what they have learnt since the last
merge. So nothing is expected of a trainer that rests, waits for a round or for data, or has yet to
take its first step, which may compile; and it has far longer than it ever took.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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
EVALUATION = 6.0  # times as long as that for the first evaluation, which nobody has timed

Kind = Literal["begin", "apply", "evaluate", "shift", "checkpoint"]


@dataclass
class Silence:
    """For how long rank 0 has been silent with something to do. Of one life of the ranks."""

    seconds: float = 0.0
    _longest: float = 0.0  # of the silences that ended
    _stepped: bool = False
    _evaluated: bool = False  # since it began
    _awaits_data: bool = False
    _target: int = 0  # inner steps; 0: it rests
    _out: set[int] = field(default_factory=set)  # fragments whose snapshots are not answered
    _asked: set[tuple[Kind, int]] = field(default_factory=set)  # and the fragment

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
        self._longest, self.seconds = max(self._longest, self.seconds), 0.0
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
        works = bool(self._asked) or (self._target > 0 and not self._out)
        self.seconds = self.seconds + seconds if works and not self._awaits_data else 0.0
        limit = max(SILENT_S, TIMES * self._longest)
        if not self._evaluated and any(kind == "evaluate" for kind, _ in self._asked):
            limit *= EVALUATION
        return self._stepped and self.seconds > limit

    def _ask(self, kind: Kind, fragment: int = 0) -> None:
        self._asked.add((kind, fragment))

    def _answered(self, kind: Kind, fragment: int = 0) -> None:
        self._asked.discard((kind, fragment))
