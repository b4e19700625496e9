"""Eager updates: what is guessed, and when guesses lead astray."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bootstrap.manifest_modes import EAGER_LR as LR
from diloco import eager, optimizers

ISLANDS = 4


def test_a_guess_is_the_mean_where_others_bring_what_they_brought_last() -> None:
    deltas = torch.randn(ISLANDS, 8, generator=torch.Generator().manual_seed(0))
    for own in deltas:
        known = eager.others(deltas.mean(0), own, 1 / ISLANDS)
        assert torch.allclose(eager.expected(own, 1 / ISLANDS, known), deltas.mean(0), atol=1e-6)


def test_alone_nothing_is_guessed() -> None:
    delta = torch.randn(5)
    known = eager.others(delta * 2, delta * 2, 1.0)
    assert eager.expected(delta, 1.0, known).equal(delta)


def test_who_was_not_in_the_last_mean_makes_room_for_itself() -> None:
    mean = torch.ones(3)
    assert eager.others(mean, None, 0.25).equal(mean * 0.75)


def errors(contraction: Tensor, lr: float, arrives: float, rounds: int = 200) -> Tensor:
    """Distance from the optimum of quadratics, after rounds of islands that are alike.

    Inner steps take an island ``contraction`` [n] of the way to the optimum in a round; the mean
    arrives when it has come the share ``arrives`` of it.
    """
    rule = optimizers.named("nesterov")
    base = torch.ones_like(contraction)
    state = rule.init(base)
    before, after = (1 - contraction) ** arrives, (1 - contraction) ** (1 - arrives)
    delta, known = base * contraction, torch.zeros_like(base)
    for _ in range(rounds):
        guess = base.clone()
        ahead = optimizers.State(state.count, {"v": state.vectors["v"].clone()})
        rule.update(ahead, eager.expected(delta, 1 / ISLANDS, known), guess, lr=lr, momentum=0.9)
        known = eager.others(delta, delta, 1 / ISLANDS)
        rule.update(state, delta, base, lr=lr, momentum=0.9)
        theta = (guess * before - guess + base) * after
        delta = base - theta
    return base.abs()


ALL = torch.linspace(0.05, 0.9, 18)


@pytest.mark.parametrize(("lr", "arrives"), [(0.7, 0.1), (0.7, 0.5), (LR, 0.5)])
def test_a_mean_within_half_a_round_is_as_good_as_waiting(lr: float, arrives: float) -> None:
    assert bool((errors(ALL, lr, arrives) < 1e-3).all())


def test_a_whole_round_on_the_way_wants_shorter_outer_steps() -> None:
    assert bool((errors(ALL, LR, 1.0) < 0.1).all())
    assert errors(torch.tensor([0.8]), 0.7, 1.0).item() > 1e3
