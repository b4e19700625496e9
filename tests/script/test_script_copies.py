"""A script whose optimizer keeps points of parameter space beside θ, to which its steps lead."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from copies_kit import COPYING, EarlyMasters, Kept, Masters, ScheduleFree
from ranks_kit import started
from script_kit import TARGET, Played, committing, silent
from shards_kit import shared_rows
from torch import Tensor, nn
from trainer_kit import apply, merge

from node.script.optimizers import Watch, as_one
from node.trainer.channel import Cold, Command, Report, Save, Shift, Snapshot, StepDone
from node.trainer.copies import Copies
from node.trainer.weights import local

TYPES = [torch.float32, torch.bfloat16]
ROUNDS = 16


@pytest.fixture(params=COPYING)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Kept]:
    """The optimizer of a script that is played."""
    found = COPYING[request.param]
    monkeypatch.setattr(torch.optim, "AdamW", found)
    return found


def moving(by: float) -> Any:
    """A daemon whose other islands learn so much in each round."""

    def answer(played: Played, report: Report) -> list[Command]:
        if not isinstance(report, Snapshot):
            return []
        assert played.vectors.try_claim()
        merge(played.vectors)
        played.base += by
        return [apply(report.round + 1, target_steps=TARGET)]

    return answer


def play(answer: Any = silent, lr: float | None = None, **given: Any) -> Played:
    played = Played(answer, **given)
    if lr is not None:
        played.optimizer.param_groups[0]["lr"] = lr
    return played


def apart(played: Played) -> Tensor:
    """How far the copies are from θ."""
    optimizer: Any = played.optimizer
    found = [
        (copy.float() - p.detach().float()).flatten()
        for p in played.model.parameters()
        for copy in optimizer.copies(p)
    ]
    assert len(found) == 2
    return torch.cat(found)


def exact(played: Played) -> Tensor:
    """θ as the next snapshot has it."""
    played.joined._progress.take_snapshot()
    return played.sent.clone()


@pytest.mark.parametrize("dtype", TYPES)
def test_what_others_learn_is_not_undone(kind: type[Kept], dtype: torch.dtype) -> None:
    """Most of it was, and was sent as this island's own work."""
    played = play(moving(1.0), lr=0.0, away=0.0, dtype=dtype)
    start = played.base.clone()
    played.train(ROUNDS * TARGET)
    assert played.joined.round == ROUNDS
    played.train(TARGET - 1)
    off = 2 * ROUNDS * torch.finfo(dtype).eps
    assert (played.base - start - ROUNDS).abs().max() < off
    assert (played.theta - played.base).abs().max() < off


def test_in_16_bits_what_is_less_than_one_of_them_adds_up(kind: type[Kept]) -> None:
    little = torch.finfo(torch.bfloat16).eps / 8
    played = play(moving(little), lr=0.0, away=1.003, dtype=torch.bfloat16)
    start = played.base.clone()
    played.train(4 * ROUNDS * TARGET)
    assert (played.base - start - 4 * ROUNDS * little).abs().max() < little
    assert torch.equal(played.theta, played.base.bfloat16().float())


@pytest.mark.parametrize("dtype", TYPES)
def test_they_move_as_far_as_theta_does(kind: type[Kept], dtype: torch.dtype) -> None:
    """So that what the optimizer was about to do is neither lost nor done twice."""
    played = play(overlap=50, away=0.0, dtype=dtype)
    played.train(TARGET)
    progress, before = played.joined._progress, apart(played)
    played.sent.copy_(played.theta)
    played.base += 0.5
    progress.apply(apply(1))
    played.sent.fill_(0.25)
    progress.shift(Shift())
    played.sent.copy_(played.theta)
    played.sent[::2] = math.nan  # what was learnt of that part is dropped
    played.base += 0.25
    progress.apply(apply(2, voids=True))
    close = 2 * torch.finfo(dtype).eps
    assert (apart(played) - before).abs().max() < close
    assert (played.theta - played.base).abs().max() < close
    progress.apply(apply(3, reset=True))
    assert apart(played).abs().max() < close
    assert torch.equal(played.theta, played.base.to(dtype).float())


