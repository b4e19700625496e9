"""Rounds that bring what was learnt in many rounds' time, and their momentum afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from bootstrap.manifest import Manifest
from node.replicas.replica import OuterReplica
from node.trainer.shared import SharedVectors
from protocols.codecs import RangeCodec
from protocols.counts import pack_counts
from protocols.identity import Identity
from protocols.memory.virtual_time import inline
from protocols.messages import Certificate, Contributor, Outcome, PartResult

SIZE = 1000
ISLANDS = tuple(Identity.generate().peer_id for _ in range(3))
CONSTANT = {"lr": 0.5, "momentum": 0.8, "warmup_rounds": 0}


@pytest.fixture(params=["nesterov", "heavyball"])
def replica(request: pytest.FixtureRequest) -> Iterator[OuterReplica]:
    vectors = SharedVectors.create(SIZE)
    outer = CONSTANT | {"optimizer": request.param}
    manifest = Manifest.model_validate({"rounds": {"codec": "fp32"}, "outer": outer})
    made = OuterReplica(manifest, ISLANDS[0], vectors, RangeCodec("fp32", SIZE), inline, ISLANDS)
    yield made
    del made.base, made.sent
    vectors.close()


async def commit(one: OuterReplica, tokens: Sequence[int], stop: int = SIZE) -> torch.Tensor:
    """A round that merges so many tokens of each island into D = 1; what v comes to.

    Nobody has merged what is behind ``stop``.
    """
    place, whole, none = one.place, bytes(32), b""
    parts = []
    for start, end in ((0, stop), (stop, SIZE)):
        there = end == stop and any(tokens)
        counts = pack_counts([end - start if there and count else 0 for count in tokens])
        if start < end:
            at = (0, place.round, start, end, ISLANDS[0], "fp32")
            parts.append(PartResult(*at, whole if there else none, counts, whole, none))
    contributors = zip(ISLANDS, tokens, strict=True)
    decided = Outcome(
        0, place.round, place.previous, bytes(32), "fp32",
        tuple(Contributor(peer, 1.0, count, True) for peer, count in contributors),
        tuple(parts), ISLANDS, place.work + sum(tokens),
    )  # fmt: skip
    data = {(0, stop): torch.ones(stop).view(torch.uint8)}
    await one.apply(Certificate(bytes(32), 0, 0, ISLANDS, decided, ()), data)
    return one.vectors["v"]


@pytest.mark.parametrize(
    ("before", "then", "left"),
    [
        ([84_000] * 3, [1000] * 3, 1 / 84),
        ([84_000, 84_000, 10**12], [1000] * 3, 1 / 84),  # one alone may say anything
        ([84_000, 1000, 1000], [1000] * 3, 1.0),
        ([84_000] * 3, [1000, 1000, 84_000], 1.0),
        ([1000] * 3, [84_000] * 3, 1.0),
        ([7900] * 3, [1000] * 3, 1.0),
        ([8100] * 3, [1000, 1000, 990], 10 / 81),
        ([1000] * 3, [1000, 0, 0], 1.0),  # fewer islands, as much of each
        ([84_000] * 3, [0] * 3, None),  # nobody's work was there in time
    ],
)
async def test_momentum_of_far_longer_rounds_is_not_carried_on(
    replica: OuterReplica, before: list[int], then: list[int], left: float | None
) -> None:
    assert (await commit(replica, before)).unique().tolist() == [1.0]
    wanted = 1.0 if left is None else 0.8 * left + 1
    assert (await commit(replica, then)).unique().tolist() == pytest.approx([wanted])


async def test_nor_where_a_part_of_the_short_round_has_not_come(replica: OuterReplica) -> None:
    await commit(replica, [84_000] * 3)
    found = await commit(replica, [1000] * 3, stop=600)
    left = 600 / 84_000  # the work is three fifths of what it would have been
    assert found[:600].unique().tolist() == pytest.approx([0.8 * left + 1])
    assert found[600:].unique().tolist() == pytest.approx([left])
    assert (await commit(replica, [1000] * 3)).max().item() < 2
