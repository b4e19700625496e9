"""Outer optimizers: each against torch's own, or against what its paper says must hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco import optimizers
from diloco.optimizers import RULES, named

ROUNDS = 12


def walk(name: str, merged: list[torch.Tensor], lr: float, momentum: float) -> torch.Tensor:
    """Where a rule gets to from zero."""
    params = torch.zeros_like(merged[0])
    rule = named(name)
    state = rule.init(params)
    for one in merged:
        before = one.clone()
        rule.update(state, one, params, lr=lr, momentum=momentum)
        assert one.equal(before)
    assert state.count == len(merged)
    return params


def torch_walk(make: object, merged: list[torch.Tensor]) -> torch.Tensor:
    params = torch.nn.Parameter(torch.zeros_like(merged[0]))
    optimizer = make([params])  # type: ignore[operator]
    for one in merged:
        params.grad = one.clone()
        optimizer.step()
    return params.detach()


@pytest.fixture
def merged() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(50, generator=generator) for _ in range(ROUNDS)]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.3)),
        ("sparseloco", lambda p: torch.optim.SGD(p, lr=0.3)),
        ("nesterov", lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8, nesterov=True)),
        ("heavyball", lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8)),
        (
            "adam",
            lambda p: torch.optim.Adam(
                p, lr=0.3, betas=(0.8, optimizers.BETA2), eps=optimizers.EPSILON
            ),
        ),
    ],
)
def test_it_is_the_optimizer_of_its_name_with_d_as_gradient(
    name: str, make: object, merged: list[torch.Tensor]
) -> None:
    momentum = 0.0 if name in ("sgd", "sparseloco") else 0.8
    assert torch.allclose(walk(name, merged, 0.3, momentum), torch_walk(make, merged), atol=1e-4)


def test_yogi_is_its_papers_rule(merged: list[torch.Tensor]) -> None:
    """2003.00295 algorithm 2, both moments corrected for their start."""
    first, theta = torch.zeros(2, 50, dtype=torch.float64)
    second, beta1, beta2 = merged[0].double().square(), 0.8, optimizers.BETA2
    for count, d in enumerate((one.double() for one in merged), 1):
        first = beta1 * first + (1 - beta1) * d
        second = second - (1 - beta2) * d.square() * torch.sign(second - d.square())
        theta -= 0.3 * first / (1 - beta1**count) / (second.sqrt() + optimizers.EPSILON)
    assert torch.allclose(walk("yogi", merged, 0.3, beta1).double(), theta, atol=1e-4)


def test_yogis_second_moment_moves_by_a_share_of_the_square_at_most() -> None:
    """The point of Yogi: unlike Adam's it cannot collapse at once when gradients get small."""
    params, rule = torch.zeros(3), named("yogi")
    state = rule.init(params)
    for scale in (1.0, 10.0, 0.01, 0.0, 3.0):
        before = state.vectors["s"].clone()
        merged = torch.tensor([1.0, -2.0, 0.5]) * scale
        rule.update(state, merged, params, lr=0.1, momentum=0.9)
        moved = (state.vectors["s"] - before).abs()
        first = state.count == 1
        bound = merged.square() * (1.0 if first else 1 - optimizers.BETA2)
        assert (moved <= bound * 1.0001 + 1e-6).all()


def test_yogi_begins_with_the_first_round_that_brings_an_element_something() -> None:
    """A part that came out empty in round 0 takes no longer steps later than the others."""
    params, rule = torch.zeros(2), named("yogi")
    state = rule.init(params)
    rule.update(state, torch.tensor([1.0, 0.0]), params, lr=0.01, momentum=0.9)
    merged = torch.ones(2)
    for _ in range(5):
        before = params.clone()
        rule.update(state, merged, params, lr=0.01, momentum=0.9)
        assert state.vectors["s"].equal(merged.square())
        assert ((before - params) <= 0.01).all()


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("name", ["sgd", "sparseloco", "nesterov", "heavyball"])
def test_the_highest_rate_is_where_a_rule_begins_to_overshoot(name: str, momentum: float) -> None:
    """On D = h (θ − θ*), of inner steps that come a share h of the way or all of it."""
    momentum = 0.0 if name in ("sgd", "sparseloco") else momentum
    rule, bound = named(name), optimizers.highest_rate(name, momentum)
    shares = torch.linspace(0.05, 1.0, 20)

    def error(lr: float) -> float:
        params = torch.ones_like(shares)
        state = rule.init(params)
        for _ in range(1500):
            rule.update(state, shares * params, params, lr=lr, momentum=momentum)
        return params.abs().max().item()

    assert error(0.99 * bound) < 1e-2
    assert not error(1.01 * bound) < 1e2  # or is no number any more
    assert optimizers.highest_rate("adam", momentum) == float("inf")


@pytest.mark.parametrize("name", ["adam", "yogi"])
def test_adaptive_steps_do_not_depend_on_the_scale(name: str, merged: list[torch.Tensor]) -> None:
    large = [one * 1000 for one in merged]
    larger = [one * 8000 for one in merged]
    assert torch.allclose(walk(name, large, 0.1, 0.9), walk(name, larger, 0.1, 0.9), rtol=1e-2)


@given(st.sampled_from(sorted(RULES)), st.integers(1, 39))
def test_slice_by_slice_is_the_whole(name: str, cut: int) -> None:
    """What lets fragments have outer states of their own."""
    generator = torch.Generator().manual_seed(cut)
    rule, whole = named(name), torch.randn(40, generator=generator)
    parts = [whole[:cut].clone(), whole[cut:].clone()]
    state, states = rule.init(whole), [rule.init(part) for part in parts]
    for _ in range(3):
        merged = torch.randn(40, generator=generator)
        rule.update(state, merged, whole, lr=0.5, momentum=0.9)
        for one, part, d in zip(states, parts, (merged[:cut], merged[cut:]), strict=True):
            rule.update(one, d, part, lr=0.5, momentum=0.9)
    assert torch.allclose(torch.cat(parts), whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(RULES))
def test_momentum_is_the_first_of_a_rule_s_vectors(name: str) -> None:
    """Late work is turned towards it: a second moment, or a sum, would turn it somewhere else."""
    rule, params, merged = named(name), torch.zeros(4), torch.tensor([1.0, -1.0, -3.0, 2.0])
    state = rule.init(params)
    for _ in range(3):
        rule.update(state, merged, params, lr=0.5, momentum=0.9)
    assert bool(rule.vectors) == bool(rule.momentum)
    for first in rule.vectors[:1]:
        assert torch.cosine_similarity(state.vectors[first], merged, dim=0) > 0.99, first


@pytest.mark.parametrize("name", sorted(RULES))
def test_nothing_merged_moves_nothing_at_first(name: str) -> None:
    assert walk(name, [torch.zeros(4)], 1.0, 0.9).equal(torch.zeros(4))


def test_another_name_is_told_which_there_are() -> None:
    with pytest.raises(ValueError, match="'lyon' is none of sgd, nesterov, "):
        named("lyon")
