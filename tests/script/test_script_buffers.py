"""Buffers of a script's model once its steps have gone astray, and the island is back at G."""

from __future__ import annotations

import math

import pytest
import torch
from script_kit import TARGET, Played
from torch import nn
from trainer_kit import apply, merge

from node.script.buffers import mend
from node.trainer.channel import Command, Evaluated, Report, Snapshot


def returning(played: Played, report: Report) -> list[Command]:
    """A swarm of this island alone, which sends it back where its work is not finite."""
    if not isinstance(report, Snapshot):
        return []
    assert played.vectors.try_claim()
    if report.finite:
        merge(played.vectors)
    to = report.round + 1
    return [apply(to, target_steps=TARGET, reset=not report.finite, evaluate=True)]


class Normed(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs))


def test_running_statistics_do_not_stay_astray(caplog: pytest.LogCaptureFixture) -> None:
    """Each evaluation from then on gave NaN."""
    losses: list[float] = []

    def evaluate() -> float:
        played.model.eval()
        losses.append(float(played.model(torch.ones(2, 4)).square().mean()))
        played.model.train()
        return losses[-1]

    played = Played(returning, evaluate, model=Normed)
    played.train(TARGET)
    played.ones *= math.inf
    for _ in range(3):
        loss = played.inner_step()
        assert not played.model[1].running_mean.isfinite().any()
        played.joined.step(tokens=8, loss=loss)
    played.ones = torch.ones(2, 4)
    played.train(3 * TARGET)
    assert played.joined.round > 2
    assert len(losses) == played.joined.round
    assert all(map(math.isfinite, losses))
    assert not played.script.of(Evaluated)  # the losses come with the rounds
    assert not caplog.records


def test_what_is_no_running_statistic_is_told_of() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[0].running_var[0] = math.inf
    model[1].running_mean.fill_(3.0)
    model[1].register_buffer("scale", torch.tensor([math.nan]))
    model.register_buffer("mask", torch.full((2, 2), -math.inf))
    model.register_buffer("average", torch.tensor([0.0, math.nan]))
    model.register_buffer("count", torch.tensor(3))
    model.register_buffer("nowhere", torch.zeros(2, device="meta"))
    assert mend(model) == ["average", "1.scale"]
    assert model[0].running_var.tolist() == [1.0, 1.0]
