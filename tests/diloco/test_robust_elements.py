"""Robust merging element by element: coordinate median, trimmed mean, sign elections."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from robust_kit import ATTACKS, attacked, cosine, gram, honest
from torch import Tensor

from diloco import merge, robust
from protocols.bounds import MAX_PEERS


@settings(deadline=None, max_examples=60)
@given(count=st.integers(1, 9), size=st.integers(1, 50), seed=st.integers(0, 2**32))
def test_coordinate_median_of_equal_votes(count: int, size: int, seed: int) -> None:
    values = honest(count, size, seed=seed).float()
    want = values.double().quantile(0.5, dim=0)
    got = robust.coordinate_median(values, [3.0] * count)
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(weights=st.lists(st.integers(1, 4), min_size=1, max_size=6), seed=st.integers(0, 2**32))
def test_coordinate_median_of_votes_that_differ(weights: list[int], seed: int) -> None:
    """An input with a vote of n counts like n inputs with a vote each."""
    values = honest(len(weights), 20, seed=seed).float()
    votes = [round(2 * min(weight, statistics.median(weights))) for weight in weights]
    repeated = values.repeat_interleave(torch.tensor(votes), dim=0)
    got = robust.coordinate_median(values, [float(weight) for weight in weights])
    want = repeated.double().quantile(0.5, dim=0)
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=1e-6)


def test_votes_are_those_of_their_inputs_however_many_a_round_has() -> None:
    weights = [2.0 if number % 3 else 1.0 for number in range(MAX_PEERS)]
    values = honest(len(weights), 20).float()
    votes = torch.tensor([round(2 * min(one, statistics.median(weights))) for one in weights])
    want = values.repeat_interleave(votes, dim=0).double().quantile(0.5, dim=0)
    got = robust.coordinate_median(values, weights)
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="more than"):
        robust.coordinate_median(torch.zeros(MAX_PEERS + 1, 2), [1.0] * (MAX_PEERS + 1))


def test_trimmed_mean_of_equal_votes_leaves_out_both_ends() -> None:
    values = honest(8, 100).float()
    want = values.double().sort(dim=0).values[2:6].mean(0)
    got = robust.trimmed_mean(values, [1.0] * 8)
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-6)


def test_trimmed_mean_counts_the_one_on_the_edge_in_part() -> None:
    values = torch.tensor([[1.0], [2.0], [9.0]])
    # a quarter of three is three quarters of one: 1/4 of the first, the second, 1/4 of the third
    want = (0.25 * 1 + 2 + 0.25 * 9) / 1.5
    assert robust.trimmed_mean(values, [1.0] * 3).item() == pytest.approx(want)


def test_trimming_nothing_is_the_mean() -> None:
    values = honest(5, 100).float()
    got = robust.trimmed_mean(values, [1.0] * 5, trim=0.0)
    assert torch.allclose(got, values.mean(0), atol=1e-6)


@pytest.mark.parametrize("count", [*range(1, 18), 33, 64, MAX_PEERS])
def test_columns_are_sorted_and_know_where_they_come_from(count: int) -> None:
    values = honest(count, 300).float().round()  # many are equal
    ordered, origins = robust._sorted_columns(values)
    assert torch.equal(ordered, values.sort(dim=0).values)
    assert torch.equal(values.gather(0, origins), ordered)
    assert torch.equal(origins.sort(dim=0).values[:, 0], torch.arange(count))


ELEMENTWISE = [robust.coordinate_median, robust.trimmed_mean]


@pytest.mark.parametrize("rule", ELEMENTWISE)
@pytest.mark.parametrize("attack", ATTACKS)
def test_two_of_eight_lie_element_by_element(
    rule: Callable[[Tensor, Sequence[float]], Tensor], attack: str
) -> None:
    inputs, mean = attacked(attack)
    result = rule(inputs.float(), [1.0] * 8).double()
    assert cosine(result, mean) >= 0.9
    assert result.norm() / mean.norm() < 1.4


@pytest.mark.parametrize("rule", ELEMENTWISE)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_inputs_element_by_element(
    rule: Callable[[Tensor, Sequence[float]], Tensor], count: int
) -> None:
    values = honest(1, 50).float().expand(count, 50)
    assert torch.allclose(rule(values, [1.0] * count), values[0], rtol=1e-5)
    assert not rule(values, [0.0] * count).any()


@pytest.mark.parametrize("rule", ELEMENTWISE)
def test_who_has_no_vote_is_not_read(
    rule: Callable[[Tensor, Sequence[float]], Tensor],
) -> None:
    values = honest(3, 50).float()
    values[1] = math.nan
    expected = rule(values[[0, 2]], [1.0, 2.0])
    assert torch.equal(rule(values, [1.0, 0.0, 2.0]), expected)


def test_values_near_the_end_of_floats_do_not_overflow() -> None:
    values = torch.full((4, 3), 3e38)
    assert torch.equal(robust.coordinate_median(values, [1.0] * 4), values[0])
    assert robust.trimmed_mean(values, [1.0] * 4).isfinite().all()


def test_what_is_no_merge() -> None:
    with pytest.raises(ValueError, match="trim"):
        robust.trimmed_mean(torch.zeros(2, 2), [1.0, 1.0], trim=0.5)
    with pytest.raises(ValueError, match="2 inputs with 3"):
        robust.coordinate_median(torch.zeros(2, 2), [1.0] * 3)


def test_norm_clip_is_the_clipped_mean_of_the_merge_module() -> None:
    inputs = honest(6)
    inputs[2] *= 30
    norms = inputs.norm(dim=1).tolist()
    found = robust.norm_clip(gram(inputs), [5.0] * 6)
    assert found == pytest.approx([factor / 6 for factor in merge.clip_factors(norms)])
