"""A script's own evaluation while a merge is taken in: errors in it, and Ctrl-C."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from script_kit import TARGET, Interrupted, Played, committing
from signals_kit import signals_kept
from torch import Tensor, nn
from trainer_kit import apply, merge

from diloco.pseudo_gradient import rebase
from node.interrupts import held_back
from node.script.session import Joined
from node.trainer.channel import (
    Applied,
    Apply,
    Command,
    Evaluated,
    Leaving,
    Report,
    Snapshot,
    StepDone,
)
from protocols.errors import OperatorError


def test_the_evaluation_sees_the_merged_model_and_changes_nothing() -> None:
    seen: list[Tensor] = []

    def answer(played: Played, report: Report) -> list[Command]:
        if not isinstance(report, Snapshot):
            return []
        assert played.vectors.try_claim()
        merge(played.vectors)
        return [apply(1, target_steps=TARGET, evaluate=True)]

    def evaluate() -> float:
        seen.append(played.theta)
        return 1.5

    played = Played(answer, evaluate)
    played.train(TARGET)
    assert torch.equal(seen[0], played.base)
    assert played.script.of(Applied)[-1].validation_loss == 1.5


def evaluating(played: Played, report: Report) -> list[Command]:
    """Like :func:`committing`, with an evaluation of each merge."""
    return [
        dataclasses.replace(command, evaluate=True) if isinstance(command, Apply) else command
        for command in committing(played, report)
    ]


def late(played: Played, report: Report) -> list[Command]:
    """The first round is merged one step after its snapshot, and evaluated."""
    if not isinstance(report, StepDone) or report.step != TARGET + 1:
        return []
    assert played.vectors.try_claim()
    merge(played.vectors)
    return [apply(1, target_steps=TARGET, evaluate=True)]


def test_an_evaluation_that_fails_leaves_the_round_applied() -> None:
    def evaluate() -> float:
        raise ValueError("of the script's own")

    played = Played(late, evaluate, overlap=5)
    played.train(TARGET)
    assert played.script.of(Snapshot)
    before = played.inner_step()  # the step is taken, then counted
    learnt = played.theta - played.sent
    with pytest.raises(ValueError, match="of the script's own"):
        played.joined.step(tokens=8, loss=before)
    assert torch.equal(played.theta, played.base + learnt)
    assert (played.joined.round, played.joined.over) == (1, False)
    assert played.script.of(Applied)[-1].validation_loss is None
    assert played.vectors.try_snapshot()  # nothing is claimed any more
    played.vectors.end_reading()
    played.train(TARGET)
    assert len(played.script.of(Snapshot)) == 2


def test_an_evaluation_that_fails_before_the_first_step_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may use what is there only after node.join, and a run with nothing in it would be left."""
    joined: list[Joined] = []
    models: list[nn.Module] = []

    def made(inputs: int, outputs: int) -> nn.Module:
        models.append(nn.Linear(inputs, outputs))
        return models[0]

    def evaluate() -> float:
        models[0].eval()
        return float(joined[0].round)

    played = Played(evaluating, evaluate, evaluate=True, model=made)
    joined.append(played.joined)
    assert models[0].training  # as it was: its dropout would do nothing from now on
    assert [report.validation_loss for report in played.script.of(Evaluated)] == [None]
    (said,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "IndexError: list index out of range" in said.getMessage()
    assert said.exc_info  # with the line of the script that it was
    assert played.train(TARGET)
    assert played.script.of(Applied)[-1].validation_loss == 0


def test_ctrl_c_before_the_first_step_is_no_failure_of_the_evaluation() -> None:
    with pytest.raises(KeyboardInterrupt):
        Played(evaluating, Interrupted(lambda: 1.5), evaluate=True)


@pytest.mark.parametrize("returned", [None, "loss", [1.0], torch.ones(2)])
def test_an_evaluation_that_returns_no_number_is_told_of(returned: Any) -> None:
    played = Played(evaluating, lambda: returned)
    with pytest.raises(OperatorError, match="the script's evaluate has returned") as caught:
        played.train(TARGET)
    assert caught.value.code == "E204"
    assert (played.joined.round, played.joined.over) == (1, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_round_is_taken_in_alike_whether_or_not_it_is_evaluated(dtype: torch.dtype) -> None:
    def taken_in(answer: Callable[[Played, Report], list[Command]]) -> Tensor:
        played = Played(answer, lambda: 1.5, overlap=5)
        played.model.to(dtype)
        played.ones = played.ones.to(dtype)
        played.train(TARGET + 1)
        assert played.joined.round == 1
        assert not torch.equal(played.theta, played.base)  # a step was taken since the snapshot
        return played.theta

    def unasked(played: Played, report: Report) -> list[Command]:
        return [
            dataclasses.replace(command, evaluate=False) if isinstance(command, Apply) else command
            for command in late(played, report)
        ]

    assert torch.equal(taken_in(late), taken_in(unasked))


def test_ctrl_c_in_an_evaluation_waits_for_the_merge() -> None:
    played = Played(evaluating, Interrupted(lambda: 1.5))
    with pytest.raises(KeyboardInterrupt):
        played.train(TARGET)
    assert torch.equal(played.theta, played.base)
    assert played.script.of(Applied)[-1].validation_loss == 1.5
    assert played.train(TARGET)
    assert played.joined.round == 2


@pytest.fixture
def scheduled() -> Iterator[None]:
    """A script that takes a scheduler's signals for Ctrl-C, as docs/own.md says."""
    with signals_kept():
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
        yield


@pytest.mark.usefixtures("scheduled")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_while_a_round_is_taken_in_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    played = Played(committing)
    monkeypatch.setattr("node.trainer.remainders.rebase", Interrupted(rebase, number))
    with pytest.raises(KeyboardInterrupt):
        played.train(TARGET)
    assert torch.equal(played.theta, played.base)
    assert (played.joined.round, played.joined.over) == (1, False)
    assert signal.getsignal(number) is signal.default_int_handler


@pytest.mark.usefixtures("scheduled")
@pytest.mark.parametrize("call", [1, 4])
def test_a_signal_that_is_not_held_yet_leaves_none_held(
    monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """It comes while others are being held, or let go, and ends that."""
    calls, set_to = 0, signal.signal

    def interrupted(number: int, handler: Any) -> Any:
        nonlocal calls
        calls += 1
        before = set_to(number, handler)
        if calls == call:  # the first of three is held, or let go
            signal.raise_signal(signal.SIGHUP if call == 1 else signal.SIGINT)
        return before

    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(KeyboardInterrupt), held_back():
        pass
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        assert signal.getsignal(number) is signal.default_int_handler


def test_an_evaluation_that_needs_gradients_switches_them_on() -> None:
    """They are off: most evaluations would keep for each batch what a backward pass needs."""
    seen: list[bool] = []

    def evaluate() -> float:
        seen.append(torch.is_grad_enabled())
        with torch.enable_grad():
            there = torch.ones(2, 4, requires_grad=True)
            (slope,) = torch.autograd.grad(played.model(there).sum(), there)
        return float(slope.abs().sum())

    played = Played(evaluating, evaluate)
    played.train(TARGET)
    assert seen == [False]
    assert played.script.of(Applied)[-1].validation_loss


async def test_an_event_loop_hears_of_a_signal_that_waited_once() -> None:
    """It is told by a descriptor, as the signal comes: who exits at the second one would."""
    heard: list[int] = []
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, heard.append, 1)
    try:
        with held_back():
            signal.raise_signal(signal.SIGINT)
        for _ in range(5):
            await asyncio.sleep(0)  # it reads its descriptor
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    assert heard == [1]


def test_what_is_called_for_a_signal_that_waited_sees_where_it_came() -> None:
    seen: list[tuple[int, str]] = []

    def handler(number: int, frame: FrameType | None) -> None:
        assert frame is not None
        seen.append((number, frame.f_code.co_name))

    with signals_kept():
        signal.signal(signal.SIGINT, handler)
        signal.signal(signal.SIGTERM, handler)
        with held_back():
            signal.raise_signal(signal.SIGTERM)
            assert not seen
    name = "test_what_is_called_for_a_signal_that_waited_sees_where_it_came"
    assert seen == [(signal.SIGTERM, name)]


def test_a_second_ctrl_c_does_not_wait() -> None:
    def evaluate() -> float:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    played = Played(evaluating, evaluate)
    with pytest.raises(KeyboardInterrupt):
        played.train(TARGET)
    assert torch.equal(played.theta, played.base)
    assert played.script.of(Applied)[-1].round == 1


@pytest.mark.parametrize("answer", [committing, evaluating])
def test_no_checkpoint_is_made_of_half_a_merge(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[Played, Report], list[Command]]
) -> None:
    def fails(*given: Any) -> None:
        if given[0].dim() == 1:  # the second of two parameters
            raise MemoryError
        rebase(*given)

    played = Played(answer)
    monkeypatch.setattr("node.trainer.remainders.rebase", fails)
    with pytest.raises(MemoryError), played.joined:
        played.train(TARGET)
    assert played.joined.over
    assert played.script.closed  # so the daemon leaves, with the last checkpoint that it has
    assert not played.script.of(Leaving)


@pytest.mark.parametrize("call", ["leave", "step"])
def test_who_evaluates_neither_leaves_nor_counts_a_step(call: str) -> None:
    """A checkpoint made there would be of two rounds, and nobody could resume from it."""
    joined: list[Joined] = []

    def evaluate() -> float:
        calls = {"leave": joined[0].leave, "step": lambda: joined[0].step(tokens=8)}
        calls[call]()
        return 1.5

    played = Played(evaluating, evaluate)
    joined.append(played.joined)
    with pytest.raises(OperatorError, match=f"evaluate has called island.{call}") as caught:
        played.train(TARGET)
    assert caught.value.code == "E204"
    assert not played.script.of(Leaving)
    assert (played.joined.round, played.joined.over) == (1, False)
    assert torch.equal(played.theta, played.base)


def test_the_outer_parameters_are_there_in_an_evaluation() -> None:
    joined: list[Joined] = []
    seen: list[Tensor] = []

    def evaluate() -> float:
        seen.append(joined[0].outer_parameters()["bias"])
        return 1.5

    played = Played(evaluating, evaluate)
    joined.append(played.joined)
    played.train(TARGET)
    assert torch.equal(seen[0], played.base[12:])
    assert played.script.of(Applied)[-1].validation_loss == 1.5
