"""A replica that was read from a checkpoint: what its former life has had merged counts once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from gossip_kit import counts_of
from replica_kit import ME, OTHER, normal

from bootstrap.manifest import Manifest
from bootstrap.manifest_rounds import Outer, Rounds
from diloco import sparta
from gossip.catchup.lineage import Lineage
from gossip.place import Place
from node.replicas.replica import ChainStanding, OuterReplica
from node.replicas.residual import Residual
from node.replicas.sparse_state import SparseReplica
from node.trainer.shared import SharedVectors
from protocols.codecs import RangeCodec
from protocols.counts import Included
from protocols.memory.virtual_time import inline
from protocols.messages import Certificate, Contributor, Outcome, PartResult

SIZE = 3000
SHARE = 0.2  # of the coordinates, a round


class Trainer:
    """θ as the trainer has it, and what it does with an Apply."""

    def __init__(self, replica: OuterReplica, theta: torch.Tensor) -> None:
        self.replica, self.theta = replica, theta
        self.snapshot: int | None = None
        self.told: list[tuple[bool, bool]] = []

    def take_snapshot(self) -> torch.Tensor:
        """What it contributes to the round that is on: Δ."""
        self.replica.sent.copy_(self.theta)
        self.snapshot = self.replica.place.round
        size = self.replica.size
        return self.replica.delta(0, size, torch.empty(size)).clone()

    async def hold(self) -> int | None:
        return self.snapshot

    async def release(self, *, contributed: bool, reset: bool) -> None:
        base, sent = self.replica.base, self.replica.sent
        if self.replica.voids:
            sent = torch.where(sent.isnan(), self.theta, sent)
        self.theta = base.clone() if reset else base + (self.theta - sent)
        self.snapshot = None
        self.told.append((contributed, reset))


@contextmanager
def made(kind: type[OuterReplica], manifest: Manifest) -> Iterator[OuterReplica]:
    vectors = SharedVectors.create(SIZE)
    one = kind(manifest, ME, vectors, RangeCodec("fp32", SIZE - 100), inline, (ME, OTHER))
    one.base.copy_(normal(1, SIZE))
    one.sent.copy_(one.base)
    yield one
    del one.base, one.sent
    vectors.close()


@pytest.fixture
def replica() -> Iterator[OuterReplica]:
    manifest = Manifest(
        rounds=Rounds(codec="fp32"),
        outer=Outer(optimizer="sgd", lr=1.0, momentum=0.0),
    )
    with made(OuterReplica, manifest) as one:
        yield one


@pytest.fixture
def sparse() -> Iterator[OuterReplica]:
    given = {"mode": "sparta", "rounds": {"share": SHARE, "codec": "fp32"}}
    with made(SparseReplica, Manifest.model_validate(given)) as one:
        yield one


def outcome_of(place: Place, mine: int, size: int = SIZE) -> Outcome:
    """Of a round with the first ``mine`` elements of my contribution."""
    counts = counts_of((Included(0, size), *([Included(1, mine)] if mine else [])))
    part = PartResult(0, place.round, 0, size, OTHER, "fp32", bytes(32), counts, bytes(32), b"")
    contributors = (Contributor(OTHER, 1.0, 1, True), Contributor(ME, 1.0, 1, True))
    return Outcome(
        0, place.round, place.previous, bytes(32), "fp32", contributors, (part,), (ME, OTHER), 2
    )


async def commit(replica: OuterReplica, mine: int, mean: torch.Tensor) -> None:
    """A round with the first ``mine`` elements of my contribution."""
    outcome = outcome_of(replica.place, mine, replica.size)
    certificate = Certificate(bytes(32), 0, 0, (ME, OTHER), outcome, ())
    await replica.apply(certificate, {(0, replica.size): mean.clone().view(torch.uint8)})


def restored(replica: OuterReplica) -> Trainer:
    """A trainer that resumes from a checkpoint of this place with local work in it."""
    trainer = Trainer(replica, replica.base - 0.1 * normal(7, SIZE))
    replica.trainer, replica.inherited = trainer, True
    return trainer


async def test_what_the_life_before_had_merged_is_not_sent_again(replica: OuterReplica) -> None:
    trainer = restored(replica)
    work = replica.base - trainer.theta  # in the checkpoint, and in what was sent after it
    residual = replica.residual = Residual(SIZE, 0.9)
    residual.values.copy_(normal(8, SIZE))
    await commit(replica, SIZE, 0.5 * work)
    assert torch.equal(trainer.theta, replica.base)
    assert trainer.told == [(False, True)]
    assert not residual.values.any()  # was sent with it
    assert not trainer.take_snapshot().any()


async def test_what_it_has_not_had_merged_goes_with_the_next_round(replica: OuterReplica) -> None:
    trainer = restored(replica)
    work = replica.base - trainer.theta
    await commit(replica, 0, 0.5 * normal(9, SIZE))
    torch.testing.assert_close(replica.base - trainer.theta, work)
    torch.testing.assert_close(trainer.take_snapshot(), work)
    await commit(replica, SIZE, 0.5 * work)  # in this life, so θ − sent is what is left
    assert trainer.told == [(False, False), (True, False)]
    torch.testing.assert_close(trainer.theta, replica.base)
    assert not replica.inherited


async def test_only_the_first_of_such_rounds_takes_local_work(replica: OuterReplica) -> None:
    trainer = restored(replica)
    await commit(replica, SIZE, 0.5 * normal(9, SIZE))
    since = 0.1 * normal(10, SIZE)
    trainer.theta -= since  # learnt in this life
    await commit(replica, SIZE, 0.5 * normal(11, SIZE))  # the life before was in this one as well
    torch.testing.assert_close(replica.base - trainer.theta, since)


async def test_what_was_merged_is_told_with_whether_an_earlier_life_did_it(
    replica: OuterReplica,
) -> None:
    """What that life read after its checkpoint is not known: it is not to be read again."""
    trainer = restored(replica)
    told: list[tuple[bool, bool]] = []
    for mine, now in ((0, False), (SIZE, False), (SIZE, False), (SIZE, True), (0, True)):
        if now:
            trainer.take_snapshot()
        await commit(replica, mine, 0.5 * normal(9, SIZE))
        told.append((replica.brought is not None, replica.relived))
    assert told == [(False, False), (True, True), (True, True), (True, False), (False, False)]


async def test_of_a_few_coordinates_those_are_dropped_that_the_life_before_had_merged(
    sparse: OuterReplica,
) -> None:
    """In each round that it was in: others were drawn, and what was learnt there is in none yet."""
    trainer, size = restored(sparse), sparse.size
    for round_, mine in enumerate((size, 0, size // 2)):
        theta, base = trainer.theta.clone(), sparse.base.clone()
        drawn = sparta.coordinates(SIZE, SHARE, round_, 0).sort().values
        await commit(sparse, mine, 0.1 * normal(9 + round_, size))
        here = torch.zeros(SIZE, dtype=torch.bool)
        here[drawn[:mine]] = True
        assert torch.equal(trainer.theta[here], sparse.base[here])
        torch.testing.assert_close((trainer.theta - sparse.base)[~here], (theta - base)[~here])
    assert trainer.told == [(False, False)] * 3
    assert sparse.inherited
    trainer.take_snapshot()
    since = 0.1 * normal(14, SIZE)
    trainer.theta -= since
    kept = trainer.theta - sparse.base
    drawn = sparta.coordinates(SIZE, SHARE, 3, 0)
    kept[drawn] = -since[drawn]
    await commit(sparse, size, 0.1 * normal(12, size))
    torch.testing.assert_close(trainer.theta - sparse.base, kept)
    assert not sparse.inherited


async def test_a_trainer_that_was_only_started_again_keeps_what_it_learns(
    replica: OuterReplica,
) -> None:
    trainer = restored(replica)
    replica.inherited = False
    work = replica.base - trainer.theta
    await commit(replica, SIZE, 0.5 * normal(9, SIZE))  # what the ranks before it had sent
    torch.testing.assert_close(replica.base - trainer.theta, work)


@pytest.mark.parametrize(("inherited", "to"), [(False, 3), (True, 3), (True, 0)])
async def test_a_download_keeps_local_work_unless_it_may_be_in_what_was_missed(
    replica: OuterReplica, inherited: bool, to: int
) -> None:
    trainer = restored(replica)
    replica.inherited = inherited
    work = replica.base - trainer.theta
    place = Place(replica.place.run, 0, to, bytes([3]) * 32, b"", 9)
    state = ChainStanding(place, (ME, OTHER), None, Lineage(place.run, (ME,)))
    await replica.jump([normal(20, SIZE)], state, keep="local")
    assert torch.equal(replica.base, normal(20, SIZE))
    assert replica.relived is (inherited and to > 0)
    kept = torch.zeros(SIZE) if inherited and to else work
    torch.testing.assert_close(replica.base - trainer.theta, kept)


@pytest.mark.parametrize(("known", "sent", "left"), [
    (True, True, 1000), (False, True, SIZE), (False, False, 0),
])  # fmt: skip
async def test_a_download_over_the_round_of_a_snapshot_keeps_what_was_not_merged_of_it(
    replica: OuterReplica, known: bool, sent: bool, left: int
) -> None:
    """This island stood still when the others decided the round that it had sent its work to."""
    trainer = restored(replica)
    replica.inherited = False
    work = trainer.take_snapshot()
    since = 0.1 * normal(10, SIZE)
    trainer.theta -= since
    state = ChainStanding(
        Place(replica.place.run, 0, 3, bytes([3]) * 32, b"", 9),
        (ME, OTHER), None, Lineage(replica.place.run, (ME,)),
    )  # fmt: skip
    decided = outcome_of(replica.place, left) if known else None
    await replica.jump([normal(20, SIZE)], state, keep="local", decided=decided, sent=sent)
    work[:left] = 0.0
    torch.testing.assert_close(replica.base - trainer.theta, work + since)
    assert trainer.told == [(left > 0, False)]
    assert replica.brought is decided
