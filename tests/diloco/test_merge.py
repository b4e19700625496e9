"""The merge: weights, the bound on norms, and sums that depend on nothing but their inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_kit import decode_add, encoded
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco import merge

N = 270_001


def deltas(count: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(N, generator=random) * 1e-3 for _ in range(count)]


def test_weighted_mean_equals_numpy_float32_bit_for_bit() -> None:
    members, weights = deltas(3), [1000.0, 2500.0, 10.0]
    expected = np.zeros(N, dtype=np.float32)
    for member, weight in zip(members, weights, strict=True):
        expected += member.numpy() * np.float32(weight / 3510.0)
    got = merge.weighted_mean(members, weights, torch.empty(N))
    assert got.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize(("threads", "tile"), [(1, 1000), (2, 65_537), (4, 10**9)])
def test_threads_and_chunks_do_not_change_a_bit(threads: int, tile: int) -> None:
    members, coefficients = deltas(4), [0.1, 0.2, 0.3, 0.4]
    expected = merge.weighted_sum(members, coefficients, torch.empty(N))
    torch.set_num_threads(threads)
    assert torch.equal(
        merge.weighted_sum(members, coefficients, torch.empty(N), tile=tile), expected
    )


def test_it_is_what_decoding_into_an_accumulator_gives() -> None:
    members, weights = deltas(3), [3.0, 1.0, 4.0]
    accumulator = torch.zeros(N)
    for member, share in zip(members, merge.shares(weights), strict=True):
        decode_add("fp32", encoded("fp32", member), share, accumulator)
    assert torch.equal(merge.weighted_mean(members, weights, torch.empty(N)), accumulator)


def test_members_without_weight_are_not_read() -> None:
    members = [torch.ones(N), torch.full((N,), float("nan"))]
    assert torch.equal(merge.weighted_mean(members, [2.0, 0.0], torch.empty(N)), torch.ones(N))
    assert not merge.weighted_mean(members, [0.0, 0.0], torch.empty(N)).any()


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=20))
def test_shares_sum_to_one_or_are_all_zero(weights: list[float]) -> None:
    got = merge.shares(weights)
    assert sum(got) == pytest.approx(1.0 if sum(weights) > 0 else 0.0)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_bad_weights_and_norms_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="weights"):
        merge.shares([1.0, bad])
    with pytest.raises(ValueError, match="norms"):
        merge.clip_factors([1.0, bad])


@pytest.mark.parametrize(
    ("norms", "factors"),
    [
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
        ([1.0, 2.0, 8.0], [1.0, 1.0, 0.25]),
        ([0.0, 2.0, 4.0, 4.0], [1.0, 1.0, 1.0, 1.0]),  # who stood still has no say
        ([2.0, 6.0], [1.0, 4 / 6]),
        ([5.0], [1.0]),
        ([0.0, 0.0], [1.0, 1.0]),
        ([], []),
    ],
)
def test_clipping_to_the_median_norm(norms: list[float], factors: list[float]) -> None:
    assert merge.clip_factors(norms) == pytest.approx(factors)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=15))
def test_nobody_counts_with_more_than_the_median(norms: list[float]) -> None:
    clipped = [n * f for n, f in zip(norms, merge.clip_factors(norms), strict=True)]
    assert max(clipped) <= np.median(norms) * (1 + 1e-9)
    assert all(c == n for c, n in zip(clipped, norms, strict=True) if n <= np.median(norms))


def test_one_of_eight_that_sends_a_thousandfold_is_bounded() -> None:
    honest = deltas(7)
    members = [*honest, honest[0] * -1000]
    norms = [member.norm().item() for member in members]
    plain = merge.weighted_mean(members, [1.0] * 8, torch.empty(N))
    shares = [factor / 8 for factor in merge.clip_factors(norms)]
    clipped = merge.weighted_sum(members, shares, torch.empty(N))
    mean = torch.stack(honest).mean(0)
    assert (clipped - mean).norm() < 0.6 * mean.norm()
    assert (plain - mean).norm() > 100 * mean.norm()


def test_a_share_does_not_depend_on_the_order_of_the_others() -> None:
    weights = [0.1] * 10 + [1e9, 1e-9]
    assert merge.shares(weights[::-1]) == merge.shares(weights)[::-1]
    assert merge.shares([0.1] * 10) == [0.1] * 10