def test_who_goes_astray_does_not_go_back_there(kind: type[Kept]) -> None:
    played = play(away=0.0)
    played.train()
    with torch.no_grad():
        played.model.weight.fill_(math.nan)
        for copy in played.optimizer.copies(played.model.weight):  # type: ignore[attr-defined]
            copy.fill_(math.nan)
    played.joined._progress.apply(apply(1, reset=True))
    assert torch.equal(played.theta, played.base)
    assert not apart(played).any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("away", [0.01, 2.0])
def test_who_has_trained_before_it_joins_begins_where_the_swarm_is(
    kind: type[Kept], away: float, dtype: torch.dtype
) -> None:
    """With its moments where that is near, and without them where it is far."""
    played = play(moving(0.0), away=away, trained=2, dtype=dtype)
    assert len(played.script.of(Cold)) == (away > 1.0)
    played.optimizer.param_groups[0]["lr"] = 0.0
    start = played.base.clone()
    played.train(2 * TARGET)
    # schedule-free and Lookahead finish what they have begun where they come with their moments
    learnt = (played.base - start).abs().max()
    if away > 1.0 or kind in (Masters, EarlyMasters):
        assert learnt < 1e-6
    else:
        assert learnt < 0.2


@pytest.mark.parametrize("dtype", TYPES)
def test_moments_that_are_dropped_take_nothing_of_theta_along(
    kind: type[Kept], dtype: torch.dtype
) -> None:
    little = torch.finfo(torch.bfloat16).eps / 8
    played = play(moving(little), lr=0.0, away=1.003, dtype=dtype, forgets=True)
    start = played.base.clone()
    played.train(ROUNDS * TARGET)
    assert (played.base - start - ROUNDS * little).abs().max() < little
    assert torch.equal(played.theta, played.base.to(dtype).float())


@pytest.mark.parametrize("dtype", TYPES)
def test_a_resume_goes_on_with_them(kind: type[Kept], dtype: torch.dtype, tmp_path: Path) -> None:
    def saving(played: Played, report: Report) -> list[Command]:
        saves = isinstance(report, StepDone) and report.step == 2
        return [Save(str(tmp_path))] if saves else []

    unbroken = play(saving, away=0.01, dtype=dtype)
    unbroken.train(TARGET)
    unbroken.joined._progress.files.finish()
    again = play(away=0.01, dtype=dtype, resume=str(tmp_path), step=2)
    again.train(TARGET - 2)
    assert again.script.of(Snapshot)
    if kind not in (ScheduleFree,):  # a checkpoint has nothing of its groups, nor needs it
        assert torch.equal(again.sent, unbroken.sent)
    assert torch.allclose(apart(again), apart(unbroken))


def test_copies_of_an_earlier_theta_are_not_gone_back_to(kind: type[Kept], tmp_path: Path) -> None:
    """Where moments alone are read, for a θ that others have moved meanwhile."""

    def saving(played: Played, report: Report) -> list[Command]:
        return [Save(str(tmp_path))] if isinstance(report, StepDone) else []

    earlier = play(saving, away=0.0)
    earlier.train()
    earlier.joined._progress.files.finish()
    for change in ({"moments": str(tmp_path)}, {"moments": str(tmp_path / "gone")}):
        later = play(moving(0.0), away=2.0, lr=0.0, **change)
        start = later.base.clone()
        later.train(2 * TARGET)
        assert (later.base - start).abs().max() < 1e-6


def test_work_below_a_bit_of_theta_is_sent_where_the_master_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", Masters)
    played = play(committing, away=0.0, dtype=torch.bfloat16)
    played.train()
    played.optimizer.param_groups[0]["lr"] = 1e-5
    before, theta = exact(played), played.theta
    played.inner_step()
    assert torch.equal(played.theta, theta)
    learnt = exact(played) - before
    assert 0.0 < learnt.abs().max() < 1e-4
    assert len(played.joined._progress.remainders) == 0  # the master has it all


