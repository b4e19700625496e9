"""What a trainer writes between its steps: its share of a checkpoint, its moments for newcomers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from node.trainer.channel import Donated, Report, Saved, Staged
from node.trainer.moments import Donation, MomentLayout, donate
from node.trainer.optim import REENTRY_STEPS
from node.trainer.optimizer_state import optimizer_steps
from node.trainer.resume import Writing, save
from node.trainer.trainer_state import TrainerState
from node.trainer.weights import Weights
from protocols.errors import is_full


class Files:
    """At most one checkpoint, and one copy of moments, is on its way to the disk.

    ``report`` tells the daemon.

    Every rank has one, and must call :meth:`save` and :meth:`donate` when the others do.
    """

    def __init__(
        self,
        weights: Weights,
        optimizer: torch.optim.Optimizer,
        report: Callable[[Report], None],
    ) -> None:
        self.weights, self.optimizer, self.report = weights, optimizer, report
        self.one_disk = True  # every rank sees the same files
        self.moment_layout: MomentLayout | None = None  # None: what is kept is not for others
        self._writing: Writing | None = None
        self._written_to = ""
        self._donation: Donation | None = None  # on rank 0

    @property
    def writing(self) -> bool:
        """Whether something is on its way to the disk."""
        return self._writing is not None or self._donation is not None

    def save(self, directory: str, state: TrainerState) -> None:
        """Copy θ and moments, and begin to write them: training goes on meanwhile."""
        self._end_writing()
        failure: OSError | None = None
        try:
            self._writing = save(
                Path(directory), self.weights, self.optimizer, state, one_disk=self.one_disk
            )
        except OSError as error:
            failure = error
        self._written_to = directory
        self.report(Staged(directory))
        if self._writing is None:
            self._tell(failure)

    def look_after(self) -> None:
        """Tell the daemon of what is complete; without waiting for anything."""
        if self._writing is not None and self._writing.done:
            self._end_writing()
        if self._donation is not None and self._donation.done:
            donation, self._donation = self._donation, None
            problem = donation.finish()
            if not donation.given_up:
                self.report(Donated(str(donation.path), donation.steps, problem[:2000]))

    def finish(self) -> None:
        """Wait for a checkpoint that is on its way, and give up moments that are."""
        self._end_donation()
        self._end_writing()

    def donate(self, path: str, *, warm: bool) -> None:
        """Copy the moments for a newcomer, if they are ``warm`` and have seen enough steps.

        And begin to write them: training goes on meanwhile. An earlier copy that is on its way
        is given up: the daemon has, too. So it has this one where the file is gone.
        """
        self._end_donation()
        waited_for = Path(path).exists()
        steps = optimizer_steps(self.optimizer)
        layout = self.moment_layout
        worth = waited_for and layout is not None and steps >= REENTRY_STEPS and warm
        if self.weights.ranks.broadcast(b"1" if worth else b"0") != b"1":
            if waited_for:
                self.report(Donated(path, 0, ""))
            return
        assert self.moment_layout is not None
        self._donation = donate(Path(path), steps, self.moment_layout, self.weights, self.optimizer)

    def _end_writing(self) -> None:
        """Wait for the checkpoint; a disk that is full or broken is told of."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._tell(writing.finish())

    def _end_donation(self) -> None:
        if self._donation is not None:
            donation, self._donation = self._donation, None
            donation.give_up()

    def _tell(self, failure: OSError | None) -> None:
        problem = "" if failure is None else str(failure) or type(failure).__name__
        self.report(Saved(self._written_to, problem[:2000], is_full(failure)))
