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


@pytest.fixture
def replica() -> Iterator[OuterReplica]:
    vectors = SharedVectors.create(SIZE)
    manifest = Manifest.model_validate({"rounds": {"codec": "fp32"}, "outer": CONSTANT})
    made = OuterReplica(manifest, ISLANDS[0], vectors, RangeCodec("fp32", SIZE), inline, ISLANDS)
    yield made
    del made.base, made.sent
    vectors.close()


async def commit(one: OuterReplica, tokens: Sequence[int]) -> torch.Tensor:
    """A round that merges so many tokens of each island into D = 1; what v comes to."""
    counts = pack_counts([SIZE if count else 0 for count in tokens])
    digest = bytes(32) if any(tokens) else b""
    place = one.place
    part = PartResult(0, place.round, 0, SIZE, ISLANDS[0], "fp32", digest, counts, bytes(32), b"")
    contributors = zip(ISLANDS, tokens, strict=True)
    decided = Outcome(
        0, place.round, place.previous, bytes(32), "fp32",
        tuple(Contributor(peer, 1.0, count, True) for peer, count in contributors),
        (part,), ISLANDS, place.work + sum(tokens),
    )  # fmt: skip
    data = torch.ones(SIZE).view(torch.uint8)
    await one.apply(Certificate(bytes(32), 0, 0, ISLANDS, decided, ()), {(0, SIZE): data})
    found = one.vectors["v"]
    assert bool((found == found[0]).all())
    return found[0]


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
    assert await commit(replica, before) == 1
    wanted = 1.0 if left is None else 0.8 * left + 1
    assert (await commit(replica, then)).item() == pytest.approx(wanted)
