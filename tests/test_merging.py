"""One part merged from encoded slices: weights, bits, and slices that are not fit to be merged."""

from __future__ import annotations

import math

import pytest
import torch
from blake3 import blake3
from gossip_kit import leader, plan_of

from gossip.merging import Collecting, as_bytes, merge
from protocols.codecs import RangeCodec
from protocols.identity import Identity
from protocols.messages import Contributor

MEMBERS = [Identity.from_seed(bytes([number]) * 32) for number in range(4)]
PLAN = plan_of(leader(MEMBERS), MEMBERS)
START, STOP = 1024, 1024 + 5000


def contributors(*weights: float) -> list[Contributor]:
    peers = [c.peer for c in PLAN.contributors]
    return [
        Contributor(peer, weight, 100, True) for peer, weight in zip(peers, weights, strict=False)
    ]


def slices(codec: RangeCodec, values: list[torch.Tensor]) -> Collecting:
    """A part whose slices are all in."""
    collecting = Collecting(START, STOP, PLAN)
    for contributor, value in zip(PLAN.contributors, values, strict=False):
        data = torch.empty(codec.encoded_size(START, STOP), dtype=torch.uint8)
        codec.encode(START, value, data)
        collecting.slices[contributor.peer] = data
    return collecting


def random_values(count: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [scale * torch.randn(STOP - START, generator=generator) for _ in range(count)]


def merged(
    codec: RangeCodec, who: list[Contributor], collecting: Collecting
) -> tuple[torch.Tensor, list[int]]:
    """The decoded mean and the indices of those in it."""
    encoded, digest, included = merge(codec, who, collecting)
    assert blake3(as_bytes(encoded)).digest() == digest
    assert {i.elements for i in included} <= {STOP - START}
    mean = torch.empty(STOP - START)
    codec.decode(START, encoded, mean)
    return mean, [i.contributor for i in included]


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_the_weighted_mean(name: str) -> None:
    codec = RangeCodec(name, dense=4000)
    values = random_values(3)
    mean, counted = merged(codec, contributors(1.0, 2.0, 5.0), slices(codec, values))
    wanted = (values[0] + 2 * values[1] + 5 * values[2]) / 8
    assert counted == [0, 1, 2]
    error = (mean - wanted).norm() / wanted.norm()
    assert error < {"fp32": 1e-6, "bf16": 1e-2, "int8": 2e-2, "int4": 0.2}[name]


def test_bits_do_not_depend_on_the_order_of_arrival() -> None:
    codec = RangeCodec("int4", dense=4000)
    values = random_values(4)
    first = slices(codec, values)
    second = Collecting(START, STOP, PLAN)
    for peer in reversed(first.slices):
        second.slices[peer] = first.slices[peer]
    who = contributors(3.0, 1.0, 2.0, 7.0)
    assert torch.equal(merge(codec, who, first)[0], merge(codec, who, second)[0])


def test_who_has_no_weight_is_not_in_it() -> None:
    """Its work is not in the mean, so it must not be taken for merged."""
    codec = RangeCodec("fp32", dense=4000)
    values = random_values(3)
    mean, counted = merged(codec, contributors(1.0, 0.0, 1.0), slices(codec, values))
    assert counted == [0, 2]
    assert torch.allclose(mean, (values[0] + values[2]) / 2, atol=1e-6)


def test_nobody_has_weight() -> None:
    codec = RangeCodec("int4", dense=4000)
    mean, counted = merged(codec, contributors(0.0, 0.0), slices(codec, random_values(2)))
    assert counted == []
    assert not mean.any()


@pytest.mark.parametrize("weights", [(1e-30, 1e-30), (2.0**40, 1.0), (1e-300, 2.0**40)])
def test_extreme_weights(weights: tuple[float, float]) -> None:
    codec = RangeCodec("fp32", dense=4000)
    values = random_values(2)
    mean, _ = merged(codec, contributors(*weights), slices(codec, values))
    total = sum(weights)
    wanted = sum((w / total) * v for w, v in zip(weights, values, strict=True))
    assert torch.allclose(mean, wanted, atol=1e-6)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_slice_that_is_not_finite_is_left_out_and_the_rest_weighs_more(
    name: str, poison: float
) -> None:
    codec = RangeCodec(name, dense=4000)
    values = random_values(3)
    collecting = slices(codec, values)
    liar = PLAN.contributors[1].peer
    size = torch.float32.itemsize if name == "fp32" else torch.bfloat16.itemsize
    kind = torch.float32 if name == "fp32" else torch.bfloat16
    poisoned = torch.full((1,), poison, dtype=kind).view(torch.uint8)
    data = collecting.slices[liar].clone()
    data[:size] = poisoned  # the first value, or the first block's scale
    collecting.slices[liar] = data
    clean = slices(codec, values)
    del clean.slices[liar]
    who = contributors(1.0, 100.0, 3.0)
    mean, counted = merged(codec, who, collecting)
    wanted, _ = merged(codec, who, clean)
    assert counted == [0, 2]
    assert collecting.refused == {liar}
    assert torch.equal(mean, wanted)


def test_a_slice_that_does_not_decode_is_left_out() -> None:
    codec = RangeCodec("int8", dense=4000)
    collecting = slices(codec, random_values(2))
    liar = PLAN.contributors[0].peer
    collecting.slices[liar] = collecting.slices[liar][:-7]
    _, counted = merged(codec, contributors(1.0, 1.0), collecting)
    assert counted == [1]
    assert collecting.refused == {liar}


def test_all_slices_are_unfit() -> None:
    codec = RangeCodec("fp32", dense=4000)
    collecting = slices(codec, random_values(2))
    for data in collecting.slices.values():
        data.view(torch.float32)[17] = math.nan
    mean, counted = merged(codec, contributors(1.0, 1.0), collecting)
    assert counted == []
    assert not mean.any()


@pytest.mark.parametrize(
    ("name", "block", "levels", "code"), [("int4", 64, 8.0, 0), ("int8", 256, 127.0, 127)]
)
def test_a_mean_beyond_what_the_codec_carries_costs_the_loudest_its_place(
    name: str, block: int, levels: float, code: int
) -> None:
    """What a decoder takes is a little more than what an encoder makes."""
    codec = RangeCodec(name, dense=STOP)
    collecting = slices(codec, random_values(3))
    liar = PLAN.contributors[2].peer
    data = collecting.slices[liar]
    scale = torch.tensor([1.005 * 2.0**127 / levels]).to(torch.bfloat16)
    data[:2] = scale.view(torch.uint8)
    data[2 * math.ceil((STOP - START) / block)] = code
    mean, counted = merged(codec, contributors(1e-9, 1e-9, 1.0), collecting)
    assert mean.isfinite().all()
    assert counted == [0, 1]
    assert collecting.refused == {liar}


def test_whom_a_part_waits_for() -> None:
    collecting = Collecting(START, STOP, PLAN)
    peers = [c.peer for c in PLAN.contributors]
    assert collecting.waits_for() == peers
    collecting.slices[peers[0]] = torch.empty(0, dtype=torch.uint8)
    collecting.refused.add(peers[1])
    assert collecting.waits_for() == peers[2:]
