"""What sends little: SPARTA, client sampling, PowerSGD, 1-bit Adam; the knob of H."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco import federated, knobs, lowrank, onebit, sparta


@given(st.integers(10, 300), st.floats(0.01, 1.0), st.integers(0, 5))
def test_sparta_comes_by_every_coordinate_once_a_walk(size: int, share: float, seed: int) -> None:
    steps = sparta.steps_a_walk(size, share)
    for walk in range(2):
        seen = torch.cat(
            [sparta.coordinates(size, share, walk * steps + step, seed) for step in range(steps)]
        )
        assert sorted(seen.tolist()) == list(range(size))


def test_sparta_draws_alike_everywhere_and_differently_each_walk() -> None:
    assert sparta.coordinates(100, 0.1, 3, 7).equal(sparta.coordinates(100, 0.1, 3, 7))
    assert not sparta.coordinates(100, 0.1, 3, 7).equal(sparta.coordinates(100, 0.1, 13, 7))
    with pytest.raises(ValueError, match="share"):
        sparta.steps_a_walk(10, 0.0)


def test_sparta_on_all_islands_keeps_the_mean() -> None:
    islands = list(torch.randn(4, 50))
    mean = torch.stack(islands).mean(0)
    for step in range(sparta.steps_a_walk(50, 0.2)):
        at = sparta.coordinates(50, 0.2, step, 0)
        common = torch.stack([island[at] for island in islands]).mean(0)
        for island in islands:
            sparta.average(island, at, common)
    assert all(torch.allclose(island, mean, atol=1e-6) for island in islands)


@given(st.integers(1, 40), st.floats(0.05, 1.0), st.integers(0, 50))
def test_clients_are_sampled_without_asking_and_stably(
    count: int, share: float, round_: int
) -> None:
    clients = [f"island {number}" for number in range(count)]
    chosen = federated.sampled(clients, share, round_, seed=1)
    assert len(chosen) == math.ceil(share * count)
    assert set(federated.sampled(clients[::-1], share, round_, seed=1)) == set(chosen)
    one_less = federated.sampled(clients[1:], share, round_, seed=1)
    assert len(set(one_less) - set(chosen)) <= 1


def test_every_client_has_its_turn() -> None:
    clients = [str(number) for number in range(10)]
    times = [0] * 10
    for round_ in range(400):
        for client in federated.sampled(clients, 0.3, round_, seed=0):
            times[int(client)] += 1
    assert min(times) > 80
    assert max(times) < 160
    with pytest.raises(ValueError, match="share"):
        federated.sampled(clients, 0.0, 0, 0)


def test_branches_merge_by_tokens() -> None:
    merged = federated.merged_branches([torch.zeros(3), torch.ones(3)], [100, 300])
    assert torch.allclose(merged, torch.full((3,), 0.75))
    with pytest.raises(ValueError, match="token"):
        federated.merged_branches([torch.zeros(3)], [0])


def test_powersgd_finds_a_matrix_of_its_rank_and_islands_add_up_to_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    thin = torch.randn(3, 20, 2, generator=generator), torch.randn(2, 15, generator=generator)
    islands = thin[0] @ thin[1]  # three matrices in one common row space
    factor = lowrank.first_factor(15, 4, seed=1)
    for _ in range(2):
        basis = lowrank.orthogonal(torch.stack([lowrank.left(m, factor) for m in islands]).mean(0))
        factor = torch.stack([lowrank.right(m, basis) for m in islands]).mean(0)
    assert torch.allclose(lowrank.product(basis, factor), islands.mean(0), atol=1e-4)


def test_powersgd_with_feedback_loses_nothing_for_ever() -> None:
    """The sum of what was applied approaches the sum of what was meant."""
    matrix = torch.randn(24, 16, generator=torch.Generator().manual_seed(2))
    error, applied = torch.zeros_like(matrix), torch.zeros_like(matrix)
    factor = lowrank.first_factor(16, 2, seed=0)
    for _ in range(200):
        meant = matrix + error
        basis = lowrank.orthogonal(lowrank.left(meant, factor))
        factor = lowrank.right(meant, basis)
        found = lowrank.product(basis, factor)
        error, applied = meant - found, applied + found
    assert (applied / 200 - matrix).norm() < 0.1 * matrix.norm()


@given(st.integers(1, 6), st.integers(0, 100))
def test_gram_and_schmidt_give_orthonormal_columns_or_zero(rank: int, seed: int) -> None:
    factor = torch.randn(12, rank, generator=torch.Generator().manual_seed(seed))
    factor[:, -1] = factor[:, 0] * 2  # depends on the first, unless it is the first
    basis = lowrank.orthogonal(factor)
    wanted = torch.eye(rank)
    if rank > 1:
        wanted[-1, -1] = 0.0
    assert torch.allclose(basis.T @ basis, wanted, atol=1e-5)


def sign(values: torch.Tensor) -> torch.Tensor:
    return torch.sign(values) * values.abs().mean()


def test_one_bit_adam_with_a_perfect_codec_is_adam_with_frozen_second_moments() -> None:
    generator = torch.Generator().manual_seed(0)
    second, params = torch.rand(9, generator=generator) + 0.1, torch.zeros(9)
    states = [onebit.init(torch.zeros(9), second) for _ in range(3)]
    momentum, reference = torch.zeros(9), torch.zeros(9)
    for _ in range(5):
        gradients = torch.randn(3, 9, generator=generator)
        sent = [onebit.to_send(s, g, 0.9) for s, g in zip(states, gradients, strict=True)]
        common = onebit.merged(torch.stack(sent).mean(0), torch.zeros(9), lambda x: x)
        for state, meant in zip(states, sent, strict=True):
            onebit.sent(state, meant, meant)
            state.momentum.copy_(common)
        onebit.step(states[0], common, params, lr=0.1)
        momentum = 0.9 * momentum + 0.1 * gradients.mean(0)
        reference -= 0.1 * momentum / (second.sqrt() + 1e-8)
    assert torch.allclose(params, reference, atol=1e-5)


def test_one_bit_adam_loses_nothing_but_what_both_errors_hold() -> None:
    generator = torch.Generator().manual_seed(1)
    states = [onebit.init(torch.zeros(9), torch.ones(9)) for _ in range(2)]
    server, meant_in_all, applied = torch.zeros(9), torch.zeros(9), torch.zeros(9)
    for _ in range(50):
        coded = []
        for state in states:
            before = state.error.clone()
            meant = onebit.to_send(state, torch.randn(9, generator=generator), 0.9)
            meant_in_all += (meant - before) / 2
            coded.append(sign(meant))
            onebit.sent(state, meant, coded[-1])
        common = onebit.merged(torch.stack(coded).mean(0), server, sign)
        applied += common
        for state in states:
            state.momentum.copy_(common)
    held = server + sum(state.error for state in states) / 2
    assert torch.allclose(applied + held, meant_in_all, atol=1e-3)


def test_h_follows_from_what_would_be_waited() -> None:
    fast = knobs.inner_steps(0.01, 1.0)
    assert (fast.inner_steps, fast.exposed < 0.01) == (20, True)
    slow = knobs.inner_steps(10.0, 1.0)
    assert slow.inner_steps == 190
    assert slow.exposed == pytest.approx(0.05)
    assert knobs.inner_steps(10.0, 1.0, overlap_steps=10).inner_steps == 20
    none = knobs.inner_steps(1000.0, 1.0)
    assert none.inner_steps == 500
    assert none.exposed > 0.05
    assert "coarser" in none.why
    with pytest.raises(ValueError, match="no H"):
        knobs.inner_steps(1.0, 0.0)
