"""What sends little: SPARTA, client sampling, 1-bit Adam; the knob of H."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco import federated, knobs, onebit, optimizers, sparta


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
            island[at] = common
    assert all(torch.allclose(island, mean, atol=1e-6) for island in islands)


@given(st.integers(1, 40), st.floats(0.05, 1.0), st.integers(0, 50))
def test_clients_are_sampled_without_asking_and_stably(
    count: int, share: float, round_: int
) -> None:
    clients = [f"island {number}" for number in range(count)]
    chosen = federated.sampled(clients, share, round_, seed=1)
    assert len(chosen) == math.ceil(round(share * count, 9))
    assert set(federated.sampled(clients[::-1], share, round_, seed=1)) == set(chosen)
    one_less = federated.sampled(clients[1:], share, round_, seed=1)
    assert len(set(one_less) - set(chosen)) <= 1


@pytest.mark.parametrize(
    ("count", "share", "wanted"), [(100, 0.07, 7), (50, 0.14, 7), (3, 0.34, 2), (9, 1e-12, 1)]
)
def test_a_whole_number_of_clients_is_not_rounded_up(count: int, share: float, wanted: int) -> None:
    assert len(federated.sampled([str(n) for n in range(count)], share, 0, 0)) == wanted


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


def sign(values: torch.Tensor) -> torch.Tensor:
    return torch.sign(values) * values.abs().mean()


def one_bit_rounds(
    gradients: torch.Tensor, warm: int, coded: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parameters, all momentum that was meant, and all that was applied or is kept as an error.

    ``gradients`` [rounds, islands, n]. After the warm-up each island sends through ``coded``, and
    so does who merges, as the first.
    """
    rule, (_, islands, size) = optimizers.named("onebit-adam"), gradients.shape
    assert rule.brings is not None
    assert rule.end is not None
    params, errors = torch.zeros(size), torch.zeros(islands, size)
    vectors = rule.init(params).vectors
    meant_in_all, applied = torch.zeros(size), torch.zeros(size)
    for step, of_all in enumerate(gradients):
        rates = optimizers.Rates(0.1, 0.9, step + 1, beta2=0.95, epsilon=1e-8, warmup=warm)
        own = of_all.clone()
        for gradient in own:
            rule.brings(vectors, gradient, rates)
        common = own.mean(0)
        if step >= warm:
            meant_in_all += common
            meant = own + errors
            sent = torch.stack([coded(one) for one in meant])
            errors = meant - sent
            merged = sent.mean(0)
            common = coded(merged)
            errors[0] += (merged - common) * islands
            applied += common
        rule.step(vectors, common, params, rates)
        rule.end(vectors, params, rates)
    return params, meant_in_all, applied + errors.mean(0)


def test_one_bit_adam_with_a_perfect_codec_is_adam_with_frozen_second_moments() -> None:
    warm, gradients = 4, torch.randn(9, 3, 9, generator=torch.Generator().manual_seed(0))
    first, second, reference = torch.zeros(9), torch.zeros(9), torch.zeros(9)
    for step, mean in enumerate(gradients.mean(1), 1):
        first = 0.9 * first + 0.1 * mean
        if step <= warm:
            second = 0.95 * second + 0.05 * mean.square()
            right, divisor = 1 - 0.9**step, (second / (1 - 0.95**step)).sqrt() + 1e-8
            reference -= 0.1 * first / right / divisor
        if step == warm:  # what was learnt is corrected for its start at zero, and floored
            first = first / right
            divisor = divisor + onebit.FLOOR * divisor.mean()
        if step > warm:
            reference -= 0.1 * first / divisor
    params, _, _ = one_bit_rounds(gradients, warm, lambda values: values)
    assert torch.allclose(params, reference, atol=1e-5)


def test_one_bit_adam_loses_nothing_but_what_errors_hold() -> None:
    gradients = torch.randn(50, 2, 9, generator=torch.Generator().manual_seed(1))
    # the momentum that islands mean follows from what was applied, not from what they meant
    _, meant, kept = one_bit_rounds(gradients, 3, sign)
    assert torch.allclose(meant, kept, atol=1e-3)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1001])
