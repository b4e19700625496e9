"""A script's side of ``node.join``, with a daemon that is played: no processes."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from script_kit import TARGET, Played, committing, silent
from torch import nn
from trainer_kit import apply, merge

from bootstrap.manifest import Manifest
from node.script.joining import _manifest
from node.script.parameters import named_parameters
from node.script.progress import UNCOUNTED
from node.script.session import ended
from node.trainer.channel import (
    Cold,
    Command,
    Ended,
    Leaving,
    Ready,
    Report,
    Save,
    Saved,
    Snapshot,
    Staged,
    StepDone,
    Stop,
    Stopped,
)
from node.trainer.layout import Layout
from node.trainer.parallel import Ranks
from protocols.bounds import ENDLESS_ROUNDS
from protocols.errors import OperatorError


def test_however_long_an_error_is_the_script_is_told() -> None:
    error = OperatorError("E403", "w" * 20_000, "ü" * 20_000, "f")
    told = Ended.decode(ended(error).encode())
    assert (told.code, told.what, told.fix) == ("E403", "w" * 8192, "f")
    assert told.why == "ü" * 4096


def test_joining_takes_the_parameters_of_the_swarm() -> None:
    played = Played(silent)
    assert torch.equal(played.theta, played.base)
    ready = played.script.of(Ready)[0]
    assert (ready.parameters, ready.layout.hex()) == (15, played.layout.digest)
    assert played.joined.share == (2, 5)
    assert (played.joined.round, played.joined.steps, played.joined.over) == (0, 0, False)


@pytest.mark.parametrize(("away", "kept"), [(0.0, True), (0.01, True), (1.0, False)])
def test_moments_stay_where_the_swarm_is_near(away: float, kept: bool) -> None:
    """A script that makes the run, or comes back to it, goes on as it would have alone."""
    played = Played(silent, trained=3, away=away, rewarm=True)
    assert torch.equal(played.theta, played.base)
    steps = {float(state["step"]) for state in played.optimizer.state.values()}
    assert steps == ({3.0} if kept else set())
    told = played.script.of(Cold)
    assert len(told) == (not kept)
    assert all("of the model's norm away" in one.why for one in told)


def test_nothing_is_said_of_moments_that_there_never_were() -> None:
    assert not Played(silent, rewarm=True).script.of(Cold)


def test_every_third_step_is_a_round_and_theta_is_the_new_base() -> None:
    played = Played(committing)
    for _ in range(4):
        before = played.base.clone()
        assert played.train(TARGET)
        assert not torch.equal(played.base, before)
        assert torch.equal(played.theta, played.base)
    assert played.joined.round == 4
    assert played.joined.tokens == 8 * 4 * TARGET
    assert [s.steps for s in played.script.of(Snapshot)] == [TARGET] * 4
    assert [d.step for d in played.script.of(StepDone)] == list(range(1, 4 * TARGET + 1))


def test_what_the_script_learns_while_a_round_is_under_way_stays() -> None:
    played = Played(silent, overlap=5)
    played.train(TARGET)
    assert played.script.of(Snapshot)
    played.train(2)  # goes on at once: two of the five that may overlap
    assert played.script.waited == 0
    learnt = played.theta - played.sent
    assert played.vectors.try_claim()
    merge(played.vectors)
    played.script.commands.append(apply(1, target_steps=TARGET))
    theta = played.theta
    assert torch.equal(played.theta, theta)  # nothing moves but inside step()
    played.joined.step(tokens=8)
    assert torch.equal(played.theta, played.base + learnt)


def test_a_round_is_waited_for_only_so_long() -> None:
    played = Played(silent, wait_s=7.0)
    assert played.train(TARGET)
    assert played.script.waited == pytest.approx(7.0)
    assert played.train(2)
    assert played.script.waited == pytest.approx(7.0)  # not once more for the same round


def test_steps_that_go_astray_bring_the_island_back() -> None:
    played = Played(silent)
    for _ in range(TARGET):
        played.joined.step(tokens=8, loss=math.nan)
    assert [s.finite for s in played.script.of(Snapshot)] == [False]
    assert all(done.loss is None for done in played.script.of(StepDone))
    assert not any(done.finite for done in played.script.of(StepDone))


def test_a_gradient_scaler_may_skip_a_step_that_overflows() -> None:
    played = Played(committing)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(2 * TARGET):
        before = played.theta
        loss = played.model(torch.ones(2, 4)).square().mean()
        scaler.scale(loss * (torch.inf if step == 1 else 1.0)).backward()
        scaler.step(played.optimizer)
        scaler.update()
        played.optimizer.zero_grad()
        assert played.theta.equal(before) == (step == 1)
        assert played.joined.step(tokens=8, loss=loss)
    assert (played.joined.round, played.joined.steps) == (2, 2 * TARGET)
    assert played.theta.isfinite().all()


def test_a_loss_that_is_not_told_is_none_that_went_astray() -> None:
    played = Played(silent)
    for _ in range(TARGET):
        played.joined.step(tokens=8)
    assert [s.finite for s in played.script.of(Snapshot)] == [True]
    assert [(d.loss, d.finite) for d in played.script.of(StepDone)] == [(None, True)] * TARGET


def test_numbers_may_be_tensors_or_of_numpy() -> None:
    played = Played(silent)
    played.joined.step(torch.tensor(8), torch.tensor(1.5), lr=torch.tensor(0.5))
    played.joined.step(np.array([True] * 8).sum(), np.float32(2.5))  # type: ignore[arg-type]
    played.joined.step(8.0, 3.5)  # type: ignore[arg-type]  # a mean over ranks
    assert [(d.tokens, d.loss) for d in played.script.of(StepDone)] == [
        (8, 1.5),
        (8, 2.5),
        (8, 3.5),
    ]
    assert played.script.of(StepDone)[0].lr == 0.5
    (snapshot,) = played.script.of(Snapshot)
    assert snapshot.tokens == 24
    assert all(type(report).decode(report.encode()) == report for report in played.script.reports)


@pytest.mark.parametrize("lr", [math.nan, math.inf, -math.inf])
def test_a_learning_rate_that_is_not_finite_is_not_told(lr: float) -> None:
    """No message takes it, and it is for the log alone."""
    played = Played(silent)
    assert played.joined.step(tokens=8, loss=1.5, lr=lr)
    (done,) = played.script.of(StepDone)
    assert (done.loss, done.lr, done.finite) == (1.5, 0.0, True)
    assert StepDone.decode(done.encode()) == done


@pytest.mark.parametrize(
    "tokens",
    [
        -1,
        0.5,
        1.9,
        torch.tensor(8.5),
        2**63,
        math.nan,
        math.inf,
        None,
        "many",
        torch.tensor([8, 8]),
    ],
)
def test_what_is_no_number_of_tokens_counts_nothing(tokens: Any) -> None:
    played = Played(silent)
    with pytest.raises(OperatorError, match="not a number of tokens") as caught:
        played.joined.step(tokens)
    assert caught.value.code == "E204"
    assert (played.joined.steps, played.joined.tokens) == (0, 0)
    assert played.train()


@pytest.mark.parametrize(("target", "most"), [(3, UNCOUNTED), (UNCOUNTED + 2, UNCOUNTED + 2)])
def test_a_round_of_steps_without_tokens_is_refused_before_it_ends(target: int, most: int) -> None:
    """Its work would weigh nothing in the merge, and be undone by it."""
    played = Played(silent)
    played.joined._progress.target_steps = target
    for _ in range(most - 1):
        assert played.joined.step(tokens=0)
    before = len(played.script.reports)
    with pytest.raises(OperatorError, match="no tokens in") as caught:
        played.joined.step(tokens=0)
    assert caught.value.code == "E204"
    assert len(played.script.reports) == before
    assert not played.joined.over
    assert played.train()  # all that it has learnt is in hand


def test_single_steps_without_tokens_are_counted() -> None:
    """Batches that are masked as a whole, and steps that went astray."""
    played = Played(committing)
    for step in range(4 * UNCOUNTED):
        assert played.joined.step(tokens=8 * (step % (UNCOUNTED - 1) == 0))
    played = Played(silent)
    for _ in range(2 * UNCOUNTED):
        assert played.joined.step(tokens=0, loss=math.nan)


def test_the_end_of_the_run_ends_the_loop() -> None:
    played = Played(silent)
    played.script.commands.append(Stop())
    assert not played.train()
    assert played.joined.over
    assert played.script.closed  # or the daemon would wait for that, and the others for it
    assert not played.train(2)  # the script may go on by itself
    assert played.script.of(Stopped) == [Stopped()]
    assert (played.joined.steps, played.joined.tokens) == (1, 8)
    assert len(played.script.of(StepDone)) == 1


def test_leaving_writes_the_last_checkpoint_first(tmp_path: Path) -> None:
    def answer(played: Played, report: Report) -> list[Command]:
        match report:
            case Leaving():
                return [Save(str(tmp_path))]
            case Saved():
                return [Stop()]
        return []

    played = Played(answer)
    with played.joined:
        played.train(2)
    assert [type(r) for r in played.script.reports[-4:]] == [Leaving, Staged, Saved, Stopped]
    assert played.script.closed
    assert played.script.waited == 0  # nobody polls for what is being written
    assert list(tmp_path.iterdir())


def test_an_error_that_is_the_scripts_own_leaves_a_node_that_is_well_in_order() -> None:
    """The last checkpoint is made and the farewell said, as after any other exception."""

    def answer(played: Played, report: Report) -> list[Command]:
        return [Stop()] if isinstance(report, Leaving) else []

    played = Played(answer)
    with pytest.raises(OperatorError, match="not a number of tokens") as caught, played.joined:
        played.joined.step(tokens=-1)
    assert caught.value.code == "E204"
    assert [type(r) for r in played.script.reports[-2:]] == [Leaving, Stopped]
    assert played.script.closed
    assert played.joined.over


def test_a_failure_of_the_node_reaches_the_script() -> None:
    played = Played(silent)
    played.script.commands.append(Ended("E402", "the disk is full", "no space", "free some"))
    with pytest.raises(OperatorError, match="disk is full") as caught:
        played.train()
    assert caught.value.code == "E402"
    assert played.joined.over


def test_the_outer_parameters_are_read_between_two_rounds() -> None:
    played = Played(committing)
    played.train(TARGET + 1)
    outer = played.joined.outer_parameters()
    assert set(outer) == {"weight", "bias"}
    assert torch.equal(outer["weight"].flatten(), played.base[:12])
    assert not torch.equal(played.theta, played.base)
    outer["weight"].zero_()  # a copy
    assert played.base[:12].any()


def test_outer_parameters_let_a_round_that_is_being_applied_come_first() -> None:
    played = Played(silent)
    played.train(1)
    assert played.vectors.try_claim()  # the daemon has committed a round, its Apply comes
    played.base += 1.0
    played.script.commands.append(apply(1, target_steps=TARGET, contributed=False))
    outer = played.joined.outer_parameters()
    assert played.joined.round == 1
    assert torch.equal(outer["bias"], played.base[12:])


def test_names_are_those_of_the_bare_model() -> None:
    class Wrapped(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    bare = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    compiled: Any = torch.compile(Wrapped(bare), backend="eager")
    assert list(named_parameters(compiled)) == list(dict(bare.named_parameters()))


def test_frozen_parameters_take_no_part() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    assert list(named_parameters(model)) == ["1.weight", "1.bias"]
    model.requires_grad_(False)
    with pytest.raises(OperatorError) as caught:
        named_parameters(model)
    assert caught.value.code == "E204"


def test_what_cannot_be_merged_is_refused_before_a_node_is_started() -> None:
    model = nn.Linear(2, 2)
    model.turns = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(OperatorError, match="the parameter turns is complex") as caught:
        named_parameters(model)
    assert caught.value.code == "E204"


def test_parameters_that_were_replaced_are_told_of_at_the_next_step() -> None:
    """Else the island would send the old ones for ever, with the weight of all its tokens."""
    played = Played(silent)
    copies = {name: tensor.clone() for name, tensor in played.model.state_dict().items()}
    played.model.load_state_dict(copies)
    played.train(TARGET)
    assert len(played.script.of(Snapshot)) == 1
    played = Played(silent)
    played.model.load_state_dict(copies, assign=True)
    with pytest.raises(
        OperatorError, match="2 of the model's parameters are not those that have joined"
    ) as caught:
        played.train()
    assert caught.value.code == "E204"
    assert not played.script.of(StepDone)


def made(**run: Any) -> Manifest:
    return _manifest(run, Layout.of_module(nn.Linear(2, 2)))


def test_a_mode_keeps_the_rounds_that_it_is_made_of() -> None:
    usual, late, few, once = (
        made(**({"mode": mode} if mode else {})).rounds for mode in ("", "eager", "sparta", "btm")
    )
    assert (usual.inner_steps, usual.total_rounds) == (100, ENDLESS_ROUNDS)
    assert (late.inner_steps, late.overlap_steps) == (100, 100)
    assert (few.inner_steps, few.total_rounds) == (1, ENDLESS_ROUNDS)
    assert (once.inner_steps, once.total_rounds) == (1000, 1)
    assert made(mode="btm", rounds={"inner_steps": 50}).rounds.inner_steps == 50
    with pytest.raises(OperatorError, match="a script takes its own optimizer steps"):
        made(mode="allreduce")
    for rounds in (None, [1]):
        with pytest.raises(OperatorError) as caught:
            made(rounds=rounds)
        assert caught.value.code == "E204"


@pytest.mark.parametrize("table", ["model", "data", "inner", "evaluation"])
def test_tables_that_are_the_scripts_own_business_are_refused(table: str) -> None:
    with pytest.raises(OperatorError, match=f"has {table}: ") as caught:
        made(**{table: {}}, rounds={"inner_steps": 50})
    assert caught.value.code == "E204"


def test_a_mark_that_could_not_be_written_says_nothing_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One full disk, and rank 0 would gather and write everything for the rest of the run."""
    progress = Played(silent).joined._progress
    ranks = SimpleNamespace(size=2, leads=True, broadcast=lambda word: word, all_true=bool)
    progress.ranks = cast(Ranks, ranks)
    write = Path.write_text

    def full(path: Path, *given: Any, **named: Any) -> int:
        if path.name == ".seen":
            write(path, "", encoding="utf-8")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *given, **named)

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_text", full)
        progress._look(tmp_path)
    assert not progress.files.one_disk
    progress._look(tmp_path)
    assert progress.files.one_disk
    assert not list(tmp_path.iterdir())
