"""Sums and roots that are the same on every machine."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.exact import root_, total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_roots_are_rounded_right(dtype: torch.dtype) -> None:
    """torch's own are not: MKL gives a neighbour here and there, which ones by processor."""
    random = torch.Generator().manual_seed(0)
    values = torch.rand(200_003, generator=random, dtype=dtype)
    wanted = [math.sqrt(value) for value in values.tolist()]
    assert torch.equal(root_(values.clone()), torch.tensor(wanted, dtype=torch.float64).to(dtype))


def test_roots_are_taken_in_place_also_of_a_part() -> None:
    values = torch.arange(12.0).square().view(3, 4)
    column = values[:, 1]
    assert root_(column) is column
    assert values[:, 1].tolist() == [1.0, 5.0, 9.0]
    assert values[:, 0].tolist() == [0.0, 16.0, 64.0]


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=70))
def test_a_total_is_the_sum(values: list[int]) -> None:
    assert total(torch.tensor(values, dtype=torch.float64)).item() == sum(values)


def test_a_total_is_rounded_in_one_order_alone() -> None:
    """Halves are added to each other, and what is left over to the last of these sums."""
    big = 2.0**25  # beside it a one is rounded away
    assert total(torch.tensor([1.0, -big, 0.0, 0.0, big])).item() == 1.0
    assert total(torch.tensor([1.0, 0.0, 0.0, -big, big])).item() == 1.0
    assert total(torch.tensor([big, 1.0, -big, 0.0])).item() == 1.0
    assert total(torch.tensor([big, -big, 1.0, 0.0])).item() == 0.0
