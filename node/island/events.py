"""What the monitor is told of the trainer: its reports as events, its death as a problem."""

from __future__ import annotations

from node import clock
from node.errors import operator_error
from node.headway import counted
from node.island.rank_ends import TrainerDied
from node.island.silence import Silent
from node.monitor.events import DataAwaited, DataCame, Notice, Step, Validation
from node.trainer.channel import Awaited, Cold, Evaluated, StepDone
from node.trainer.settings import TrainerSettings
from protocols.errors import OperatorError

Told = DataAwaited | DataCame | Notice | Validation


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


def told_of(said: Awaited | Evaluated | Cold | Silent) -> Told:
    """What is only told of: it changes nothing."""
    match said:
        case Awaited():
            return _awaited(said)
        case Evaluated(round_, step, loss):  # what a run starts from
            return Validation(round=round_, step=step, validation_loss=loss)
        case Cold(step, why):
            return Notice(text=f"the inner optimizer begins anew at step {step}: {why}")
        case Silent(text):
            return Notice(text=text)


def dropped_of(steps: int, fragment: int | None, *, relived: bool) -> Notice:
    """That a merge has dropped what was learnt in so many steps; ``relived``: see the replica's.

    ``fragment``: of which that is, where there are several.
    """
    why = (
        "before this node was started again it may have sent them, or the same ones from its "
        "checkpoint on"
        if relived
        else "they are of more rounds than max_staleness, which nobody keeps"
    )
    of = "" if fragment is None else f" of fragment {fragment}"
    return Notice(text=f"drops what it has learnt{of} in {counted(steps, 'inner step')}: {why}")


def _awaited(awaited: Awaited) -> DataAwaited | DataCame:
    """That ranks wait for data, or have them."""
    if not awaited.ranks:
        return DataCame(step=awaited.step, seconds=awaited.seconds)
    since = clock.wall() - awaited.seconds
    return DataAwaited(step=awaited.step, since=since, ranks=awaited.ranks)


def shrunk_of(done: StepDone, halved: int, settings: TrainerSettings) -> OperatorError | None:
    """E401, if the micro-batch was halved in this step; ``halved``: times before it."""
    if done.halved <= halved:
        return None
    return operator_error(
        "E401",
        f"out of memory: {done.micro_batch} sequences at a time from now on",
        fix="nothing has to be done: gradients are accumulated, and the batch stays as it is; "
        f"for more at a time: {ways_to_less(settings)}",
    )


def ways_to_less(settings: TrainerSettings) -> str:
    """By which flags an island's ranks would need less memory each, those that cost least first."""
    dims, gpu = settings.layout, settings.device == "cuda"
    split = dims.pp > 1 and dims.schedule == "zbv"  # with which the next ones do not go
    whole = " with --schedule interleaved" if split else ""
    ways = []
    if gpu and settings.bf16 is False:
        ways.append("--precision bf16")
    if dims.dp_replicate > 1:
        ways.append("fsdp in the place of ddp in --layout")
    if dims.zero < 3 and dims.dp_shard > 1:
        ways.append("--zero 3")
    if settings.recompute != "full":
        ways.append(f"--recompute full{whole}")
    if gpu and not settings.offload:
        ways.append(f"--offload{whole}")
    ways.append("more ranks (--nproc, --nnodes)")
    return ", ".join(ways)


def problem_of(died: TrainerDied, settings: TrainerSettings) -> OperatorError:
    """Why a rank has ended, by its own words where it left some."""
    log = f"see {died.log}"
    return died.error or OperatorError(
        died.code or "E405",
        f"trainer: {died.text}",
        died.log_tail.splitlines()[-1] if died.log_tail else "it left no message",
        f"{ways_to_less(settings)}; {log}" if died.code == "E401" else log,
    )
