"""What the monitor is told of the trainer: its reports as events, its death as a problem."""

from __future__ import annotations

import time

from node.errors import operator_error
from node.island.rank_ends import TrainerDied
from node.monitor.events import DataAwaited, DataCame, Notice, Step, Validation
from node.trainer.channel import Awaited, Cold, Evaluated, StepDone
from protocols.errors import OperatorError


def step_of(done: StepDone, tokens_per_second: float, peers: int) -> Step:
    """An inner step; ``peers`` are the islands that live, this one among them."""
    return Step(
        step=done.step,
        round=done.round,
        loss=done.loss,
        grad_norm=done.grad_norm,
        lr=done.lr,
        tokens=done.tokens,
        tokens_per_second=tokens_per_second,
        seconds=done.seconds,
        mfu=done.mfu,
        peers=peers,
        data_s=done.data_s,
        micro_batch=done.micro_batch,
        finite=done.finite,
    )


def awaited_of(awaited: Awaited) -> DataAwaited | DataCame:
    """That ranks wait for data, or have them."""
    if not awaited.ranks:
        return DataCame(step=awaited.step, seconds=awaited.seconds)
    since = time.time() - awaited.seconds
    return DataAwaited(step=awaited.step, since=since, ranks=awaited.ranks)


def shrunk_of(done: StepDone, halved: int) -> OperatorError | None:
    """E401, if the micro-batch was halved in this step; ``halved``: times before it."""
    if done.halved <= halved:
        return None
    return operator_error(
        "E401",
        f"out of memory: {done.micro_batch} sequences at a time from now on",
        fix="nothing has to be done: gradients are accumulated, and the batch stays as it is; "
        "more ranks (--nproc) or --recompute would be faster",
    )


def validation_of(evaluated: Evaluated) -> Validation:
    """The loss that a run starts from."""
    return Validation(
        round=evaluated.round, step=evaluated.step, validation_loss=evaluated.validation_loss
    )


def notice_of(cold: Cold) -> Notice:
    """That an optimizer's moments are gone."""
    return Notice(text=f"the inner optimizer begins anew at step {cold.step}: {cold.why}")


def problem_of(died: TrainerDied) -> OperatorError:
    """Why a rank has ended, by its own words where it left some."""
    return died.error or OperatorError(
        died.code or "E405",
        f"trainer: {died.text}",
        died.log_tail.splitlines()[-1] if died.log_tail else "it left no message",
        f"see {died.log}",
    )
