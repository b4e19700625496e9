"""A script whose parameters are bf16 or fp16: what rounding takes of the outer state is kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks_kit import started
from script_kit import TARGET, Played, committing, silent
from shards_kit import shared_rows
from torch import Tensor
from trainer_kit import apply

from diloco.optimizers import named
from node.trainer.channel import Command, Report, Save, Shift, Snapshot, StepDone
from node.trainer.progress import Progress

LOW = [torch.bfloat16, torch.float16]
ROUNDS = 40


def idle(outer: Callable[[Tensor, Tensor], object], evaluate: bool, dtype: torch.dtype) -> Played:
    """One that takes part in so many rounds, and learns nothing; ``outer`` is given G and Δ."""

    def answer(played: Played, report: Report) -> list[Command]:
        if not isinstance(report, Snapshot):
            return []
        assert played.vectors.try_claim()
        outer(played.base, played.base - played.sent)
        return [apply(report.round + 1, target_steps=TARGET, evaluate=evaluate)]

    played = Played(answer, lambda: 1.5, away=1.003, dtype=dtype)
    played.optimizer.param_groups[0]["lr"] = 0.0
    return played


@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("dtype", LOW)
def test_steps_below_half_a_bit_of_it_add_up(dtype: torch.dtype, evaluate: bool) -> None:
    """Others find a little in each round; this island must not pull the outer state back."""
    little = torch.finfo(dtype).eps / 8

    def outer(base: Tensor, delta: Tensor) -> None:
        base.sub_(delta).add_(little)

    played = idle(outer, evaluate, dtype)
    start = played.base.clone()
    played.train(ROUNDS * TARGET)
    assert played.joined.round == ROUNDS
    assert (played.base - start - ROUNDS * little).abs().max() < little
    assert torch.equal(played.theta, played.base.to(dtype).float())


@pytest.mark.parametrize("dtype", LOW)
def test_the_outer_state_stands_still_where_nobody_learns(dtype: torch.dtype) -> None:
    """What momentum would make of a difference that is there in each round."""
    rule = named("nesterov")
    states = [rule.init(torch.zeros(15))]

    def outer(base: Tensor, delta: Tensor) -> None:
        rule.update(states[0], delta, base, lr=0.7, momentum=0.9)

    played = idle(outer, False, dtype)
    start = played.base.clone()
    played.train(ROUNDS * TARGET)
    assert played.joined.round == ROUNDS
    assert (played.base - start).abs().max() < torch.finfo(dtype).eps / 8


def exact(progress: Progress) -> Tensor:
    """θ as the next snapshot has it."""
    progress.take_snapshot()
    assert progress.leader is not None
    return progress.leader.vectors.tensors()[1].clone()


@pytest.mark.parametrize("dtype", LOW)
def test_late_work_is_rebased_in_more_bits_than_the_parameters_have(dtype: torch.dtype) -> None:
    played = Played(silent, overlap=50, away=1.003, dtype=dtype)
    played.train(TARGET)
    progress, fine = played.joined._progress, torch.finfo(dtype).eps / 64
    before = exact(progress)
    played.inner_step()
    learnt = exact(progress) - before
    assert learnt.abs().min() > 0.0
    played.sent.copy_(before)
    played.sent[::2] = math.nan  # all of that part is dropped
    played.base += 0.37 * fine * torch.arange(15)
    progress.apply(apply(1, voids=True))
    learnt[::2] = 0.0
    assert (exact(progress) - played.base - learnt).abs().max() < fine
    progress.apply(apply(2, reset=True))
    assert (exact(progress) - played.base).abs().max() < fine


@pytest.mark.parametrize("dtype", LOW)
def test_shifts_below_half_a_bit_add_up(dtype: torch.dtype) -> None:
    played, little = Played(silent, away=1.003, dtype=dtype), torch.finfo(dtype).eps / 8
    for _ in range(ROUNDS):
        played.sent.fill_(little)
        played.joined._progress.shift(Shift())
    moved = exact(played.joined._progress) - played.base
    assert (moved - ROUNDS * little).abs().max() < little


@pytest.mark.parametrize("dtype", LOW)
def test_a_resume_goes_on_from_the_same_place(dtype: torch.dtype, tmp_path: Path) -> None:
    def saving(played: Played, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and report.step == 1:
            return [Save(str(tmp_path))]
        return []

    unbroken = Played(saving, away=1.003, dtype=dtype)
    unbroken.train(TARGET)
    unbroken.joined._progress.files.finish()
    assert unbroken.script.of(Snapshot)
    again = Played(silent, away=1.003, dtype=dtype, resume=str(tmp_path))
    again.train(TARGET - 1)
    assert again.script.of(Snapshot)
    assert torch.equal(again.sent, unbroken.sent)
    assert not torch.equal(again.sent, again.theta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_kept_where_nothing_is_lost(dtype: torch.dtype) -> None:
    played = Played(committing, dtype=dtype)
    played.train(2 * TARGET)
    assert played.joined.round == 2
    assert len(played.joined._progress.remainders) == 0
    assert torch.equal(played.theta, played.base)


def test_nothing_is_kept_where_gradients_are_sent() -> None:
    played = Played(silent, dtype=torch.bfloat16, gradients=True)
    progress = played.joined._progress
    progress.apply(apply(1, evaluate=True))
    assert len(progress.remainders) == 0
    assert torch.equal(played.theta, played.base.bfloat16().float())


def test_a_model_may_change_its_type_after_it_has_joined() -> None:
    played = Played(silent, away=1.003, dtype=torch.bfloat16)
    progress = played.joined._progress
    assert len(progress.remainders) == 2
    for dtype, kept in ((torch.float16, 2), (torch.float32, 0), (torch.bfloat16, 2)):
        played.model.to(dtype)
        exact(progress)
        progress.apply(apply(1))
        assert len(progress.remainders) == kept
        assert (exact(progress) - played.base).abs().max() < 1e-4


def test_a_parameter_that_was_infinite_is_not_so_for_ever() -> None:
    """A script may put its model right again by itself."""
    played = Played(silent, away=1.003, dtype=torch.bfloat16)
    progress, theta = played.joined._progress, played.theta
    with torch.no_grad():
        played.model.bias.fill_(math.inf)
    progress.apply(apply(1))
    assert not exact(progress).isfinite().all()
    played.layout.load_from(theta, played.model)
    assert exact(progress).isfinite().all()


def _each_has_its_part(rank: int, store: str) -> None:
    with shared_rows(rank, store, torch.optim.SGD) as mine:
        base, sent, layout, progress = mine.base, mine.sent, mine.layout, mine.progress
        with torch.no_grad():
            mine.model.weight.add_(2.0**-7)
        work = layout.views(torch.zeros(layout.size))
        work["weight"].fill_(2.0**-7)
        for round_ in range(1, 9):
            progress.take_snapshot()
            if mine.ranks.leads:
                for name, learnt in layout.views(sent - base).items():
                    assert (learnt - work[name]).abs().max() < 2.0**-15
                sent.copy_(base)  # nothing of it was merged
                base += 2.0**-11
            progress.apply(apply(round_, contributed=False))
        assert len(progress.remainders) == 2


def test_each_rank_keeps_what_its_part_has_lost(tmp_path: Path) -> None:
    started(_each_has_its_part, (f"file://{tmp_path}/store",), 2)
