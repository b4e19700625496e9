"""The outer state of one fragment among others, and what alpha leaves to the trainer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gossip_kit import counts_of
from replica_kit import ME, OTHER, normal

from bootstrap.manifest import Manifest, Model
from bootstrap.manifest_rounds import Rounds
from node.replicas.replica import OuterReplica
from node.trainer.shared import SharedVectors
from protocols.codecs import RangeCodec
from protocols.counts import Included
from protocols.memory.virtual_time import inline
from protocols.messages import Certificate, Contributor, Outcome, PartResult

SIZES = (3000, 5000)


class Waiting:
    """A trainer that stands still at the snapshot of round 0."""

    async def hold(self) -> int | None:
        return 0

    async def release(self, *, contributed: bool, reset: bool) -> None:
        pass


@pytest.fixture
def replicas() -> Iterator[tuple[OuterReplica, ...]]:
    manifest = Manifest(
        model=Model(n_layers=2), rounds=Rounds(codec="fp32", fragments=2, alpha=0.25)
    )
    vectors = SharedVectors.create(sum(SIZES))
    made, at = [], 0
    for fragment, size in enumerate(SIZES):
        codec = RangeCodec("fp32", size - 100)
        made.append(
            OuterReplica(
                manifest,
                ME,
                vectors,
                codec,
                inline,
                (ME, OTHER),
                fragment,
                slice(at, at + size),
            )
        )
        made[-1].base.copy_(normal(1 + fragment, size))
        made[-1].sent.copy_(normal(11 + fragment, size))
        made[-1].trainer = Waiting()
        at += size
    yield tuple(made)
    for replica in made:
        del replica.base, replica.sent
    vectors.close()


async def commit(replica: OuterReplica, mine: int, mean: torch.Tensor) -> None:
    """A round of which the first ``mine`` elements have my work in them."""
    size, place = len(replica.base), replica.place
    counts = counts_of((Included(0, size), Included(1, mine)))
    part = PartResult(place.fragment, 0, 0, size, OTHER, "fp32", bytes(32), counts, bytes(32), b"")
    outcome = Outcome(
        place.fragment,
        0,
        place.previous,
        bytes(32),
        "fp32",
        (Contributor(OTHER, 1.0, 1, True), Contributor(ME, 1.0, 1, True)),
        (part,),
        (ME, OTHER),
        2,
    )
    data = mean.clone().view(torch.uint8)
    await replica.apply(Certificate(bytes(32), 0, 0, (ME, OTHER), outcome, ()), {(0, size): data})


async def test_alpha_keeps_a_share_of_what_was_merged_and_all_of_the_rest(
    replicas: tuple[OuterReplica, ...],
) -> None:
    one, other = replicas
    size, mine = SIZES[1], 2000
    before, sent, since = other.base.clone(), other.sent.clone(), 0.1 * normal(30, size)
    untouched = one.base.clone(), one.sent.clone()
    await commit(other, mine, normal(21, size))
    theta = other.base + ((sent + since) - other.sent)  # what the trainer makes of it
    new = other.base
    assert not torch.equal(new, before)
    merged = new + 0.25 * (sent - new) + since
    torch.testing.assert_close(theta[:mine], merged[:mine])
    left = new + (sent + since - before)  # not merged: all of it is still local work
    torch.testing.assert_close(theta[mine:], left[mine:])
    assert (other.place.fragment, other.place.round) == (1, 1)
    # the other fragment has neither moved nor changed its place
    assert torch.equal(one.base, untouched[0])
    assert torch.equal(one.sent, untouched[1])
    assert (one.place.fragment, one.place.round) == (0, 0)


async def test_every_fragment_has_a_digest_of_its_own(replicas: tuple[OuterReplica, ...]) -> None:
    for replica in replicas:
        await replica.settle()
    one, other = (replica.place.state for replica in replicas)
    assert one != other
    await commit(replicas[0], 0, normal(22, SIZES[0]))
    assert replicas[0].place.state != one
    assert replicas[1].place.state == other
    assert replicas[0].standing[0] == 1
    assert replicas[1].standing[0] == 0


async def test_a_digest_that_a_download_has_checked_is_not_computed_again(
    replicas: tuple[OuterReplica, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = replicas
    await one.settle()
    monkeypatch.delattr("node.replicas.replica.state_digest")
    await one.settle(None, b"d" * 32)
    assert one.place.state == b"d" * 32
    with pytest.raises(NameError):
        await other.settle()
