"""The loop a newcomer reads first: it learns, and it is DiLoCo."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from diloco.loop import CONTEXT, Island, Settings, batch_of, new_model, texts, train

SMALL = Settings(islands=2, inner_steps=10, rounds=4, batch=32)


def test_it_learns_and_repeats_itself_exactly() -> None:
    reports = list(train(SMALL))
    assert [report.round for report in reports] == [0, 1, 2, 3]
    assert reports[-1].validation < reports[0].validation - 0.3
    assert list(train(SMALL)) == reports


def test_an_islands_training_leaves_the_common_parameters_alone() -> None:
    base = parameters_to_vector(new_model(0).parameters()).detach().clone()
    before = base.clone()
    local, _ = Island(0, texts(2)[0], SMALL).train(base, 3)
    assert torch.equal(base, before)
    assert not torch.equal(local, base)


def test_one_island_with_plain_averaging_is_plain_training() -> None:
    settings = Settings(
        islands=1, inner_steps=5, rounds=3, batch=16, outer_lr=1.0, outer_momentum=0.0,
        warmup_rounds=0,
    )  # fmt: skip
    got = list(train(settings))
    text, _ = texts(2)
    island = Island(0, text, settings)
    theta = parameters_to_vector(new_model(0).parameters()).detach()
    for report in got:
        theta, loss = island.train(theta, 5)
        assert loss == pytest.approx(report.training, rel=1e-4)


def test_texts_are_disjoint_and_batches_are_windows_of_them() -> None:
    first, second = texts(2, size=1000)
    assert len(first) == len(second) == 1000
    assert not torch.equal(first, second)
    counting = torch.arange(200)
    context, target = batch_of(counting, 50, torch.Generator().manual_seed(0))
    assert context.shape == (50, CONTEXT)
    assert torch.equal(context, target[:, None] - CONTEXT + torch.arange(CONTEXT))


def test_the_command_prints_a_loss_that_falls() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "diloco.loop"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    lines = done.stdout.splitlines()
    losses = [float(line.split()[-1]) for line in lines]
    assert len(losses) == Settings().rounds
    assert losses[-1] < 2.3 < losses[0]
    assert not done.stderr
