"""Where an island stands with each fragment between the rounds, and whose turn it is. Sans-IO.

A model that is merged whole is one fragment. With more of them (streaming, :mod:`diloco.fragments`)
the turns are spread over the H inner steps of a cycle: fragments 1, 2, … and at last 0, with whose
round the cycle ends. Cycles begin at all islands at once, when fragment 0's merge is applied, so
all send the same fragment at about the same time. A fragment that missed a turn has the next one;
what its island learnt meanwhile goes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco.fragments import Schedule
from node.trainer.trainer_state import FragmentState, StepTotals

OVERDUE = 2  # rounds' worth of steps that have not been sent


@dataclass
class FragmentProgress:
    """One fragment's part of what an island knows of its place in the run."""

    names: frozenset[str]  # its parameters
    round: int = 0
    # what this island has done since its last contribution to it, oldest first
    carried: StepTotals = field(default_factory=StepTotals)  # was in a snapshot that was not merged
    outstanding: StepTotals | None = None  # lies in `sent`, not answered yet
    unsent: StepTotals = field(default_factory=StepTotals)  # since the last snapshot
    contributed: bool = False  # since training began

    def begin(self, state: FragmentState) -> None:
        """Stand where a checkpoint was made, or at the beginning of a round."""
        self.round, self.carried, self.unsent = state.round, state.carried, state.unsent
        self.outstanding, self.contributed = None, False

    def send(self) -> StepTotals:
        """A snapshot is taken: what it holds."""
        work = self.carried + self.unsent
        self.carried, self.outstanding, self.unsent = StepTotals(), work, StepTotals()
        return work

    def answer(self, round_: int, *, contributed: bool, reset: bool) -> int:
        """A round is committed; ``contributed``: with what was sent. Returns inner steps dropped.

        With ``reset`` those are all that no merge has had.
        """
        dropped = 0
        if reset:
            dropped = (self.carried + (self.outstanding or StepTotals()) + self.unsent).steps
            self.carried, self.unsent = StepTotals(), StepTotals()
        elif not contributed and self.outstanding is not None:
            self.carried = self.outstanding
        self.outstanding, self.round = None, round_
        self.contributed |= contributed
        return dropped

    def state(self) -> FragmentState:
        """For a checkpoint: a snapshot that is not answered yet counts as not merged."""
        carried = self.carried + (self.outstanding or StepTotals())
        return FragmentState(round=self.round, carried=carried, unsent=self.unsent)


def offset(fragment: int, fragments: int, target: int) -> int:
    """The inner step of a cycle of ``target`` after which a fragment has its turn."""
    return Schedule(max(target, fragments), fragments).offset((fragment - 1) % fragments)


def due(fragments: Sequence[FragmentProgress], cycle_step: int, target: int) -> list[int]:
    """Fragments of which a snapshot is to be taken, after ``cycle_step`` inner steps of the cycle.

    None may be late for ever: with two rounds' work in hand a fragment is due as well, so that
    fragments whose rounds go on are not held up by one whose rounds do not.
    """
    found = []
    for fragment, progress in enumerate(fragments):
        if progress.outstanding is not None:
            continue
        turn = offset(fragment, len(fragments), target)
        worth = fragment == 0 or progress.unsent.steps >= min(turn, target // 2)
        reached = cycle_step >= turn and progress.round <= fragments[0].round and worth
        if reached or progress.unsent.steps >= OVERDUE * target:
            found.append(fragment)
    return found


def due_at_will(fragments: Sequence[FragmentProgress], target: int) -> list[int]:
    """The same where there is no common beat: a fragment is due with ``target`` steps in hand.

    What was sent and not merged counts, so that it goes with the next round there is. The first
    time fragments have their turns one after the other, and so they keep apart.
    """
    return [
        fragment
        for fragment, progress in enumerate(fragments)
        if progress.outstanding is None
        and progress.carried.steps + progress.unsent.steps
        >= (target if progress.contributed else offset(fragment, len(fragments), target))
    ]
