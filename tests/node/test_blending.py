"""What an island that gossips does with vectors: the rules of the papers, and what codecs lose."""

from __future__ import annotations

import pytest
import torch
from noloco_kit import noloco

from diloco.mixing import ALPHA, BETA
from diloco.optimizers import Rates, named
from node.replicas.blending import Blend
from protocols.codecs import RangeCodec

SIZE = 300_000  # more than two chunks
MIXED = ("fp32", "int8")


def blend(seed: int, *, shares: bool = False) -> Blend:
    generator = torch.Generator().manual_seed(seed)
    one = Blend(
        torch.randn(SIZE, generator=generator), RangeCodec("fp32", SIZE - 500), shares=shares
    )
    one.start(one.base + 0.1 * torch.randn(SIZE, generator=generator))
    return one


def exchange(a: Blend, b: Blend, codecs: tuple[str, str] = ("fp32", "fp32")) -> None:
    mine, weight = a.encode(1, codecs[0])
    theirs, other = b.encode(1, codecs[1])
    a.mix([(theirs, other, mine)])
    b.mix([(mine, weight, theirs)])


def test_heavy_ball_over_exchanges_is_noloco():
    a, b = blend(1), blend(2)
    slow, momentum, mine, theirs = a.base.clone(), torch.ones(SIZE), a.fast.clone(), b.fast.clone()
    rule, vectors = named("heavyball"), {"v": torch.ones(SIZE) / -BETA}  # m = -β v
    exchange(a, b)
    a.step(rule, vectors, Rates(BETA, ALPHA))
    noloco(slow, momentum, mine, theirs, alpha=ALPHA, beta=BETA)
    assert torch.allclose(a.base, slow, atol=1e-5)
    assert torch.allclose(-BETA * vectors["v"], momentum, atol=1e-5)


@pytest.mark.parametrize("shares", [False, True])
def test_it_is_known_what_a_codec_loses(shares: bool):
    one, lost = blend(1, shares=shares), {}
    for codec in ("fp32", "bf16", "int8"):
        before = one.fast.clone()
        letter, _ = one.encode(1, codec)
        decoded = torch.empty(SIZE)
        letter.codec.decode(0, letter.data, decoded)
        lost[codec] = (decoded - before).square().mean().item()
        assert one.lost == pytest.approx(lost[codec], rel=1e-4)
    assert lost["fp32"] == 0.0 < lost["bf16"] < lost["int8"] / 10


def test_shares_are_push_sum():
    """As Kempe et al. write it: x and w, of which each receiver gets a third."""
    a, b = blend(1, shares=True), blend(2, shares=True)
    x, w, y, v = a.fast.clone(), 1.0, b.fast.clone(), 1.0
    for _ in range(3):
        data, weight = a.encode(2, "fp32")
        b.mix([(data, weight, None)])
        x, w = x / 3, w / 3
        y, v = y + x, v + w
    assert (a.weight, b.weight) == (pytest.approx(w), pytest.approx(v))
    assert torch.allclose(a.fast, x / w, atol=1e-4)
    assert torch.allclose(b.fast, y / v, atol=1e-4)


def test_several_shares_at_once_are_one_after_the_other():
    a, b, c, d = (blend(seed, shares=True) for seed in (1, 2, 3, 3))
    letters = [(*one.encode(n, "int8"), None) for one, n in ((a, 1), (b, 3))]
    c.mix(letters)
    for letter in letters:
        d.mix([letter])
    assert c.weight == d.weight == pytest.approx(1.75)
    assert torch.allclose(c.fast, d.fast, atol=1e-6)


@pytest.mark.parametrize(
    "codecs", [*((c, c) for c in ("fp32", "bf16", "fp16", "int8")), ("int8", "bf16"), MIXED]
)
@pytest.mark.parametrize("shares", [False, True])
def test_an_exchange_leaves_the_sum(codecs: tuple[str, str], shares: bool):
    """Whatever the two letters lose, and be it not the same."""
    a, b = blend(1, shares=shares), blend(2, shares=shares)
    before = a.fast.double() + b.fast.double()
    if shares:
        data, weight = a.encode(1, codecs[0])
        more, other = b.encode(1, codecs[1])
        b.mix([(data, weight, None)])
        assert (a.weight, b.weight) == (0.5, 1.0)
        a.mix([(more, other, None)])
    else:
        exchange(a, b, codecs)
    after = a.weight * a.fast.double() + b.weight * b.fast.double()
    assert (after - before).abs().max() < 1e-5


def test_a_share_that_comes_back_is_as_if_it_had_never_gone():
    a = blend(1, shares=True)
    before = a.fast.clone()
    data, weight = a.encode(2, "int8")
    a.take_back(data, weight)
    a.take_back(data, weight)
    assert a.weight == pytest.approx(1)
    assert torch.allclose(a.fast, before, atol=1e-5)


def test_a_late_answer_keeps_what_was_learnt_meanwhile():
    a, b = blend(1), blend(2)
    mine, _ = a.encode(1, "fp32")
    theirs, _ = b.encode(1, "fp32")
    a.fast.add_(7.0)  # a round later
    expected = a.fast + 0.5 * (b.fast - (a.fast - 7.0))
    a.mix([(theirs, 1.0, mine)])
    assert torch.allclose(a.fast, expected, atol=1e-5)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "fp32"])
def test_what_others_led_beyond_what_a_codec_carries_is_sent_as_its_bound(codec: str):
    one = blend(1)
    others = one.fast[8:].clone()
    one.fast[:3] = torch.tensor([float("inf"), -3.3e38, float("nan")])
    letter, _ = one.encode(1, codec)
    decoded = torch.empty(SIZE)
    letter.codec.decode(0, letter.data, decoded)
    assert decoded.isfinite().all()
    assert decoded[0] == -decoded[1] > 6e4
    assert torch.equal(one.fast[8:], others)


def test_the_difference_is_told():
    a, b = blend(1), blend(2)
    difference = (a.fast - b.fast).square().mean().sqrt().item()
    mine, _ = a.encode(1, "fp32")
    theirs, _ = b.encode(1, "fp32")
    assert a.mix([(theirs, 1.0, mine)]) == pytest.approx(difference, rel=1e-4)
