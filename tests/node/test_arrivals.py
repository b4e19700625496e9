"""Outer steps that depend on how much came together, where parts have unlike contributors."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from replica_kit import normal

from bootstrap.manifest import Manifest
from diloco import optimizers
from node.replicas.arrivals import Arrived, arrived, together
from node.replicas.replica import OuterReplica
from node.trainer.shared import SharedVectors
from protocols.codecs import CHUNK, RangeCodec
from protocols.counts import pack_counts
from protocols.identity import Identity, PeerId
from protocols.memory.virtual_time import inline
from protocols.messages import Certificate, Contributor, Outcome, PartResult

PEERS = [PeerId(Identity.from_seed(bytes([n]) * 32).peer_id) for n in range(1, 41)]
ISLANDS = PEERS[:4]
SIZE = 3 * CHUNK + 500
HALF = 2 * CHUNK
WHOLE: dict[str, Any] = {"mode": "async", "rounds": {"codec": "fp32"}}
AT_ONCE = WHOLE | {"outer": {"lr": 0.5, "momentum": 0.0, "momentum_start": 0.0, "warmup_rounds": 0}}

Parts = dict[tuple[int, int], Sequence[int]]  # elements of each contributor, by range


@pytest.fixture
def vectors() -> Iterator[list[SharedVectors]]:
    made: list[SharedVectors] = []
    yield made
    for one in made:
        one.close()


def replica(vectors: list[SharedVectors], tables: dict[str, Any]) -> OuterReplica:
    """Of the last of four islands."""
    vectors.append(SharedVectors.create(SIZE))
    manifest = Manifest.model_validate(tables)
    codec = RangeCodec("fp32", SIZE)
    one = OuterReplica(manifest, ISLANDS[3], vectors[-1], codec, inline, tuple(ISLANDS))
    one.base.copy_(normal(1, SIZE))
    return one


def outcome(parts: Parts, weights: Sequence[float], one: OuterReplica | None = None) -> Outcome:
    place = one.place if one is not None else None
    round_ = place.round if place is not None else 0
    results = [
        PartResult(
            0, round_, *range_, ISLANDS[2], "fp32", bytes(32) if any(elements) else b"",
            pack_counts(elements), bytes(32), b"",
        )
        for range_, elements in parts.items()
    ]  # fmt: skip
    who = zip(PEERS, weights, strict=False)
    return Outcome(
        0, round_, place.previous if place is not None else b"", bytes(32), "fp32",
        tuple(Contributor(peer, weight, 1000, True) for peer, weight in who),
        tuple(results), tuple(ISLANDS), 2000,
    )  # fmt: skip


async def commit(
    one: OuterReplica, parts: Parts, mean: torch.Tensor, weights: Sequence[float] = (9.0, 9.0)
) -> torch.Tensor:
    """A round that comes to ``mean``; returns by how much it has moved each element."""
    before = one.base.clone()
    data = {(a, b): mean[a:b].clone().view(torch.uint8) for a, b in parts}
    decided = outcome(parts, weights, one)
    await one.apply(Certificate(bytes(32), 0, 0, tuple(ISLANDS), decided, ()), data)
    return before - one.base


def pieces(parts: Parts, weights: Sequence[float], islands: int = 4) -> list[list[Arrived]]:
    decided = outcome(parts, weights)
    return [arrived(decided, part, islands) for part in decided.parts]


def test_a_part_has_the_share_of_those_who_are_in_it_as_far_as_they_are() -> None:
    found = pieces({(0, 30): (30, 10, 0), (30, 70): (0, 0, 40), (70, 90): (0, 0, 0)}, (1, 2, 6))
    assert found == [
        [Arrived(0, 10, 0.5, 1.5), Arrived(10, 30, 0.25, 1.0)],
        [Arrived(30, 70, 0.25, 6.0)],
        [Arrived(70, 90, 0.0, 0.0)],
    ]
    share, weight = together(found)
    assert share == pytest.approx((10 / 2 + 60 / 4) / 90)
    assert weight == pytest.approx((5 * 1.5 + 5 * 1.0 + 10 * 6.0) / 20)
    assert together([]) == together(found[2:]) == (0.0, 0.0)
    assert pieces({(0, 30): (30, 30)}, (1, 2), islands=0) == [[Arrived(0, 30, 1.0, 1.5)]]


def test_the_mean_of_equal_parts_is_what_each_of_them_has_to_the_bit() -> None:
    dice = random.Random(1)
    for islands in range(1, 40):
        came = dice.randint(1, islands)
        weights = [dice.uniform(0, 1e6) for _ in range(came)]
        cuts = sorted(dice.sample(range(1, 10**9), 6))
        parts = {(a, b): (b - a,) * came for a, b in itertools.pairwise(cuts)}
        found = together(pieces(parts, weights, islands))
        assert found == (came / islands, statistics.fmean(weights))


async def test_who_is_in_one_part_alone_counts_there_and_not_in_the_other(
    vectors: list[SharedVectors],
) -> None:
    one, ones = replica(vectors, AT_ONCE), torch.ones(SIZE)
    await one.settle()
    moved = await commit(one, {(0, HALF): (HALF, HALF), (HALF, SIZE): (SIZE - HALF, 0)}, ones)
    assert moved[:HALF].allclose(torch.tensor(0.5 * 2 / 4), rtol=1e-4)
    assert moved[HALF:].allclose(torch.tensor(0.5 * 1 / 4), rtol=1e-4)
    assert one.vectors["shares"].item() == pytest.approx((2 * HALF + SIZE - HALF) / SIZE / 4)
    # what was missing comes later, and is zero where it is merged already
    later = torch.cat([torch.zeros(HALF), torch.ones(SIZE - HALF)])
    moved += await commit(one, {(0, HALF): (0, HALF), (HALF, SIZE): (0, SIZE - HALF)}, later)
    assert moved.allclose(torch.tensor(0.5 * 2 / 4), rtol=1e-4)


async def test_within_a_part_it_counts_as_far_as_its_chunks_have_come(
    vectors: list[SharedVectors],
) -> None:
    one = replica(vectors, AT_ONCE)
    await one.settle()
    moved = await commit(one, {(0, SIZE): (SIZE, HALF + 3)}, torch.ones(SIZE))
    assert moved[:HALF].allclose(torch.tensor(0.5 * 2 / 4), rtol=1e-4)
    assert moved[HALF:].allclose(torch.tensor(0.5 * 1 / 4), rtol=1e-4)  # only whole chunks do


async def test_a_part_that_nobody_could_complete_counts_for_nothing(
    vectors: list[SharedVectors],
) -> None:
    one = replica(vectors, AT_ONCE)
    await one.settle()
    moved = await commit(one, {(0, HALF): (HALF, HALF), (HALF, SIZE): (0, 0)}, torch.ones(SIZE))
    assert moved[:HALF].allclose(torch.tensor(0.5 * 2 / 4), rtol=1e-4)
    assert not moved[HALF:].any()
    assert one.vectors["shares"].item() == pytest.approx(HALF / SIZE / 2)


async def test_rounds_that_have_all_of_everybody_come_to_the_bits_of_the_plain_rule(
    vectors: list[SharedVectors],
) -> None:
    """However they are cut: by the share and the mean weight of those who are in them."""
    one = replica(vectors, WHOLE)
    await one.settle()
    rule, params = optimizers.named("delayed-nesterov"), one.base.clone()
    state = rule.init(params).vectors
    cuts = (0, 70_001, CHUNK, HALF + 77, SIZE)
    for number, weights in enumerate([(9.0, 0.1, 3.3), (7.7,), (5.0, 1 / 3), (1e5,)] * 2):
        mean = 0.01 * normal(number + 2, SIZE)
        rates = one._rates_of(int(one.vectors["turns"].item()))
        rates = optimizers.Rates(
            rates.lr, rates.momentum, rates.count,
            share=len(weights) / 4, weight=statistics.fmean(weights),
        )  # fmt: skip
        parts = {(a, b): (b - a,) * len(weights) for a, b in itertools.pairwise(cuts)}
        await commit(one, parts, mean, weights)
        rule.take(state, mean, params, rates)
        assert one.base.equal(params)
        assert all(one.vectors[name].equal(vector) for name, vector in state.items())
    assert one.vectors["turns"].item() > 1