def test_a_mean_by_halves_is_the_mean(count: int) -> None:
    values = torch.rand(count, generator=torch.Generator().manual_seed(count))
    assert onebit.mean(values) == pytest.approx(values.double().mean().item(), rel=1e-6)


def test_h_follows_from_what_would_be_waited() -> None:
    fast = knobs.inner_steps(0.01, 1.0)
    assert (fast.inner_steps, fast.exposed < 0.01) == (20, True)
    slow = knobs.inner_steps(10.0, 1.0)
    assert slow.inner_steps == 190
    assert slow.exposed == pytest.approx(0.05)
    assert knobs.inner_steps(10.0, 1.0, overlap_steps=10).inner_steps == 20
    several = knobs.inner_steps(10.0, 1.0, overlap_steps=5, transfers=3)  # each is waited for
    assert (several.inner_steps, several.exposed) == (285, pytest.approx(0.05))
    none = knobs.inner_steps(1000.0, 1.0)
    assert none.inner_steps == 500
    assert none.exposed > 0.05
    assert "coarser" in none.why
    with pytest.raises(ValueError, match="no H"):
        knobs.inner_steps(1.0, 0.0)


def test_what_is_hidden_is_not_waited_for_and_what_is_hopeless_has_a_bound() -> None:
    hidden = knobs.inner_steps(1.0, 1.0, overlap_steps=10)
    assert (hidden.inner_steps, hidden.exposed) == (20, 0.0)
    assert knobs.inner_steps(1e300, 1e-300).inner_steps == 500
    whole = knobs.inner_steps(100.0, 1.0, overlap_steps=None)  # each step hides one more
    assert (whole.inner_steps, whole.exposed) == (95, pytest.approx(0.05))
    short = knobs.inner_steps(10.0, 1.0, overlap_steps=None)
    assert (short.inner_steps, short.exposed) == (20, 0.0)


def test_one_bit_adam_comes_to_the_same_bits_everywhere() -> None:
    """Products and quotients are rounded one by one, as numpy does it."""
    values = torch.rand(4, 1003, generator=torch.Generator().manual_seed(3))
    first, gradient, common, divisor = values
    one, beta1, rate = np.float32(1 - 0.9), np.float32(0.9), np.float32(0.3)
    own = gradient.numpy() * one + first.numpy() * beta1
    assert onebit.own_momentum(first, gradient.clone(), 0.9).numpy().tolist() == own.tolist()
    params = torch.ones(1003)
    stepped = params.numpy() - common.numpy() * rate / divisor.numpy()
    onebit.step(first, divisor, common, params, lr=0.3)
    assert params.numpy().tolist() == stepped.tolist()
    assert torch.equal(first, common)


def test_what_never_had_a_gradient_is_not_divided_by_nothing() -> None:
    assert onebit.freeze(torch.zeros(5), 1e-3).tolist() == torch.full((5,), 1e-3).tolist()


def test_sparta_refuses_more_coordinates_than_its_products_have_room_for() -> None:
    """Beyond, a product of two of them would wrap around, and coordinates come twice."""
    last = sparta.steps_a_walk(sparta.MOST, 1e-9) - 1
    first, second = (sparta.coordinates(sparta.MOST, 1e-9, step, 0) for step in (0, last))
    stride = int(first[1] - first[0])
    assert int(second[1] - second[0]) % sparta.MOST == stride % sparta.MOST
    assert (int(second[1]) + stride) % sparta.MOST == int(first[0])  # the walk is over
    with pytest.raises(ValueError, match="more than"):
        sparta.steps_a_walk(sparta.MOST + 1, 0.5)


def test_one_bit_adam_decays_weights_also_after_its_warm_up() -> None:
    rule = optimizers.named("onebit-adam")
    params = torch.ones(3)
    vectors = rule.init(params).vectors
    for step in range(1, 4):
        rates = optimizers.Rates(0.1, 0.9, step, decay=0.5, warmup=1)
        rule.take(vectors, torch.zeros(3), params, rates)
        assert params.tolist() == pytest.approx([0.95**step] * 3)