def test_what_only_looks_like_a_copy_stays() -> None:
    """Moments of zeros beside a θ of zeros, FTRL's z, and a "copy" that is θ itself."""
    theta, same = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([theta, same])
    optimizer.state[theta] |= {"exp_avg": torch.zeros(2, 2), "z": torch.zeros(2, 2), "master": 1}
    optimizer.state[theta] |= {"slow_param": torch.zeros(4), "main_param": torch.zeros(2, 2).int()}
    optimizer.state[same] |= {"fp32_param": same.detach().float(), "slow_buffer": torch.zeros(2)}
    copies = Copies(optimizer)
    with torch.no_grad(), copies.follow(theta, same):
        theta += 1.0
        same += 1.0
    assert not any(
        bool(value.any()) for value in optimizer.state[theta].values() if isinstance(value, Tensor)
    )
    assert same.tolist() == [2.0, 2.0]
    assert [copy.tolist() for copy in copies.of(same)] == [[1.0, 1.0]]


class Around(torch.optim.Optimizer):
    """Lookahead as libraries have it: around another optimizer, with a state of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner
        super().__init__(inner.param_groups, {})
        for p in inner.param_groups[0]["params"]:
            self.state[p]["slow_params"] = p.detach().clone()

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.optimizer.step()
        for p, state in self.state.items():
            p.lerp_(state["slow_params"], 0.5)
            state["slow_params"].copy_(p)


@pytest.mark.parametrize("away", [0.0, 2.0])
def test_one_around_another_is_given_beside_it(
    monkeypatch: pytest.MonkeyPatch, away: float
) -> None:
    """The inner one first, whose moments checkpoints are to have."""
    outer: list[Any] = []
    rule = torch.optim.SGD

    def both(parameters: Any, lr: float) -> Any:
        inner = rule(list(parameters), lr=lr, momentum=0.5)
        outer.append(Around(inner))
        return as_one([inner, outer[0]], inner.param_groups[0]["params"])

    monkeypatch.setattr(torch.optim, "AdamW", both)
    monkeypatch.setattr("node.script.optimizers.Several.step", lambda _: outer[0].step())
    played = play(moving(1.0), away=away, trained=1)
    watch = Watch(played.optimizer, played.model.parameters())
    played.joined._progress.watch = watch
    for group in played.optimizer.param_groups:
        group["lr"] = 0.0
    start = played.base.clone()
    played.train(4 * TARGET)
    watch.end()
    assert (played.base - start - 4.0).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", TYPES)
def test_what_a_checkpoint_does_not_have_begins_at_its_theta(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: torch.dtype
) -> None:
    """As where it was made by an optimizer of another kind."""

    def saving(played: Played, report: Report) -> list[Command]:
        return [Save(str(tmp_path))] if isinstance(report, StepDone) else []

    other = play(saving, away=1.003, dtype=dtype)
    other.train()
    other.joined._progress.files.finish()
    work = exact(other) - other.base
    monkeypatch.setattr(torch.optim, "AdamW", EarlyMasters)
    later = play(away=1.003, lr=0.0, dtype=dtype, resume=str(tmp_path), step=1)
    assert len(later.script.of(Cold)) == 1
    later.inner_step()
    assert torch.equal(exact(later) - later.base, work)
    assert work.any()


def _of_masters(parameters: Any) -> torch.optim.Optimizer:
    optimizer = EarlyMasters(parameters)
    for p, state in optimizer.state.items():
        state["slow_params"] = p.detach().clone()
    return optimizer


def _shards(rank: int, store: str) -> None:
    with shared_rows(rank, store, _of_masters) as mine:
        base, sent, progress = mine.base, mine.sent, mine.progress
        little = 2.0**-11
        for round_ in range(1, 17):
            sent.copy_(base)
            base += little
            progress.apply(apply(round_))
        progress.take_snapshot()
        if mine.ranks.leads:
            assert torch.equal(sent, base)
        for p, state in mine.optimizer.state.items():
            assert torch.equal(local(p), local(state["master_param"]).bfloat16())
            assert (local(p) - local(state["slow_params"])).abs().sum() < 2.0**-6
        assert len(progress.remainders) == 0


def test_each_rank_moves_its_part_of_them(tmp_path: Path) -> None:
    started(_shards, (f"file://{tmp_path}/store",), 2)
