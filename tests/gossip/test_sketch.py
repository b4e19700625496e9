"""Distances estimated from 1 KB against the exact ones."""

from __future__ import annotations

import math
from itertools import pairwise
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gossip.membership.sketch import SIZE, distances, distances_to_mean, read, sketch
from protocols.codecs.kernels import SWITCH, add_signed, kernel

RUN = b"r" * 32


def run_of(number: int) -> bytes:
    """The id of one of many runs, each with signs of its own."""
    return number.to_bytes(32, "big")


def vectors(count: int, size: int, seed: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(size, generator=generator)
    return centre + spread * torch.randn(count, size, generator=generator)


def sketched(rows: torch.Tensor, run: bytes = RUN) -> torch.Tensor:
    found = [read(sketch(row, run)) for row in rows]
    assert all(values is not None for values in found)
    return torch.stack([values for values in found if values is not None])


def test_pairwise_distances_are_within_fifteen_percent() -> None:
    errors = []
    for seed in range(20):
        rows = vectors(6, 100_003, seed, spread=0.05)
        exact = torch.cdist(rows.double(), rows.double())
        pairs = torch.triu_indices(6, 6, offset=1)
        errors.append((distances(sketched(rows, run_of(seed))) / exact - 1)[pairs[0], pairs[1]])
    relative = torch.cat(errors)  # 300 pairs, those of one seed depend on each other
    assert relative.abs().max() < 0.18
    assert (relative.abs() < 0.15).double().mean() >= 0.99
    assert 0.03 < relative.std() < 0.06  # theory: 0.0446
    assert abs(relative.mean()) < 0.02


def miss_bound(misses: int, draws: int, confidence: float = 0.95) -> float:
    """The largest probability of a miss that ``misses`` of ``draws`` do not rule out.

    Clopper and Pearson 1934, one side: with a larger one so few would be seen less often than
    1 - confidence.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        seen = sum(math.comb(draws, k) * p**k * (1 - p) ** (draws - k) for k in range(misses + 1))
        low, high = (p, high) if seen > 1 - confidence else (low, p)
    return high


@pytest.fixture(scope="module")
def trained() -> torch.Tensor:
    """Parameters [3, N] of three islands that took 30 inner steps from one start on real text."""
    from bootstrap.manifest import Manifest
    from node.trainer.cross_entropy import mean_loss
    from node.trainer.layout import Layout
    from node.trainer.model import build
    from node.trainer.optim import make_optimizer

    manifest = Manifest()
    text = "".join(topics.values()).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    layout = Layout.of_config(manifest.model)
    rows = torch.empty(3, layout.size)
    for island, row in enumerate(rows):
        generator = torch.Generator().manual_seed(island)
        model = build(manifest.model, 0)
        optimizer = make_optimizer(model, manifest.inner)
        for _ in range(30):
            starts = torch.randint(len(tokens) - 65, (8,), generator=generator)
            batch = torch.stack([tokens[start : start + 65] for start in starts])
            torch.autograd.backward(mean_loss(model(batch[:, :-1]), batch[:, 1:]))
            optimizer.step()
            optimizer.zero_grad()
        layout.flatten_into(model, row)
    return rows


@pytest.mark.parametrize("what", ["trained, pair", "trained, mean", "random"])
def test_ninety_nine_of_a_hundred_estimates_are_within_fifteen_percent(
    what: str, trained: torch.Tensor
) -> None:
    """Stated with 95 % confidence, over the signs of 1000 runs, which are independent draws.

    A sketch is linear (checked below), so that of the difference is the difference of two.
    """
    difference = {
        "trained, pair": trained[0] - trained[1],
        "trained, mean": trained[0] - trained.mean(0),
        "random": vectors(1, trained.shape[1], 7, 0.0)[0],
    }[what]
    exact = float(difference.double().norm())
    runs = map(run_of, range(1000))
    estimates = torch.stack([sketched(difference[None], run)[0].double().norm() for run in runs])
    error = (estimates / exact - 1).abs()
    assert miss_bound(int((error > 0.15).sum()), len(error)) < 0.01
    assert 0.03 < float((estimates / exact).std()) < 0.055  # equal buckets: 0.0446


def test_a_sketch_is_linear(trained: torch.Tensor) -> None:
    first, second = sketched(trained[:2])
    both = sketched((trained[0] - trained[1])[None])[0]
    torch.testing.assert_close(first - second, both, rtol=1e-4, atol=1e-4)


def test_squared_norms_are_unbiased() -> None:
    row = vectors(1, 3000, 0, 0.0)
    exact = float(row.double().square().sum())
    runs = map(run_of, range(1000))
    estimates = [float(sketched(row, run).double().square().sum()) for run in runs]
    mean = sum(estimates) / len(estimates)
    assert mean == pytest.approx(exact, rel=4 * (2 / SIZE) ** 0.5 / 1000**0.5)


def test_distance_to_the_mean() -> None:
    rows = vectors(5, 60_000, 1, 0.02)
    exact = (rows - rows.mean(0)).norm(dim=1)
    torch.testing.assert_close(
        distances_to_mean(sketched(rows)).float(), exact, rtol=0.15, atol=0.0
    )


@pytest.mark.parametrize("width", [256, 512, 768, 1024, 4096])
def test_outliers_in_one_column_of_a_matrix_spread_over_all_buckets(width: int) -> None:
    rows = torch.zeros(2, 2000 * width)
    column = torch.randn(2000, generator=torch.Generator().manual_seed(width))
    rows[1].view(2000, width)[:, 3] = column
    found = sketched(rows)
    assert (found[1] != 0).all()
    assert float(distances(found)[0, 1]) == pytest.approx(float(column.norm()), rel=0.15)


def test_close_vectors_are_told_apart() -> None:
    rows = vectors(2, 500_000, 2, 1e-5)
    exact = float((rows[0] - rows[1]).norm())
    assert float(distances(sketched(rows))[0, 1]) == pytest.approx(exact, rel=0.15)
    assert float(distances(sketched(rows[:1].expand(2, -1)))[0, 1]) == 0


class Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def test_the_distances_of_many_take_little_memory() -> None:
    """At most that of what comes in or goes out: they are computed beside all else."""
    rows = torch.randn(300, SIZE, generator=torch.Generator().manual_seed(5))
    with Largest() as largest:
        found = distances(rows)
    assert largest.elements == max(rows.numel(), found.numel())
    assert float(found[3, 7]) == pytest.approx(float((rows[3] - rows[7]).double().norm()))


@pytest.mark.parametrize("cuts", [[0, 700, 700, 50_000], [0, 128_512, 128_513, 300_001], [0, 1]])
def test_the_sketch_of_a_whole_is_the_sum_of_those_of_its_pieces(cuts: list[int]) -> None:
    whole = vectors(1, cuts[-1], 11, 0.0)[0]
    pieces = [sketched_piece(whole[start:stop], start) for start, stop in pairwise(cuts)]
    torch.testing.assert_close(
        torch.stack(pieces).sum(0), sketched_piece(whole, 0), rtol=1e-4, atol=1e-3
    )
    if cuts[-1] > SIZE and cuts[1]:
        elsewhere = sketched_piece(whole[cuts[0] : cuts[1]], cuts[0] + 1)
        assert not torch.allclose(elsewhere, pieces[0]), "signs go by the place in the model"


def sketched_piece(vector: torch.Tensor, start: int) -> torch.Tensor:
    values = read(sketch(vector, RUN, start=start))
    assert values is not None
    return values


def test_structure_does_not_fool_the_signs() -> None:
    rows = torch.zeros(2, 256 * 1000)
    rows[1] = 0.01  # a constant shift: without signs it would pile up in every bucket
    estimate = float(distances(sketched(rows))[0, 1])
    assert estimate == pytest.approx(float(rows[1].norm()), rel=0.2)


def test_equal_vectors_have_equal_sketches_and_runs_differ() -> None:
    row = vectors(1, 12_345, 3, 0.1)[0]
    assert sketch(row, RUN) == sketch(row.clone(), RUN)
    assert sketch(row, RUN) != sketch(row, b"s" * 32)
    assert len(sketch(row, RUN)) == 4 * SIZE


@pytest.mark.parametrize("data", [b"", b"x" * 1003, b"\xff" * 1004])
def test_what_is_no_sketch_is_not_read(data: bytes) -> None:
    assert read(data) is None


def test_compiled_and_plain_sums_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel("int4") is None:
        pytest.skip("there is no C compiler")
    row = vectors(1, 300_007, 5, spread=1.0)[0]
    compiled = [read(sketch(row, RUN, start=start)) for start in (0, 1, 128_511, 128_512)]
    monkeypatch.setenv(SWITCH, "off")
    for start, values in zip((0, 1, 128_511, 128_512), compiled, strict=True):
        plain = read(sketch(row, RUN, start=start))
        assert values is not None
        assert plain is not None
        torch.testing.assert_close(values, plain, rtol=1e-5, atol=1e-4)


def test_add_signed_says_which_bit_is_whose_sign() -> None:
    if kernel("int4") is None:
        pytest.skip("there is no C compiler")
    values = torch.arange(1.0, 32 * 6 + 1).view(32, 6)
    signs, totals = torch.zeros(6, dtype=torch.int32), torch.zeros(3, dtype=torch.float64)
    signs[4] = -(2**31)  # its first value alone
    assert add_signed(values, signs, totals)
    wanted = values.double().view(-1, 3).sum(0)
    wanted[1] -= 2 * values[0, 4]
    assert torch.equal(totals, wanted)
    assert not add_signed(torch.zeros(32, 7), torch.zeros(7, dtype=torch.int32), totals)
