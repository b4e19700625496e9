"""Lightning's ``Trainer`` in a swarm, by a callback.

``Trainer(..., callbacks=[SwarmCallback(peers=[...], tokens_per_step=...)])``
"""

from __future__ import annotations

from typing import Any

import lightning
import torch

from node.errors import operator_error
from node.script.joining import join
from node.script.schedule import Schedule
from node.script.session import Joined


class SwarmCallback(lightning.Callback):
    """Joins when training begins, counts optimizer steps, leaves when it ends.

    ``tokens_per_step`` are those of one optimizer step of the whole island. All else is passed to
    :func:`node.join`. A batch is one inner step, whichever of the module's optimizers it has
    moved. Training ends when the run does.

    The learning rate of an island that is behind goes to where the swarm is (``island.position``)
    by each scheduler of ``"interval": "step"``, and training ends at the end of the schedule
    (``max_steps``, or the epochs). Of data without a length and ``max_steps`` that is not known:
    then training ends where the loop does. Where fit() is called again, schedules begin anew.
    """

    def __init__(self, *, tokens_per_step: int, **joining: Any) -> None:
        """Raises OperatorError E204 where a step is of no tokens."""
        if tokens_per_step < 1:
            raise operator_error(
                "E204",
                f"tokens_per_step={tokens_per_step} is not a number of tokens",
                why="the swarm weighs islands by what they have trained on",
                fix="give the tokens of an optimizer step of the whole island; where there are "
                "none, its images, frames or samples, counted alike on all islands, or 1",
            )
        self.tokens_per_step, self.joining = tokens_per_step, joining
        self.island: Joined | None = None
        self._steps = 0  # of the optimizer, as Lightning counts them
        self._schedules: list[Schedule] = []

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Join the swarm with the module that is about to be trained."""
        again = bool(self._steps)
        self.island = island = join(pl_module, trainer.optimizers, **self.joining)
        self.joining["resume"] = True  # fit() may be called again: its checkpoints are there then
        self._steps = trainer.global_step
        self._schedules = [
            Schedule(
                config.scheduler,
                trainer.estimated_stepping_batches,
                island.position,
                anew=again,
                each_step=pl_module.automatic_optimization
                and (config.interval, config.frequency) == ("step", 1),
            )
            for config in trainer.lr_scheduler_configs
        ]

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """After each batch; with accumulated gradients not every one is a step."""
        assert self.island is not None
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # Lightning has divided the loss by this, for the gradient; in manual optimization it is 1
        parts = trainer.accumulate_grad_batches
        whole = loss * parts if isinstance(loss, torch.Tensor) else None
        going = self.island.step(self.tokens_per_step, whole)
        left = [schedule.follow(self.island.position) for schedule in self._schedules]
        if not (going and all(left)):
            trainer.should_stop = True

    def on_train_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Leave the swarm."""
        if self.island is not None:
            self.island.leave()
            self.island = None

    def on_exception(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        exception: BaseException,
    ) -> None:
        """Ctrl-C or an error: leave the swarm in order all the same.

        Other ranks are not waited for, and an end of the node does not hide the exception.
        """
        if self.island is not None:
            self.island.__exit__(type(exception), exception, exception.__traceback__)
            self.island = None
