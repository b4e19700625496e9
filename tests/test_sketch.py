"""Distances estimated from 1 KB against the exact ones."""

from __future__ import annotations

import pytest
import torch

from gossip.sketch import SIZE, distances, read, relative_spread, sketch

RUN = b"r" * 32


def vectors(count: int, size: int, seed: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(size, generator=generator)
    return centre + spread * torch.randn(count, size, generator=generator)


def sketched(rows: torch.Tensor, round_: int = 0) -> torch.Tensor:
    found = [read(sketch(row, RUN, round_)) for row in rows]
    assert all(values is not None for values in found)
    return torch.stack([values for values in found if values is not None])


def test_pairwise_distances_are_within_fifteen_percent() -> None:
    worst = []
    for seed in range(10):
        rows = vectors(6, 100_003, seed, spread=0.05)
        exact = torch.cdist(rows.double(), rows.double())
        estimate = distances(sketched(rows, round_=seed))
        pairs = torch.triu_indices(6, 6, offset=1)
        errors = (estimate / exact - 1).abs()[pairs[0], pairs[1]]
        worst += errors.tolist()
    inside = sum(error < 0.15 for error in worst) / len(worst)
    assert inside >= 0.98  # three standard deviations of 4.4 % are 13 %
    assert sum(worst) / len(worst) < 0.06


def test_relative_spread() -> None:
    errors = []
    for seed in range(10):
        rows = vectors(4, 50_000, seed, spread=0.01)
        mean = rows.mean(0)
        exact = float((rows - mean).norm(dim=1).mean() / mean.norm())
        errors.append(abs(relative_spread(sketched(rows, seed)) / exact - 1))
    assert sum(errors) / len(errors) < 0.12  # a ratio of two estimates


def test_structure_does_not_fool_the_signs() -> None:
    rows = torch.zeros(2, 256 * 1000)
    rows[1] = 0.01  # a constant shift: without signs it would pile up in every bucket
    estimate = float(distances(sketched(rows))[0, 1])
    assert estimate == pytest.approx(float(rows[1].norm()), rel=0.2)


def test_equal_vectors_have_equal_sketches_and_rounds_differ() -> None:
    row = vectors(1, 12_345, 3, 0.1)[0]
    assert sketch(row, RUN, 5) == sketch(row.clone(), RUN, 5)
    assert sketch(row, RUN, 5) != sketch(row, RUN, 6)
    assert sketch(row, RUN, 5) != sketch(row, b"s" * 32, 5)
    assert len(sketch(row, RUN, 5)) == 4 * SIZE


@pytest.mark.parametrize("data", [b"", b"x" * 1023, b"\xff" * 1024])
def test_what_is_no_sketch_is_not_read(data: bytes) -> None:
    assert read(data) is None
