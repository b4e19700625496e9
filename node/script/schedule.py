"""A learning rate's schedule that a library steps, once for each inner step of this island.

An island that is behind moves its schedule on to where the swarm is, so that all anneal together.
"""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

from torch.optim import lr_scheduler

logger = logging.getLogger(__name__)
COUNTED = "torch.optim.lr_scheduler"  # its schedulers follow from how often they were stepped


class Schedule:
    """One scheduler, and where it is in the run; never touched where the island is not behind.

    It is stepped as often as the island would have done if it had taken the steps that the swarm
    is ahead: any of torch's schedulers comes to the right place by that, but ReduceLROnPlateau,
    which goes by what it is told. One that cannot be moved is told of, and left alone.
    """

    def __init__(
        self,
        scheduler: Any,
        length: float,
        position: int,
        *,
        anew: bool = False,
        each_step: bool = True,
    ) -> None:
        """Go to ``position`` (``island.position``) in a schedule of ``length`` steps.

        ``length`` is infinite or not positive where the loop does not know it, as libraries say of
        a stream: then training ends with the loop, or where the scheduler has an end of its own.
        ``anew``: it begins at its start wherever the swarm is. ``each_step``: it is stepped once
        after each inner step.
        """
        if not 0 < length < math.inf:
            length = _end(scheduler)
        self._scheduler, self._length, self._position = scheduler, length, position
        self._told = False
        here = getattr(scheduler, "last_epoch", None)
        known = type(scheduler).__module__ == COUNTED and isinstance(here, int)
        told = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        self._moves = known and each_step and not told
        stands = here if isinstance(here, int) else 0
        self._start = position - stands if anew or position >= length else 0
        if anew or stands >= position:
            return
        if self._moves and self._start:
            logger.warning(
                "the swarm is %d inner steps into the run, and this script's learning rate has a "
                "schedule of %.0f: it begins at its start, and does not anneal with the others; "
                "give it the length (max_steps) that they have",
                position,
                length,
            )
            return
        self._move(position - stands)

    def follow(self, position: int) -> bool:
        """After an inner step and the schedule's own: to where the swarm is; whether more is left.

        An island that came late ends with the others, where the schedule does.
        """
        ahead, self._position = position - self._position - 1, position
        self._move(ahead)
        return not self._moves or position - self._start < self._length

    def _move(self, steps: int) -> None:
        if steps <= 0:
            return
        if not self._moves:
            if not self._told:
                logger.warning(
                    "this island is %d inner steps behind the swarm, and its learning rate is not "
                    "moved on: %s does not go by the number of inner steps alone",
                    steps,
                    type(self._scheduler).__name__,
                )
            self._told = True
            return
        with warnings.catch_warnings():  # of steps before the optimizer's first, which are meant
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(int(min(steps, self._length - self._scheduler.last_epoch))):
                self._scheduler.step()


def _end(scheduler: Any) -> float:
    """The steps that a scheduler of torch can take: one that is at its end raises at the next."""
    if isinstance(scheduler, lr_scheduler.OneCycleLR):
        return scheduler.total_steps
    if isinstance(scheduler, lr_scheduler.SequentialLR):  # which says nothing of its parts
        return float(scheduler._milestones[-1] + _end(scheduler._schedulers[-1]))
    return math.inf
