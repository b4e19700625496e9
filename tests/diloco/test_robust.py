"""Robust merging: weights from the Gram matrix, and attackers on them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from robust_kit import ATTACKS, N, attacked, cosine, gram, honest
from torch import Tensor

from diloco import robust

Rule = Callable[[Tensor, Sequence[float]], list[float]]
RULES: list[Rule] = [
    robust.geometric_median,
    robust.centered_clip,
    robust.norm_clip,
    robust.open_rule,
]
ITERATED = RULES[:2]


def merged(rule: Rule, inputs: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    found = rule(gram(inputs), weights or [1.0] * len(inputs))
    result: Tensor = torch.tensor(found, dtype=torch.float64) @ inputs
    return result


# --- equal to the algorithms on whole vectors -----------------------------------------------------


def amid(inputs: Tensor) -> list[int]:
    """The inputs around which the smallest ball holds more than half of them.

    Two of them where each is the farthest in the other's ball: rounding decides between those.
    """
    apart = (inputs[:, None] - inputs[None]).norm(dim=2)
    reach = apart.sort(dim=1).values[:, len(inputs) // 2]
    return [int(one) for one in (reach <= reach.min() * (1 + 1e-12)).nonzero()]


def direct(rule: Rule, inputs: Tensor, weights: Sequence[float], amid: int) -> Tensor:
    """The same algorithm as its paper has it: on vectors, without a Gram matrix."""
    share = torch.tensor(robust.votes(weights), dtype=torch.float64)
    half = len(inputs) // 2
    apart = (inputs[:, None] - inputs[None]).norm(dim=2)
    reach = apart.sort(dim=1).values[:, half]
    z = inputs[apart[amid].sort(stable=True).indices[: half + 1]].mean(0)
    typical = inputs.norm(dim=1).sort().values[half].item()
    spread = max(robust.SMOOTHING * reach[amid].item(), robust.RESOLUTION * typical)
    if rule is robust.geometric_median:
        for _ in range(robust.MEDIAN_STEPS):
            pull = share / (inputs - z).norm(dim=1).clamp_min(spread)
            z = (pull[:, None] * inputs).sum(0) / pull.sum()
        return z
    for _ in range(robust.CLIP_STEPS):
        away = (inputs - z).norm(dim=1).clamp_min(spread)
        factor = (away.sort().values[half] / away).clamp_max(1.0)
        z = z + ((share * factor)[:, None] * (inputs - z)).sum(0)
    return z


@pytest.mark.parametrize("rule", ITERATED)
@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 12),
    size=st.integers(16, 3000),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([1e-8, 1.0, 1e10]),
    outliers=st.floats(1e-3, 1e3),
)
@example(count=2, size=16, seed=0, scale=1.0, outliers=1.0)
@example(count=7, size=323, seed=11011, scale=1.0, outliers=1.0)  # two in each other's ball
def test_gram_space_equals_the_direct_algorithm(
    rule: Rule, count: int, size: int, seed: int, scale: float, outliers: float
) -> None:
    inputs = scale * honest(count, size, seed=seed)
    inputs[: count // 3] *= -outliers
    random = torch.Generator().manual_seed(seed)
    weights = (torch.rand(count, generator=random) + 0.1).tolist()
    found = merged(rule, inputs, weights)
    wanted = [direct(rule, inputs, weights, start) for start in amid(inputs)]
    assert any((found - want).norm() <= 3e-7 * want.norm() for want in wanted)


@pytest.mark.parametrize("rule", ITERATED)
def test_partial_matrices_add_up_to_the_whole_vectors(rule: Rule) -> None:
    inputs = honest(8)
    inputs[5:] *= -3
    parts = sum(gram(piece) for piece in inputs.float().split(3001, dim=1))
    assert isinstance(parts, Tensor)
    whole = rule(gram(inputs), [1.0] * 8)
    assert rule(parts, [1.0] * 8) == pytest.approx(whole, rel=1e-6)


def test_geometric_median_is_where_the_sum_of_distances_is_least() -> None:
    inputs = honest(7, 500)
    inputs[:3] *= 40
    z = merged(robust.geometric_median, inputs)
    least = (inputs - z).norm(dim=1).sum()
    random = torch.Generator().manual_seed(1)
    for scale in (1e-3, 1e-2, 1.0):
        for _ in range(20):
            other = z + scale * torch.randn(500, generator=random, dtype=torch.float64)
            assert (inputs - other).norm(dim=1).sum() > least - 1e-9


def test_a_median_that_is_one_of_the_inputs_is_met_to_a_thousandth_of_how_far_they_lie() -> None:
    """Where smoothing leaves it: the others pull with 2 cos 67.5°, and it holds them that near."""
    inputs = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-(0.5**0.5), 0.5**0.5]], dtype=torch.float64)
    z = merged(robust.geometric_median, inputs)
    assert z.norm().item() == pytest.approx(1e-3 * 2 * math.cos(math.radians(67.5)), rel=0.01)


@pytest.mark.parametrize("rule", ITERATED)
def test_what_all_have_in_common_hides_nobody_who_is_far_from_the_others(rule: Rule) -> None:
    """By a thousandth of its length and less, which a Gram matrix in double still tells."""
    apart = torch.tensor([0.0, 0.0625, -0.03125, 1.0, 3.0], dtype=torch.float64)
    inputs = torch.stack((apart, torch.full((5,), 1e3, dtype=torch.float64)), dim=1)
    alone = merged(rule, apart[:, None])[0].item()
    assert merged(rule, inputs)[0].item() == pytest.approx(alone, abs=1e-6)


# --- invariants -----------------------------------------------------------------------------------

matrices = st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(0, 2**32)).map(
    lambda drawn: honest(drawn[0], drawn[1], seed=drawn[2])
)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=40, deadline=None)
@given(inputs=matrices, data=st.data())
def test_coefficients_are_shares(rule: Rule, inputs: Tensor, data: st.DataObject) -> None:
    weight = st.one_of(st.just(0.0), st.floats(1e-3, 1e6))
    weights = data.draw(st.lists(weight, min_size=len(inputs), max_size=len(inputs)))
    found = rule(gram(inputs), weights)
    assert all(math.isfinite(c) and c >= 0 for c in found)
    assert math.fsum(found) <= 1 + 1e-9
    assert all(c == 0 for c, weight in zip(found, weights, strict=True) if weight == 0)
    if rule in ITERATED and any(weights):
        assert math.fsum(found) == pytest.approx(1.0)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 9), order=st.randoms())
def test_the_order_of_inputs_does_not_matter(
    rule: Rule, seed: int, count: int, order: object
) -> None:
    inputs = honest(count, 200, seed=seed)
    weights = [float(index + 1) for index in range(count)]
    moved = list(range(count))
    order.shuffle(moved)  # type: ignore[attr-defined]
    found = rule(gram(inputs), weights)
    again = rule(gram(inputs[moved]), [weights[index] for index in moved])
    assert again == pytest.approx([found[index] for index in moved], abs=1e-9)


@pytest.mark.parametrize("rule", ITERATED)
def test_alike_inputs_are_merged_as_their_mean(rule: Rule) -> None:
    inputs = honest(8)
    assert cosine(merged(rule, inputs), inputs.mean(0)) >= 0.94


@pytest.mark.parametrize("rule", RULES)
def test_claimed_tokens_count_as_much_as_the_median_ones(rule: Rule) -> None:
    inputs = honest(5)
    inputs[4] *= -3
    assert rule(gram(inputs), [1.0, 1.0, 1.0, 1.0, 2.0**40]) == rule(gram(inputs), [1.0] * 5)


def test_votes() -> None:
    assert robust.votes([1.0, 2.0, 900.0]) == [0.2, 0.4, 0.4]
    assert robust.votes([0.0, 3.0]) == [0.0, 1.0]
    assert robust.votes([0.0, 0.0]) == [0.0, 0.0]
    assert robust.votes([]) == []
    with pytest.raises(ValueError, match="weights"):
        robust.votes([-1.0])


# --- the same bits everywhere ---------------------------------------------------------------------


def bits(count: int, rule: Rule) -> str:
    """The coefficients for a matrix that arises without any library's sums."""
    size = torch.arange(count * count, dtype=torch.float64).reshape(count, count)
    low = (size * 0.7390851332151607).frac() - 0.5
    inputs = torch.cat([low, torch.eye(count, dtype=torch.float64)], dim=1)
    products = torch.zeros(count, count, dtype=torch.float64)
    for column in inputs.T:
        products += column[:, None] * column
    return " ".join(c.hex() for c in rule(products, [1.0 + i % 3 for i in range(count)]))


