"""PowerSGD: bases, products and errors against dense arithmetic; both factors a step, or one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lowrank_kit import RANK, SHAPES, Islands, entries
from torch import Tensor

from diloco import lowrank
from diloco.exact import total
from diloco.lowrank import Matrix, Plan

SIZE = sum(torch.Size(shape).numel() for shape in SHAPES)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- bases and products


@given(st.integers(1, 6), st.integers(0, 100))
def test_gram_and_schmidt_give_orthonormal_columns_of_the_same_span(rank: int, seed: int) -> None:
    factor = normal(seed, 12, rank)
    basis = lowrank.orthogonal(factor, seed)
    assert torch.allclose(basis.T @ basis, torch.eye(rank), atol=1e-6)
    assert torch.allclose(basis @ (basis.T @ factor), factor, atol=1e-4)
    first = factor[:, 0] / factor[:, 0].norm()
    assert torch.allclose(basis[:, 0], first, atol=1e-6)


@pytest.mark.parametrize("dependent", ["zero", "twice", "nearly"])
def test_a_direction_that_is_lost_comes_back_as_a_random_one(dependent: str) -> None:
    factor = normal(0, 40, 3)
    factor[:, 1] = {"zero": 0.0, "twice": 2.0, "nearly": 1.0 + 1e-9}[dependent] * factor[:, 0]
    basis = lowrank.orthogonal(factor, "a round")
    assert torch.allclose(basis.T @ basis, torch.eye(3), atol=1e-6)
    assert torch.equal(basis, lowrank.orthogonal(factor, "a round"))
    assert not torch.equal(basis, lowrank.orthogonal(factor, "another"))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_as_many_columns_as_rows_are_found_whatever_is_drawn(rows: int) -> None:
    """Of two elements every second draw of signs depends on the first."""
    for seed in range(20):
        basis = lowrank.orthogonal(torch.zeros(rows, rows), seed)
        assert torch.allclose(basis.T @ basis, torch.eye(rows), atol=1e-6)
    with pytest.raises(ValueError, match="cannot be orthogonal"):
        lowrank.orthogonal(torch.zeros(rows, rows + 1), 0)


def test_signs_are_those_of_every_version_and_machine() -> None:
    found = lowrank.signs(20, "atoll")
    drawn = int.from_bytes(hashlib.shake_128(b"atoll").digest(3), "little")
    assert found.tolist() == [1.0 if drawn >> bit & 1 else -1.0 for bit in range(20)]
    assert abs(lowrank.signs(100_000, "many").mean().item()) < 0.02


def in_plain_python(left: Tensor, right: Tensor) -> Tensor:
    """P̂ Qᵀ with every product and every sum rounded to float32, in the order of the columns."""
    found = torch.zeros(len(left), len(right))
    for row, one in enumerate(left):
        for column, other in enumerate(right):
            value = one[0] * other[0]
            for index in range(1, len(one)):
                value = value + one[index] * other[index]
            found[row, column] = value
    return found


def test_a_product_is_rounded_in_one_order_alone(one_thread: None) -> None:
    left, right = normal(1, 7, RANK), normal(2, 9, RANK)
    expected = in_plain_python(left, right)
    assert lowrank.product(left, right).equal(expected)
    wide, other = normal(3, 501, RANK), normal(4, 333, RANK)
    whole = lowrank.product(wide, other)
    assert whole[100:200].equal(lowrank.product(wide[100:200], other))
    torch.set_num_threads(3)
    assert lowrank.product(wide, other).equal(whole)
    assert torch.allclose(whole, wide @ other.T, atol=1e-4)


@pytest.mark.parametrize("shape", [(1,), (2, 3), (3,), (7, 2), (1001,), (64, 5)])
def test_a_sum_by_halves_is_the_sum(shape: tuple[int, ...]) -> None:
    values = normal(5, *shape).double()
    assert torch.allclose(total(values), values.sum(0), rtol=1e-12, atol=1e-12)


# --- both factors a step


def test_both_factors_find_a_matrix_of_their_rank_and_islands_add_up_to_the_mean() -> None:
    islands = normal(0, 3, 20, 2) @ normal(1, 2, 15)  # three matrices in one common row space
    factor = lowrank.first_factor(15, RANK, seed=1)
    for step in range(2):
        lefts = torch.stack([lowrank.left(m, factor) for m in islands]).mean(0)
        basis = lowrank.orthogonal(lefts, step)
        factor = torch.stack([lowrank.right(m, basis) for m in islands]).mean(0)
    assert torch.allclose(lowrank.product(basis, factor), islands.mean(0), atol=1e-4)


# --- what travels where


def test_every_element_travels_once_and_rounds_are_of_about_one_length() -> None:
    plan = Plan.of(entries(), RANK)
    assert [(m.rows, m.columns) for m in plan.matrices] == [
        (96, 20),
        (60, 20),
        (20, 20),
        (60, 20),  # 2 x 30 x 20: cut where rows and columns are fewest
        (20, 60),
    ]
    covered = torch.zeros(SIZE, dtype=torch.int64)
    for matrix in plan.matrices:
        matrix.of(covered).add_(1)
    for here in plan.rest:
        covered[here] += 1
    assert covered.eq(1).all()
    lengths = [sum(m.height(round_) for m in plan.matrices) for round_ in (0, 1, 2)]
    assert lengths[0] == lengths[2]
    assert max(lengths) * RANK == plan.kept
    assert max(lengths) - min(lengths) <= 40  # without turns it would be 256 and 140
    assert plan.size == plan.kept + 5 * 40 + 20 + 3
    assert all(m.goes_left(0) != m.goes_left(1) for m in plan.matrices)


def test_what_is_too_small_to_gain_travels_as_it_is() -> None:
    assert not Plan.of([(0, (9, 9)), (81, (8, 90))], 4).matrices[1:]
    with pytest.raises(ValueError, match="no matrix has more than 8 rows"):
        Plan.of([(0, (8, 90)), (720, (100,))], 4)


# --- one factor a round


def test_a_round_is_the_projection_of_the_mean_on_what_the_round_before_has_found() -> None:
    islands = Islands(3)
    for seed in range(4):
        gradients = [normal(10 * seed + i, SIZE) for i in range(3)]
        meant = [g + e for g, e in zip(gradients, islands.errors, strict=True)]
        bases, round_ = islands.bases.clone(), islands.round
        common = islands.take(gradients)
        mean = torch.stack(meant).mean(0)
        ways = zip(islands.plan.matrices, islands.plan.factors(bases, round_ - 1), strict=True)
        for matrix, basis in ways:
            whole = matrix.of(mean)
            projector = basis @ basis.T
            dense = whole @ projector if matrix.goes_left(round_) else projector @ whole
            assert torch.allclose(matrix.of(common), dense, atol=1e-4)
            for own, error in zip(meant, islands.errors, strict=True):
                one = matrix.of(own)
                kept = one @ projector if matrix.goes_left(round_) else projector @ one
                assert torch.allclose(matrix.of(error), one - kept, atol=1e-4)
        for here in islands.plan.rest:
            assert torch.allclose(common[here], torch.stack(gradients).mean(0)[here], atol=1e-6)
            assert not any(error[here].any() for error in islands.errors)


def test_gradients_of_a_low_rank_arrive_whole_after_three_rounds() -> None:
    """Each matrix has been projected on its own space from both sides by then."""
    shapes = [(50, 20), (20, 70)]
    islands = Islands(2, shapes)
    thin = [normal(i, shape[0], RANK) @ normal(9 + i, RANK, shape[1]) for i, shape in
            enumerate(shapes)]  # fmt: skip
    gradient = torch.cat([one.flatten() for one in thin])
    for _ in range(3):
        common = islands.take([gradient, gradient])
        for error in islands.errors:  # else what was missed at first comes again, on top
            error.zero_()
    assert torch.allclose(common, gradient, atol=1e-3)


@pytest.mark.parametrize("absent", [False, True])
def test_all_that_was_meant_was_applied_or_is_kept(absent: bool) -> None:
    """Σ applied + mean e = Σ mean of the gradients, whoever missed a round."""
    islands, rounds = Islands(3), 30
    applied, meant = torch.zeros(SIZE), torch.zeros(SIZE)
    for round_ in range(rounds):
        gradients = [normal(100 * round_ + i, SIZE) for i in range(3)]
        gone = [round_ % 3] if absent and round_ % 2 else []
        before = [error.clone() for error in islands.errors]
        there = [i for i in range(3) if i not in gone]
        applied += islands.take(gradients, gone) * len(there)
        meant += torch.stack([gradients[i] for i in there]).sum(0)
        for i in gone:
            assert islands.errors[i].equal(before[i])
    assert torch.allclose(applied + torch.stack(islands.errors).sum(0), meant, atol=2e-3)
    # and what is kept does not grow: a direction that is missed for long is the next one found
    assert max(error.norm() for error in islands.errors) < 12 * SIZE**0.5


@pytest.mark.parametrize("alternate", [True, False])
def test_the_mean_of_what_was_applied_comes_to_the_gradient(alternate: bool) -> None:
    """A matrix of full rank, of which two columns travel a time: sure either way."""
    matrix, rounds = normal(2, 24, 16), 200
    applied = torch.zeros(24, 16)
    if alternate:
        islands = Islands(1, [(24, 16)], 2)
        for _ in range(rounds):
            applied += islands.take([matrix.flatten()]).view(24, 16)
    else:
        error, factor = torch.zeros(24, 16), lowrank.first_factor(16, 2, seed=0)
        for step in range(rounds):
            meant = matrix + error
            basis = lowrank.orthogonal(lowrank.left(meant, factor), step)
            factor = lowrank.right(meant, basis)
            found = lowrank.product(basis, factor)
            error, applied = meant - found, applied + found
    assert (applied / rounds - matrix).norm() < 0.1 * matrix.norm()


def test_a_matrix_without_a_gradient_stays_and_is_not_lost_for_good() -> None:
    """A gradient of zero leaves no direction; when there is one again it is found."""
    islands = Islands(1, [(30, 20)])
    for _ in range(3):
        assert not islands.take([torch.zeros(600)]).any()
    gradient = (normal(1, 30, 2) @ normal(2, 2, 20)).flatten()
    applied = torch.zeros(600)
    for _ in range(40):
        applied += islands.take([gradient])
    assert (applied / 40 - gradient).norm() < 0.2 * gradient.norm()


@given(st.lists(st.tuples(st.integers(9, 40), st.integers(9, 40)), min_size=1, max_size=8))
def test_turns_never_make_a_round_longer_than_its_uneven_matrix_asks(
    sides: list[tuple[int, int]],
) -> None:
    plan = Plan.of(entries(sides), RANK)
    even, odd = (sum(m.height(round_) for m in plan.matrices) for round_ in (0, 1))
    assert abs(even - odd) <= max(abs(rows - columns) for rows, columns in sides)
    assert even + odd == sum(rows + columns for rows, columns in sides)
    assert plan.matrices == tuple(sorted(plan.matrices, key=lambda m: m.start))
    assert all(isinstance(matrix, Matrix) for matrix in plan.matrices)


def test_rounds_in_which_more_travels_have_room_whichever_they_are() -> None:
    """Here the odd ones: the most uneven matrix alone makes even ones longer, the rest do not."""
    islands = Islands(1, [(24, 20), (23, 20), (23, 20)])
    even, odd = (sum(m.height(round_) for m in islands.plan.matrices) for round_ in (0, 1))
    assert odd > even
    gradients = [normal(9, islands.size)]
    for _ in range(2):
        assert islands.take(gradients).isfinite().all()


def test_the_most_uneven_matrix_takes_its_turn_first_and_the_others_balance_it() -> None:
    plan = Plan.of(entries([(24, 20), (23, 20), (23, 20), (30, 20)]), RANK)
    even, odd = (sum(m.height(round_) for m in plan.matrices) for round_ in (0, 1))
    assert even == odd


def test_a_matrix_wider_than_a_block_comes_whole() -> None:
    """As the last layer of a large vocabulary is."""
    islands = Islands(1, [(9, lowrank.BLOCK + 100)])
    gradient = torch.outer(normal(1, 9), normal(2, lowrank.BLOCK + 100)).flatten()
    applied = islands.take([gradient])
    assert torch.allclose(applied + islands.errors[0], gradient, atol=1e-4)
