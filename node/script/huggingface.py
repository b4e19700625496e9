"""Hugging Face ``Trainer`` in a swarm, by a callback.

``Trainer(..., callbacks=[SwarmCallback(peers=[...], tokens_per_step=...)])``
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from node.errors import operator_error
from node.script.joining import join
from node.script.schedule import Schedule
from node.script.session import Joined

logger = logging.getLogger(__name__)
SEED = 42  # of TrainingArguments where a script gives none


class SwarmCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Joins when training begins, counts optimizer steps, leaves when it ends.

    ``tokens_per_step`` are those of one optimizer step of the whole island; without it the
    ``Trainer`` must count them (``include_num_input_tokens_seen`` of its arguments). All else is
    passed to :func:`node.join`. Training ends when the run does.

    The learning rate of an island that is behind goes to where the swarm is (``island.position``),
    and training ends where that has come to the end of the schedule, ``max_steps``. Where train()
    is called again and resumes from none of the Trainer's checkpoints, a schedule begins anew.

    The ``Trainer`` tells callbacks nothing of an exception. Where the process outlives one (in a
    notebook, say), ``with SwarmCallback(...) as swarm:`` around ``train()`` leaves all the same.
    """

    def __init__(self, *, tokens_per_step: int = 0, **joining: Any) -> None:
        self.tokens_per_step, self.joining = tokens_per_step, joining
        self.island: Joined | None = None
        self._seen = 0  # tokens, by the Trainer's own count
        self._loss: float | None = None  # that it has logged since the last step
        self._schedule: Schedule | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Join the swarm with the model that is about to be trained."""
        # transformers 5 makes a word of what earlier ones have as a bool
        if not self.tokens_per_step and args.include_num_input_tokens_seen in (False, "no"):
            raise operator_error(
                "E204",
                "nobody counts the tokens of a step",
                why="the swarm weighs islands by what they have trained on",
                fix="give SwarmCallback(tokens_per_step=...), or include_num_input_tokens_seen in "
                "the TrainingArguments",
            )
        if state.is_world_process_zero and args.data_seed is None and args.seed == SEED:
            logger.warning(
                "islands that run this script on the same data read the same batches: their "
                "order follows from seed=%d, which all of them have; give TrainingArguments a "
                "data_seed that no other island has, like secrets.randbits(31)",
                SEED,
            )
        again = self.island is not None and not state.global_step
        self._leave()  # train() may be called again, also after an exception
        self.island = None  # frees its vectors before the next one's are made
        self.island = join(kwargs["model"], kwargs["optimizer"], **self.joining)
        self.joining["resume"] = True  # from now on there are its checkpoints
        self._seen = int(state.num_input_tokens_seen)
        scheduler, where = kwargs.get("lr_scheduler"), self.island.position
        self._schedule = Schedule(scheduler, state.max_steps, where, anew=again)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """After each optimizer step."""
        assert self.island is not None
        tokens = self.tokens_per_step or int(state.num_input_tokens_seen) - self._seen
        self._seen = int(state.num_input_tokens_seen)
        loss, self._loss = self._loss, None  # it is of one step, not of all until the next log
        going = self.island.step(tokens, loss)
        if self._schedule is not None:
            going = going and self._schedule.follow(self.island.position)
        if not going:
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **kwargs: Any,
    ) -> None:
        """The Trainer tells the loss, after every ``logging_steps``, and that of all at last."""
        self._loss = logs.get("loss", self._loss)
        if "train_loss" in logs:
            self._leave()

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Leave as soon as no step is to come: the best model may be loaded before the last log.

        That model is an older one (``load_best_model_at_end``). It would count as what this island
        has learnt since the last merge, and undo what the others have learnt.
        """
        if control.should_training_stop:
            self._leave()

    on_save = on_epoch_end  # an epoch's save follows its evaluation, which may stop training

    def _leave(self) -> None:
        if self.island is not None:
            self.island.leave()

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Leave the swarm, if no event has told before that it is time."""
        self._leave()

    def __enter__(self) -> SwarmCallback:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ctrl-C or an error: leave the swarm in order all the same."""
        if self.island is not None:
            self.island.__exit__(kind, error, trace)