def all_bits() -> str:
    return "\n".join(bits(count, rule) for count in (3, 8, 61) for rule in RULES)


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_do_not_change_a_bit(threads: int) -> None:
    alone = all_bits()
    torch.set_num_threads(threads)
    assert all_bits() == alone


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_the_width_of_the_processor_does_not_change_a_bit(capability: str) -> None:
    """What torch picks by the machine it runs on, picked by hand."""
    other = subprocess.run(
        [sys.executable, "-c", "import test_robust; print(test_robust.all_bits())"],
        env=os.environ
        | {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": "tests/diloco:tests/kits:."},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == all_bits()


# --- what makes no sense, or hardly ---------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_identical_inputs(rule: Rule, count: int) -> None:
    inputs = honest(1).expand(count, N).contiguous()
    assert torch.allclose(merged(rule, inputs), inputs[0], rtol=1e-9)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [2, 3, 7])
def test_inputs_that_differ_by_less_than_rounding_tells(rule: Rule, count: int) -> None:
    """By their products some are at less than no distance from each other, or from the middle."""
    for seed in range(8):
        inputs = honest(1, 50) + 1e-9 * honest(count, 50, seed=seed)
        result = merged(rule, inputs, [1.0 + index for index in range(count)])
        assert torch.allclose(result, inputs[0], rtol=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_zero_inputs(rule: Rule, count: int) -> None:
    found = rule(torch.zeros(count, count, dtype=torch.float64), [1.0] * count)
    assert math.fsum(found) == pytest.approx(1.0)


@pytest.mark.parametrize("rule", RULES)
def test_most_stood_still(rule: Rule) -> None:
    inputs = honest(5)
    inputs[:3] = 0
    result = merged(rule, inputs)
    assert result.norm() <= 0.5 * inputs[3].norm()
    assert result.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_nobody_has_a_vote(rule: Rule) -> None:
    assert rule(gram(honest(3)), [0.0, 0.0, 0.0]) == [0.0, 0.0, 0.0]
    assert rule(torch.zeros(0, 0, dtype=torch.float64), []) == []


@pytest.mark.parametrize("rule", RULES)
def test_who_has_no_vote_moves_nothing(rule: Rule) -> None:
    """Not by what it sends, and not by how long that is."""
    inputs = torch.cat((honest(5), 1e6 * honest(4)))
    inputs[0] *= 3
    products = gram(inputs)  # of fewer rows they may have other last bits
    found = rule(products, [1.0] * 5 + [0.0] * 4)
    assert found == [*rule(products[:5, :5], [1.0] * 5), *[0.0] * 4]


def test_of_two_the_longer_is_shrunk() -> None:
    inputs = honest(2, noise=0.1)
    inputs[1] *= 10
    found = robust.open_rule(gram(inputs), [1.0, 1.0])
    lengths = [c * one.norm().item() for c, one in zip(found, inputs, strict=True)]
    assert lengths[1] == pytest.approx(lengths[0] * 5.5, rel=0.02)  # to their median norm


@pytest.mark.parametrize(
    ("count", "rule"),
    [
        (1, robust.norm_clip),
        (2, robust.norm_clip),
        (3, robust.centered_clip),
        (4, robust.centered_clip),
        (5, robust.geometric_median),
    ],
)
def test_the_rule_among_strangers_follows_from_how_many_have_a_vote(count: int, rule: Rule) -> None:
    inputs = honest(count + 2)
    inputs[0] *= 1.5
    weights = [1.0] * count + [0.0, 0.0]
    assert robust.open_rule(gram(inputs), weights) == rule(gram(inputs), weights)


@pytest.mark.parametrize("rule", RULES)
def test_matrices_that_are_refused(rule: Rule) -> None:
    good = gram(honest(3))
    with pytest.raises(ValueError, match="float64 Gram"):
        rule(good, [1.0] * 4)
    with pytest.raises(ValueError, match="float64 Gram"):
        rule(good.float(), [1.0] * 3)
    with pytest.raises(ValueError, match="infinite"):
        rule(good * math.inf, [1.0] * 3)
    with pytest.raises(ValueError, match="negative"):
        rule(-good, [1.0] * 3)


@pytest.mark.parametrize("rule", RULES)
def test_huge_and_tiny_inputs(rule: Rule) -> None:
    """From what int4 flushes to zero up to what fp32 holds."""
    for scale in (1e-36, 1e36):
        inputs = scale * honest(6)
        assert cosine(merged(rule, inputs) / scale, honest(6).mean(0)) > 0.94


# --- attackers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [*ITERATED, robust.open_rule])
@pytest.mark.parametrize("attack", ATTACKS)
def test_two_of_eight_lie(rule: Rule, attack: str) -> None:
    inputs, mean = attacked(attack)
    result = merged(rule, inputs)
    assert cosine(result, mean) >= 0.95
    assert 0.65 < result.norm() / mean.norm() < 1.25


@pytest.mark.parametrize("rule", ITERATED)
def test_three_of_eight_lie(rule: Rule) -> None:
    inputs, mean = attacked("turned", liars=3)
    assert cosine(merged(rule, inputs), mean) >= 0.92


@pytest.mark.parametrize("rule", [robust.norm_clip])
@pytest.mark.parametrize("attack", ATTACKS)
def test_clipped_norms_bound_what_two_of_eight_do(rule: Rule, attack: str) -> None:
    inputs, mean = attacked(attack)
    result = merged(rule, inputs)
    assert cosine(result, mean) >= 0.9
    assert 0.5 < result.norm() / mean.norm() < 1.25


def test_the_mean_is_lost_to_two_of_eight() -> None:
    inputs, mean = attacked("turned and loud")
    assert cosine(inputs.mean(0), mean) < 0


@pytest.mark.parametrize("rule", ITERATED)
def test_who_lies_is_seen_by_its_weight(rule: Rule) -> None:
    inputs, _ = attacked("turned and loud")
    found = rule(gram(inputs), [1.0] * 8)
    assert max(found[6:]) < 0.01 * min(found[:6])


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
def test_who_is_far_from_all_has_no_part_among_strangers(noise: float) -> None:
    inputs, _ = attacked("turned", noise=noise)
    found = robust.open_rule(gram(inputs), [1.0] * 8)
    assert 0 < max(found[6:]) < 1e-3 * min(found[:6])
    alone = robust.geometric_median(gram(inputs[:6]), [1.0] * 6)
    assert found[:6] == pytest.approx(alone, rel=0.01)


def test_a_slow_or_eager_island_is_not_far() -> None:
    inputs = honest(8)
    inputs[0] *= 0.25  # of a quarter of the steps
    inputs[1] *= 1.5
    found = robust.open_rule(gram(inputs), [1.0] * 8)
    assert found == robust.geometric_median(gram(inputs), [1.0] * 8)


@pytest.mark.parametrize("liars", [1, 2])
def test_a_lie_told_in_one_part_only_is_judged_with_the_rest(liars: int) -> None:
    """Merged part by part the attacker would have its full weight in all parts but that one."""
    inputs, _ = attacked("silent", liars=liars)
    inputs[8 - liars :] = honest(8)[8 - liars :]
    inputs[8 - liars :, : N // 8] *= -1000
    found = robust.geometric_median(gram(inputs), [1.0] * 8)
    assert max(found[8 - liars :]) < 0.01 * min(found[: 8 - liars])
