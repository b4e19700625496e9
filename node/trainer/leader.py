"""What rank 0 decides for all ranks at a step boundary, from the daemon's commands and the clock.

The decision is a message too, so that the other ranks get it by one broadcast.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from node.trainer.channel import COMMANDS, Command, TrainerEnd
from node.trainer.shared import BEAT_S, SharedVectors
from protocols.wire import Message

if TYPE_CHECKING:
    from node.trainer.progress import Progress

# Rank 0 waits for the daemon only in pieces of this many seconds, far below the time after which
# the other ranks give a collective call up.
LONGEST_WAIT_S = 5.0
# A daemon that does not show for so long that it lives was stopped, or hangs: no round can come.
UNHEARD_S = 10.0
MOST = 3  # rounds' worth of inner steps without a merge: more would be merged as one round's work
WRITING_POLL_S = 0.05  # between its looks at a checkpoint that is being written


class TakeStep(Message, kind=118):
    """What rank 0 decided: all ranks take an inner step."""


class TakeSnapshot(Message, kind=119):
    """What rank 0 decided: all ranks give their part of a fragment of θ for ``sent``."""

    fragment: int = 0


class Idle(Message, kind=120):
    """What rank 0 decided: nothing now; keeps the other ranks from timing out."""


Action = Command | TakeStep | TakeSnapshot | Idle
ACTIONS = (*COMMANDS, TakeStep, TakeSnapshot, Idle)


@dataclass
class Leader:
    """Rank 0's link to the daemon, and what it decides for all ranks.

    ``bounded``: a round's work is one step of an outer optimizer, so none is to have much more than
    a round's inner steps, however long it takes.
    """

    channel: TrainerEnd
    vectors: SharedVectors
    wait_s: float  # for a round's outcome; then inner steps go on
    clock: Callable[[], float] = time.monotonic
    longest_s: float = LONGEST_WAIT_S  # that it waits for the daemon in one go
    bounded: bool = False
    wait_until: float | None = field(default=None, init=False)
    _waited_s: float = field(default=0.0, init=False)
    _beats: int = field(default=0, init=False)  # of the daemon; 0: it shows nothing
    _heard: tuple[float, int] = field(default=(0.0, 0), init=False)  # when and at which inner step

    def decide(self, trainer: Progress) -> Action:
        """What to do at this step boundary: a command first, then a snapshot, then a step."""
        left = self.left_s(trainer)
        trainer.files.look_after()
        longest = WRITING_POLL_S if trainer.files.writing else self.longest_s
        since = self.clock()
        command = self.channel.receive(min(left, longest))
        if left > 0:
            self._waited_s += self.clock() - since
        return self.choose(trainer, command, left)

    def left_s(self, trainer: Progress) -> float:
        """Seconds for which there is nothing to do but to wait for a command."""
        if not trainer.waiting:
            self.wait_until = None
        elif self.wait_until is None:
            self.wait_until = self.clock() + self.wait_s
        if not trainer.begun or trainer.resting:
            return LONGEST_WAIT_S
        if self._unheard(trainer) or (self.bounded and self._ample(trainer)):
            return BEAT_S
        return 0.0 if self.wait_until is None else max(0.0, self.wait_until - self.clock())

    def _unheard(self, trainer: Progress) -> bool:
        """Whether the daemon stands still, and enough was trained without it."""
        beats, now = self.vectors.beats, self.clock()
        if beats != self._beats or not beats:
            self._beats, self._heard = beats, (now, trainer.step)
        since, step = self._heard
        return now - since > UNHEARD_S and trainer.step - step > MOST * trainer.target_steps

    def _ample(self, trainer: Progress) -> bool:
        """Whether enough was trained since a snapshot that is not answered yet."""
        most = MOST * trainer.target_steps
        return any(
            fragment.outstanding is not None and fragment.unsent.steps >= most
            for fragment in trainer.fragments
        )

    def choose(self, trainer: Progress, command: Command | None, left: float) -> Action:
        """What to do after the ``command`` that came, if one did in the ``left`` seconds."""
        if command is not None:
            return command
        if left > 0:
            return Idle()
        # A daemon at work on the vectors is about to send Apply, or an earlier life's snapshot is
        # still to be sent: no snapshot now, train on.
        for fragment in trainer.due:
            if self.vectors.try_snapshot(fragment):
                return TakeSnapshot(fragment)
        return TakeStep()

    def take_waited_s(self) -> float:
        """Seconds in which there was nothing to do, since this was last asked."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited
