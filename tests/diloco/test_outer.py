"""The outer optimizer: torch's rule, and the same bits however the work is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from diloco.outer import OuterState, carried, init, outer_rates, update

N = 300_007


def vectors(count: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters, momentum and D, with zeros, subnormals and large values among them."""
    random = torch.Generator().manual_seed(0)
    theta, v, d = (torch.randn(count, generator=random) * s for s in (1.0, 1e-2, 1e-3))
    d[::97] = 0
    v[::89] = 1e-40
    theta[::101] *= 1e20
    return theta, v, d


def stepped(lr: float = 0.7, momentum: float = 0.9, **kwargs: int) -> tuple[Tensor, Tensor]:
    theta, v, d = vectors()
    untouched = d.clone()
    update(OuterState(v), d, theta, lr=lr, momentum=momentum, **kwargs)
    assert torch.equal(d, untouched)
    return theta, v


def bits(*tensors: Tensor) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in tensors]


def test_follows_torch_sgd_over_rounds() -> None:
    theta, _, _ = vectors(1000)
    theta.clamp_(-2, 2)
    reference = torch.nn.Parameter(theta.clone())
    sgd = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    state = init(theta)
    for round_ in range(20):
        d = torch.randn(1000, generator=torch.Generator().manual_seed(round_))
        reference.grad = d.clone()
        sgd.step()
        update(state, d, theta, lr=0.7, momentum=0.9)
    torch.testing.assert_close(theta, reference.detach(), rtol=1e-5, atol=1e-5)


def test_equals_numpy_float32_bit_for_bit() -> None:
    theta, v, d = (x.numpy().copy() for x in vectors())
    mu, eta = np.float32(0.87), np.float32(0.71)
    v = v * mu + d
    theta = theta - (v * mu + d) * eta
    got_theta, got_v = stepped(lr=0.71, momentum=0.87)
    assert bits(got_theta, got_v) == [theta.tobytes(), v.tobytes()]


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("tile", [1, 4096, 65_537, 10**9])
def test_threads_and_chunks_do_not_change_a_bit(threads: int, tile: int) -> None:
    count = 2000 if tile == 1 else N
    theta, v, d = (x[:count].clone() for x in vectors())
    expected = theta.clone(), v.clone()
    update(OuterState(expected[1]), d, expected[0], lr=0.7, momentum=0.9)
    torch.set_num_threads(threads)
    update(OuterState(v), d, theta, lr=0.7, momentum=0.9, tile=tile)
    assert bits(theta, v) == bits(*expected)


@pytest.mark.parametrize("offset", [1, 3, 5, 17])
def test_unaligned_memory_does_not_change_a_bit(offset: int) -> None:
    theta, v, d = (torch.empty(N + offset)[offset:].copy_(x) for x in vectors())
    update(OuterState(v), d, theta, lr=0.7, momentum=0.9)
    assert bits(theta, v) == bits(*stepped())


def test_slice_by_slice_is_the_whole() -> None:
    theta, v, d = vectors()
    for start in range(0, N, 99_991):
        here = slice(start, start + 99_991)
        update(OuterState(v[here]), d[here], theta[here], lr=0.7, momentum=0.9)
    assert bits(theta, v) == bits(*stepped())


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits() -> None:
    theta, v, d = (x.cuda() for x in vectors())
    update(OuterState(v), d, theta, lr=0.7, momentum=0.9)
    assert bits(theta.cpu(), v.cpu()) == bits(*stepped())


def test_without_momentum_and_with_rate_one_it_averages_models() -> None:
    theta = torch.tensor([1.0, 2.0])
    update(init(theta), torch.tensor([0.25, -0.5]), theta, lr=1.0, momentum=0.0)
    assert theta.tolist() == [0.75, 2.5]


@pytest.mark.parametrize(
    "merged", [torch.zeros(3), torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2)]
)
def test_other_shapes_are_refused_before_anything_changes(merged: Tensor) -> None:
    theta = torch.ones(4)
    state = OuterState(torch.ones(4))
    with pytest.raises(ValueError, match="merged"):
        update(state, merged, theta, lr=0.5, momentum=0.5)
    assert theta.tolist() == state.momentum.tolist() == [1.0] * 4


def test_rates_warm_up_linearly_and_stay() -> None:
    spec = {
        "lr": 0.7, "momentum": 0.9, "lr_start": 1.0, "momentum_start": 0.5, "warmup_rounds": 30
    }  # fmt: skip
    assert outer_rates(0, **spec) == (1.0, 0.5)
    assert outer_rates(15, **spec) == pytest.approx((0.85, 0.7))
    assert outer_rates(30, **spec) == outer_rates(10**6, **spec) == (0.7, 0.9)
    rates = [outer_rates(round_, **spec) for round_ in range(31)]
    assert rates == sorted(rates, key=lambda rate: -rate[0])
    assert outer_rates(0, **{**spec, "warmup_rounds": 0}) == (0.7, 0.9)


@pytest.mark.parametrize("steps", [9, 84, 6000])
def test_one_long_round_carries_nobody_far_past_the_optimum(steps: int) -> None:
    """The loss is |θ|, whose steps are of one length: rounds of one step make up for little."""
    each = 0.003
    theta = torch.tensor([each * steps])
    state, farthest = init(theta), 0.0
    for round_ in range(400):
        work = steps if round_ == 0 else 1
        learnt = torch.sign(theta) * torch.clamp(theta.abs(), max=each * work)
        left = carried([work], [steps]) if round_ == 1 else 1.0
        update(state, learnt, theta, lr=0.7, momentum=0.9, carried=left)
        farthest = max(farthest, theta.abs().item())
    assert farthest <= max(0.4 * each * steps, 8 * each)


def test_work_that_is_about_as_much_carries_all_on() -> None:
    found = [carried([work], [800, 800, 1]) for work in (1, 99, 101, 800, 9000)]
    assert found == [1 / 800, 99 / 800, 1.0, 1.0, 1.0]
    assert carried([5], []) == carried([], [5]) == 1.0
