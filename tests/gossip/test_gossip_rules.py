"""Mixing between neighbours: what must stay, and what must shrink."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from noloco_kit import noloco
from pydantic import ValidationError

from bootstrap.manifest_gossip import Gossip
from diloco import mixing, outer


def spread(vectors: list[torch.Tensor]) -> float:
    """Mean square distance from their mean."""
    stack = torch.stack(vectors)
    return (stack - stack.mean(0)).square().mean().item()


def pairs(count: int, chance: random.Random) -> list[tuple[int, int]]:
    order = chance.sample(range(count), count)
    return list(zip(order[::2], order[1::2], strict=False))


def test_noloco_with_all_alike_is_heavy_ball_on_the_common_progress() -> None:
    """Two islands that do the same: φ moves as one model with momentum α and lr β would."""
    slow, momentum = torch.zeros(10), torch.zeros(10)
    params = torch.nn.Parameter(torch.zeros(10))
    reference = torch.optim.SGD([params], lr=mixing.BETA, momentum=mixing.ALPHA)
    for seed in range(8):
        progress = torch.randn(10, generator=torch.Generator().manual_seed(seed))
        fast = slow + progress
        noloco(slow, momentum, fast, fast.clone(), alpha=mixing.ALPHA, beta=mixing.BETA)
        params.grad = -progress
        reference.step()
        assert torch.allclose(slow, params.detach(), atol=1e-5)


def rest(alpha: float, gamma: float) -> float:
    """The spread left of 16 islands that only meet, from 1."""
    chance, generator = random.Random(3), torch.Generator().manual_seed(3)
    slow = [torch.randn(400, generator=generator) for _ in range(16)]
    momenta = [torch.zeros(400) for _ in slow]
    for _ in range(60):
        for a, b in pairs(16, chance):
            one, two = slow[a].clone(), slow[b].clone()
            noloco(slow[a], momenta[a], one, two, alpha=alpha, beta=gamma)
            noloco(slow[b], momenta[b], two, one, alpha=alpha, beta=gamma)
    return spread(slow)


def test_nolocos_condition_tells_meeting_from_drifting() -> None:
    mixing.check_noloco(mixing.ALPHA, mixing.BETA, mixing.BETA)
    assert rest(mixing.ALPHA, mixing.BETA) < 1e-3
    assert rest(mixing.ALPHA, 1.9) > 1.0
    with pytest.raises(ValueError, match="drift apart"):
        mixing.check_noloco(mixing.ALPHA, 1.9, 1.9)


@pytest.mark.parametrize(
    ("alpha", "beta", "gamma", "group", "reason"),
    [
        (0.5, 0.4, 0.4, 2, "not between 0.500"),
        (0.5, 0.7, 0.8, 2, "two tensors"),
        (1.0, 0.7, 0.7, 2, r"\[0, 1\)"),
        (0.5, 0.7, 0.7, 1, "nobody"),
        (0.5, 1.2, 1.2, 8, "not between"),
    ],
)
def test_nolocos_coefficients_are_refused_with_the_reason(
    alpha: float, beta: float, gamma: float, group: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        mixing.check_noloco(alpha, beta, gamma, group)


def test_a_partner_that_vanished_costs_no_progress() -> None:
    slow, momentum, fast = torch.zeros(5), torch.zeros(5), torch.ones(5)
    noloco(slow, momentum, fast, fast, alpha=0.5, beta=0.7)
    assert torch.allclose(slow, torch.full((5,), 0.7))


@dataclass
class Pushing:
    """An island of push-sum; ``coarse``: what it sends has seven bits of mantissa."""

    z: torch.Tensor
    w: float = 1.0
    coarse: bool = False

    def share(self, receivers: int) -> tuple[torch.Tensor, float]:
        sent = self.z.bfloat16().to(self.z.dtype) if self.coarse else self.z.clone()
        self.w = mixing.give_shares(self.z, self.w, sent, receivers)
        return sent, self.w

    def take(self, sent: torch.Tensor, w: float) -> None:
        self.w = mixing.take_share(self.z, self.w, sent, w)


@settings(max_examples=15)
@given(st.integers(3, 6), st.integers(0, 100), st.floats(0, 0.7), st.booleans())
def test_push_sum_is_exact_where_what_was_lost_comes_back(
    count: int, seed: int, loss: float, coarse: bool
) -> None:
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    values = [torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(count)]
    mean = torch.stack(values).mean(0)
    nodes = [Pushing(value, coarse=coarse) for value in values]
    for _ in range(120):
        for sender, node in enumerate(nodes):
            others = chance.sample([i for i in range(count) if i != sender], 2)
            sent = node.share(2)
            for receiver in others:
                (node if chance.random() < loss else nodes[receiver]).take(*sent)
    assert math.isclose(sum(node.w for node in nodes), count, rel_tol=1e-9)
    assert all(node.w > 0 for node in nodes)
    assert torch.allclose(sum(node.w * node.z for node in nodes) / count, mean)
    near = 0.1 if coarse else 1e-5  # the mean of all is kept whatever the letters lose
    assert all(torch.allclose(node.z, mean, atol=near) for node in nodes)


def test_push_sum_without_return_stays_within_what_was_there() -> None:
    """Mass that is lost takes its weight along: the estimate is still a mean of the values."""
    chance = random.Random(0)
    nodes = [Pushing(torch.full((3,), float(value))) for value in range(4)]
    for _ in range(60):
        for sender, node in enumerate(nodes):
            sent = node.share(1)
            if chance.random() > 0.3:
                nodes[(sender + chance.randint(1, 3)) % 4].take(*sent)
    found = torch.stack([node.z for node in nodes])
    assert found.min() > 0.0
    assert found.max() < 3.0
    assert spread(list(found)) < 1e-3


def test_more_exchanges_where_islands_disagree_by_more_than_they_move() -> None:
    assert mixing.extra_exchanges(1.0, 2.0) == 0
    assert mixing.extra_exchanges(2.0, 1.0) == 1
    assert mixing.extra_exchanges(3.9, 1.0) == 2
    assert [mixing.extra_exchanges(2.0**k, 1.0) for k in range(1, 9)] == list(range(1, 9))
    assert Gossip(extra=mixing.MOST_EXTRA).extra == mixing.MOST_EXTRA
    with pytest.raises(ValidationError):  # as many as a run may allow
        Gossip(extra=mixing.MOST_EXTRA + 1)
    assert mixing.extra_exchanges(1e9, 1.0) == mixing.MOST_EXTRA
    assert mixing.extra_exchanges(1.0, 0.0) == mixing.MOST_EXTRA
    assert mixing.extra_exchanges(0.0, 0.0) == 0
    with pytest.raises(ValueError, match="no exchanges"):
        mixing.extra_exchanges(float("nan"), 1.0)


def test_what_a_codec_loses_adds_no_exchanges() -> None:
    """They would add as much noise as they take away."""
    assert mixing.extra_exchanges(2.0, 0.0, 3.0, 1.0) == 0
    assert mixing.extra_exchanges(2.5, 0.2, 3.0, 1.0) == 0
    assert mixing.extra_exchanges(2.7, 0.2, 3.0, 1.0) == 1
    assert mixing.extra_exchanges(6.0, 1.0, 3.0, 0.0) == 1
    assert mixing.extra_exchanges(6.0, 1.0, 0.5, 1.0) == mixing.extra_exchanges(6.0, 1.0, 0.5)


def steady_disagreement(alpha: float, beta: float) -> float:
    """Where random pairs keep islands whose inner steps have nothing in common.

    The mean square distance of θ to the mean over that of what H inner steps moved an island,
    before the pairs meet, in a large swarm. With δ the islands' independent progress, φ and m as
    distances to their means, and a partner drawn anew, second moments per element follow

        m' = α m + β ((φ_j − φ_i) / 2 + (δ_i + δ_j) / 2)        φ' = φ + m'

    and come to rest at E φ² = E δ² · β (1 + α) / (2 (1 − α²) − β). Plain averaging is α = 0, β = 1.
    """
    return 1 + beta * (1 + alpha) / (2 * (1 - alpha * alpha) - beta)


@pytest.mark.parametrize(("alpha", "beta"), [(mixing.ALPHA, mixing.BETA), (0.0, 1.0)])
def test_where_pairs_keep_islands_that_have_nothing_in_common(alpha: float, beta: float) -> None:
    count, chance = 64, random.Random(2)
    generator = torch.Generator().manual_seed(2)
    slow = [torch.zeros(300) for _ in range(count)]
    momenta, found = [torch.zeros(300) for _ in slow], []
    for round_ in range(60):
        fast = [phi + torch.randn(300, generator=generator) for phi in slow]
        if round_ >= 20:
            found.append(spread(fast))
        for a, b in pairs(count, chance):
            noloco(slow[a], momenta[a], fast[a], fast[b], alpha=alpha, beta=beta)
            noloco(slow[b], momenta[b], fast[b], fast[a], alpha=alpha, beta=beta)
    expected = steady_disagreement(alpha, beta)
    assert sum(found) / len(found) == pytest.approx(expected, rel=0.05)


def test_the_default_bound_lets_swarms_alone_that_are_well() -> None:
    healthy = [steady_disagreement(*one) for one in ((mixing.ALPHA, mixing.BETA), (0, 1))]
    assert max(healthy) == pytest.approx(2.3125)
    assert Gossip().bound > 1.25 * max(healthy)  # sketches err by 9 % of a square


def test_outer_nesterov_without_momentum_and_lr_one_is_averaging() -> None:
    """What gossip is compared with."""
    base, ends = torch.randn(30), [torch.randn(30) for _ in range(3)]
    mean = torch.stack(ends).mean(0)
    outer.update(outer.init(base), base - mean, base, lr=1.0, momentum=0.0)
    assert torch.allclose(base, mean, atol=1e-6)
