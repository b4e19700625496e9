"""Pseudo-gradients: sign, rebasing, norms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from diloco import pseudo_gradient as pg


def normal(seed: int, count: int = 300_007) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def test_it_points_like_a_gradient() -> None:
    base, local = torch.tensor([1.0, 1.0]), torch.tensor([0.75, 2.0])
    out = torch.empty(2)
    assert pg.pseudo_gradient(base, local, out) is out
    assert out.tolist() == [0.25, -1.0]


def test_an_island_without_later_steps_lands_on_the_new_base_exactly() -> None:
    sent, new_base = normal(0), normal(1) * 1e-3
    local = sent.clone()
    pg.rebase(local, new_base, sent)
    assert torch.equal(local, new_base)


def test_later_steps_move_along() -> None:
    sent, later, new_base = normal(0), normal(1) * 1e-2, normal(2)
    local = sent + later
    expected = (local - sent) + new_base
    pg.rebase(local, new_base, sent)
    assert torch.equal(local, expected)
    torch.testing.assert_close(local - new_base, later, rtol=0, atol=1e-6)


def test_parts_that_were_lost_are_kept_for_the_next_round() -> None:
    base, local, new_base = normal(0), normal(1), normal(2)
    delta = base - local
    accounted = local.clone()
    accounted[1000:200_000] = base[1000:200_000]
    pg.rebase(local, new_base, accounted)
    assert torch.equal(local[:1000], new_base[:1000])
    assert torch.equal(local[200_000:], new_base[200_000:])
    again = new_base - local  # the next pseudo-gradient carries what nobody has seen
    torch.testing.assert_close(again[1000:200_000], delta[1000:200_000], rtol=0, atol=2e-6)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 0.0])
def test_norm_neither_overflows_nor_vanishes(scale: float) -> None:
    delta = normal(0) * scale
    assert pg.norm(delta) == pytest.approx(delta.double().norm().item(), rel=1e-5)
    assert pg.norm(torch.empty(0)) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_found_wherever_it_is(bad: float) -> None:
    for place in (0, pg.TILE, 300_006):
        delta = normal(0)
        assert pg.is_finite(delta)
        delta[place] = bad
        assert not pg.is_finite(delta)
        assert not math.isfinite(pg.norm(delta))


def test_huge_values_are_finite() -> None:
    assert pg.is_finite(torch.full((1000,), 3e38))


def test_values_that_do_not_lie_in_one_piece_are_rebased_as_well() -> None:
    local, accounted, new_base = (torch.arange(12.0).view(4, 3) * n for n in (1, 2, 3))
    pg.rebase(local[:, 1:], new_base[:, 1:], accounted[:, 1:])
    wanted = torch.arange(12.0).view(4, 3)
    wanted[:, 1:] *= 2  # 3 + (1 - 2)
    assert torch.equal(local, wanted)
