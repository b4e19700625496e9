"""Schedules as functions of the step, parameter groups, clipping, re-entry."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bootstrap.manifest import Inner, Model
from node.schedule import learning_rate
from node.trainer.model import build
from node.trainer.optim import (
    REENTRY_STEPS,
    clip_gradients,
    make_optimizer,
    reentry_factor,
    set_learning_rate,
)

inners = st.builds(
    Inner,
    lr=st.floats(1e-5, 1),
    schedule=st.sampled_from(["cosine", "wsd", "constant"]),
    warmup_steps=st.integers(0, 50),
    total_steps=st.integers(1, 300),
    min_lr_ratio=st.floats(0, 1),
    decay_fraction=st.floats(0.01, 0.8),
)


@given(inners)
def test_a_schedule_rises_then_never_rises_again(inner):
    rates = [learning_rate(inner, step) for step in range(400)]
    warm, after = rates[: inner.warmup_steps], rates[inner.warmup_steps :]
    assert warm == sorted(warm)
    assert after == sorted(after, reverse=True)
    assert all(0 <= rate <= inner.lr * (1 + 1e-9) for rate in rates)
    if warm:
        assert warm[-1] == pytest.approx(inner.lr)


@given(inners)
def test_a_schedule_ends_at_its_floor_and_stays(inner):
    end = max(inner.total_steps, inner.warmup_steps + 1)
    floor = inner.lr if inner.schedule == "constant" else inner.lr * inner.min_lr_ratio
    for step in (end, end + 1, end + 10**6):
        assert learning_rate(inner, step) == pytest.approx(floor)


def test_points_of_the_schedules():
    cosine = Inner(lr=1, warmup_steps=10, total_steps=110, min_lr_ratio=0.2)
    assert learning_rate(cosine, 0) == pytest.approx(0.1)
    assert learning_rate(cosine, 60) == pytest.approx(0.6)
    assert learning_rate(cosine, 35) == pytest.approx(0.2 + 0.4 * (1 + math.sqrt(0.5)))
    wsd = cosine.model_copy(update={"schedule": "wsd", "decay_fraction": 0.5})
    assert learning_rate(wsd, 55) == 1
    assert learning_rate(wsd, 82) == pytest.approx(0.2 + 0.8 * 28 / 55)


def test_reentry_rises_to_one():
    factors = [reentry_factor(step) for step in range(REENTRY_STEPS + 5)]
    assert factors[0] == 1 / REENTRY_STEPS
    assert factors == sorted(factors)
    assert factors[REENTRY_STEPS - 1 :] == [1.0] * 6


def test_only_matrices_decay():
    model = build(Model(d_model=16, n_layers=1, d_ff=16, n_heads=2, n_kv_heads=1), 0)
    optimizer = make_optimizer(model, Inner(weight_decay=0.3))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        assert decay.pop(id(parameter)) == (0.0 if "norm" in name else 0.3)
    assert not decay


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_biases_of_experts_are_no_matrices_though_they_are_stacked(optimizer):
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Module()])})
    experts = model["layers"][0]
    experts.gate_up_proj = nn.Parameter(torch.zeros(4, 8, 16))
    experts.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 16))
    groups = make_optimizer(model, Inner(optimizer=optimizer, weight_decay=0.3)).param_groups
    found = {id(p): (g["weight_decay"], g["muon"]) for g in groups for p in g["params"]}
    assert found[id(experts.gate_up_proj)] == (0.3, optimizer == "muon")
    assert found[id(experts.gate_up_proj_bias)] == (0.0, False)


def test_a_step_is_adamw_by_the_formula():
    inner = Inner(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5)
    linear = nn.Linear(3, 2)
    before = {n: p.detach().clone() for n, p in linear.named_parameters()}
    optimizer = make_optimizer(linear, inner)
    set_learning_rate(optimizer, 0.01)
    linear(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    for name, p in linear.named_parameters():
        assert p.grad is not None
        decay = 0.5 if p.ndim == 2 else 0.0
        # after one step both bias-corrected moments are the gradient's own
        expected = before[name] * (1 - 0.01 * decay) - 0.01 * p.grad / (p.grad.abs() + 1e-6)
        torch.testing.assert_close(p.detach(), expected)


@pytest.mark.parametrize("scale", [0.1, 100.0])
def test_clipping(scale):
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    for parameter in parameters:
        parameter.grad = torch.full(parameter.shape, scale)
    norm = clip_gradients(parameters, 1.0)
    assert norm.item() == pytest.approx(scale * math.sqrt(7))
    after = math.sqrt(sum(p.grad.square().sum().item() for p in parameters if p.grad is not None))
    assert after == pytest.approx(min(1.0, norm.item()), rel=1e-4)


def test_a_gradient_that_is_not_finite_shows_in_the_norm():
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, float("inf"), 0.0])
    assert not clip_gradients([parameter], 1.0).isfinite()
