"""Rules without rounds: delayed Nesterov, bounds of staleness, late work."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco import asynchronous, optimizers, outer

RULE = optimizers.named("delayed-nesterov")


@given(st.integers(1, 8), st.integers(1, 5))
def test_n_arrivals_are_one_nesterov_step_with_their_mean(every: int, rounds: int) -> None:
    generator = torch.Generator().manual_seed(every)
    late, once = torch.zeros(30), torch.zeros(30)
    vectors, reference = RULE.init(late).vectors, outer.init(once)
    rates = optimizers.Rates(0.7, 0.9, share=1 / every, weight=512.0)
    for turn in range(rounds):
        for number, one in enumerate(torch.randn(every, 30, generator=generator), 1):
            if number == 1:
                arrivals = []
            arrivals.append(one)
            RULE.take(vectors, one, late, rates)
            assert vectors["turns"].item() == turn + (number == every)
        outer.update(reference, torch.stack(arrivals).mean(0), once, lr=0.7, momentum=0.9)
        assert torch.allclose(late, once, atol=1e-5)
        assert torch.allclose(vectors["v"], reference.momentum, atol=1e-5)


def taken(*weights: float) -> list[float]:
    """By how much each arrival of four islands moves the parameters, with these weights."""
    params, moved = torch.zeros(4), []
    vectors = RULE.init(params).vectors
    for weight in weights:
        before = params[0].item()
        rates = optimizers.Rates(0.5, 0.0, share=0.25, weight=weight)
        RULE.take(vectors, torch.ones(4), params, rates)
        moved.append(before - params[0].item())
    return moved


def test_each_arrival_counts_at_once() -> None:
    assert taken(3.0, 3.0, 3.0) == pytest.approx([0.125] * 3)


def test_what_is_alone_in_its_round_counts_by_its_weight_over_what_is_usual() -> None:
    assert taken(8.0, 2.0, 8.0) == pytest.approx([0.125, 0.125 / 4, 0.125 * 8 / 6.5])
    assert taken(8.0, 1e30, 8.0)[1:] == pytest.approx([0.25, 0.125 * 8 / 10])  # twice at most


def test_weights_favour_tokens_and_large_batches() -> None:
    assert [asynchronous.rate(*one) for one in ((100, 10), (200, 20))] == [1000.0, 2000.0]
    assert asynchronous.rate(0, 0) == 0.0
    # twice the tokens in as many steps: four times the weight
    assert asynchronous.rate(200, 10) == 4000.0
    with pytest.raises(ValueError, match="not negative"):
        asynchronous.rate(-1, 1)


def turned(delta: torch.Tensor, way: torch.Tensor, staleness: float) -> torch.Tensor:
    keep, add = asynchronous.turning(delta, way, staleness)
    return keep * delta + add * way


@given(st.integers(1, 20), st.integers(0, 1000))
def test_late_work_is_turned_towards_the_momentum_and_not_stretched(
    staleness: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    delta, momentum = torch.randn(2, 40, generator=generator)
    for start, stop in ((0, 10), (10, 40)):
        before, way = delta[start:stop], momentum[start:stop]
        after = turned(before, way, staleness)
        assert math.isclose(after.norm(), before.norm(), rel_tol=1e-4)
        assert torch.dot(after, way) >= torch.dot(before, way) - 1e-4


@pytest.mark.parametrize(
    ("staleness", "cosine", "share"), [(1, 0.0, 1 / 4), (3, 0.0, 3 / 8), (1, -0.5, 3 / 8)]
)
def test_older_work_and_work_that_agrees_less_is_turned_further(
    staleness: int, cosine: float, share: float
) -> None:
    delta = torch.tensor([2.0, 0.0])
    way = 5.0 * torch.tensor([cosine, math.sqrt(1 - cosine**2)])
    wanted = (1 - share) * delta / 2.0 + share * way / 5.0
    after = turned(delta, way, staleness)
    assert torch.allclose(after, 2.0 * wanted / wanted.norm(), atol=1e-5)


def test_fresh_work_and_work_that_agrees_stay_as_they_are() -> None:
    delta, momentum = torch.randn(2, 10)
    assert turned(delta, momentum, 0).equal(delta)
    assert torch.allclose(turned(delta, delta * 3, 5), delta, atol=1e-6)
    assert turned(delta, torch.zeros(10), 5).equal(delta)


def test_work_too_long_for_its_length_to_be_told_stays_as_it_is() -> None:
    """Squares of float32 overflow long before the values do: no NaN may come of that."""
    huge, one = torch.full((4,), 1e30), torch.tensor([1.0, -1.0, 1.0, 0.0])
    assert asynchronous.turning(huge, one, 2) == (1.0, 0.0)
    assert asynchronous.turning(one, huge, 2) == (1.0, 0.0)


@pytest.mark.parametrize("islands", [11, 12, 19, 40, 107, 511])
def test_shares_that_add_up_to_nearly_one_are_a_turn(islands: int) -> None:
    """Of so many islands they add up to a little less, each sum being rounded to float32."""
    params = torch.zeros(1)
    vectors = RULE.init(params).vectors
    rates = optimizers.Rates(0.7, 0.9, share=1 / islands, weight=1.0)
    turns = []
    for _ in range(2 * islands):
        RULE.take(vectors, torch.ones(1), params, rates)
        turns.append(int(vectors["turns"].item()))
    assert turns == [0] * (islands - 1) + [1] * islands + [2]


def test_what_shares_come_to_beyond_one_is_not_carried_into_the_next_turn() -> None:
    """Its arrivals are in this turn's momentum."""
    params = torch.zeros(1)
    vectors = RULE.init(params).vectors
    rates = optimizers.Rates(0.7, 0.9, share=2 / 3, weight=1.0)
    turns = []
    for _ in range(4):
        RULE.take(vectors, torch.ones(1), params, rates)
        turns.append(int(vectors["turns"].item()))
    assert turns == [0, 1, 1, 2]


def test_momentum_is_a_mean_whatever_each_arrival_counts_for() -> None:
    params = torch.zeros(1)
    vectors = RULE.init(params).vectors
    turns = []
    for weight in (8.0, 16.0, 1.0, 8.0, 8.0):
        rates = optimizers.Rates(0.5, 0.9, share=0.25, weight=weight)
        RULE.take(vectors, torch.ones(1), params, rates)
        turns.append(int(vectors["turns"].item()))
    assert turns == [0, 0, 0, 1, 1]  # 1 / 4 + 2 / 4 + 1 / 40 + 1 / 4 and more
    assert vectors["v"].item() == pytest.approx(1.0)
