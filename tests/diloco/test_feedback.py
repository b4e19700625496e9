"""Error feedback: nothing is lost, nothing counts twice, and training gets where it would have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from codec_kit import COARSE, round_trip
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco import feedback

N = 9000


def decoded(name: str) -> Callable[[Tensor], Tensor]:
    return partial(round_trip, name)


def normal(seed: int, count: int = N) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", COARSE)
def test_what_is_sent_and_what_is_kept_are_what_there_was(name: str) -> None:
    residual, sent, total = torch.zeros(N), torch.zeros(N), torch.zeros(N)
    for round_ in range(20):
        delta = normal(round_)
        total += delta
        x = feedback.compensate(delta.clone(), residual, 1.0)
        sent += decoded(name)(x)
        feedback.keep_lost(delta, residual, 1.0, decoded(name))
        assert torch.equal(delta, x)
    assert torch.allclose(sent + residual, total, atol=1e-4)


@pytest.mark.parametrize("name", COARSE)
def test_the_residual_stays_bounded(name: str) -> None:
    """By a contraction c: |e| ≤ (1 − c)(|Δ| + decay·|e|), so |e| ≤ |Δ| (1 − c)/(1 − decay(1 − c)).

    It matters for sparse codecs, where most elements wait for many rounds.
    """
    residual, norms = torch.zeros(N), []
    for round_ in range(150):
        feedback.keep_lost(normal(round_), residual, 0.95, decoded(name))
        norms.append(residual.norm().item())
    keeps = (decoded(name)(normal(999)) - normal(999)).norm() / normal(999).norm()
    bound = normal(0).norm() * keeps / (1 - 0.95 * keeps)
    assert max(norms) < 1.05 * bound
    assert max(norms[100:]) < 1.1 * max(norms[50:100])


@pytest.mark.parametrize("name", COARSE)
def test_without_feedback_a_constant_part_is_lost_and_with_it_not(name: str) -> None:
    """A pseudo-gradient that is always the same, under larger noise of every round."""
    drift = 0.05 * normal(1000)
    plain, fed, residual = torch.zeros(N), torch.zeros(N), torch.zeros(N)
    rounds = 200
    for round_ in range(rounds):
        delta = drift + normal(round_)
        plain += decoded(name)(delta)
        fed += decoded(name)(feedback.compensate(delta.clone(), residual, 1.0))
        feedback.keep_lost(delta, residual, 1.0, decoded(name))
    total = sum((drift + normal(round_) for round_ in range(rounds)), torch.zeros(N))
    assert (fed - total).norm() < 0.5 * (plain - total).norm()


def test_what_was_not_merged_leaves_the_residual_alone_and_comes_again() -> None:
    residual, delta = normal(1), normal(2)
    before = residual.clone()
    first = feedback.compensate(delta.clone(), residual, 0.9)
    again = feedback.compensate(delta.clone(), residual, 0.9)
    assert torch.equal(first, again)
    assert torch.equal(residual, before)


@given(st.integers(1, N), st.integers(0, N - 1))
@settings(max_examples=50, deadline=None)
def test_pieces_give_the_same_bits_as_the_whole(size: int, start: int) -> None:
    stop = min(start + size, N)
    residual, delta = normal(3), normal(4)
    whole = feedback.compensate(delta.clone(), residual, 0.95)
    piece = feedback.compensate(delta[start:stop].clone(), residual[start:stop], 0.95)
    assert torch.equal(piece, whole[start:stop])


@pytest.mark.parametrize("name", COARSE)
def test_what_an_owner_lost_of_the_mean_comes_with_its_own_share(name: str) -> None:
    shares = [0.5, 0.3, 0.2]
    mean = sum((s * normal(i) for i, s in enumerate(shares)), torch.zeros(N))
    received = decoded(name)(mean)
    for share in shares:
        extra = feedback.lost_by_owner(mean, received, share)
        assert torch.allclose(received + share * extra, mean, atol=1e-5)


def test_a_tiny_share_cannot_make_up_for_it() -> None:
    mean, received = normal(1), normal(2)
    assert not feedback.lost_by_owner(mean, received, 1e-6).any()
    assert not feedback.lost_by_owner(mean, received, 0.0).any()
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="share"):
            feedback.lost_by_owner(mean, received, share)


@pytest.mark.parametrize("norms", [[0.0, 3.0, 4.0, 100.0], [4.0], [1.0, 7.0]])
def test_what_an_owner_adds_is_no_longer_than_the_median_contribution(norms: list[float]) -> None:
    pieces = [torch.full((16,), 3.0), torch.full((16,), 4.0)]  # 12 and 16, together 20
    feedback.limit_lost(pieces, norms)
    assert torch.allclose(pieces[0], torch.full((16,), 0.6))
    assert torch.allclose(pieces[1], torch.full((16,), 0.8))


@pytest.mark.parametrize("norms", [[], [0.0, 0.0], [1.0, 20.5, 100.0]])
def test_where_it_is_not_longer_or_no_norm_is_known_it_stays(norms: list[float]) -> None:
    pieces = [normal(1)[:16].clone(), torch.full((16,), 4.0)]
    feedback.limit_lost(pieces, norms)
    assert torch.equal(pieces[0], normal(1)[:16])
    assert torch.equal(pieces[1], torch.full((16,), 4.0))
    feedback.limit_lost([], [1.0])


def test_what_was_kept_is_rounded_before_it_is_added() -> None:
    """Else the same range comes out otherwise where it is cut elsewhere, as it is in pieces."""
    delta, residual = normal(3), normal(4)
    wanted = delta.numpy() + residual.numpy() * np.float32(0.95)
    assert torch.equal(feedback.compensate(delta, residual, 0.95), torch.from_numpy(wanted))
