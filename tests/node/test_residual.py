"""The residual of an island over committed rounds: what is included is settled, the rest stays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from gossip_kit import counts_of

from bootstrap.manifest import Manifest
from bootstrap.manifest_rounds import Rounds
from bootstrap.signed_manifest import SignedManifest
from gossip.catchup.lineage import Lineage
from gossip.place import Place
from node.checkpoints.checkpoint import CheckpointError, CheckpointStore
from node.checkpoints.index import Facts
from node.checkpoints.outer_files import OuterFiles, read_newest, write_outer
from node.replicas.replica import ChainStanding, OuterReplica
from node.replicas.residual import Residual
from node.trainer.shared import SharedVectors
from protocols.codecs import CHUNK, RangeCodec
from protocols.counts import Included
from protocols.identity import Identity, PeerId
from protocols.memory.virtual_time import inline
from protocols.messages import Certificate, Contributor, Outcome, PartResult

SIZE = 3 * CHUNK + 5000
DENSE = SIZE - 700
CUT = 2 * CHUNK + 2048  # the first part has a chunk more than two
ME, OTHER = (Identity.generate().peer_id for _ in range(2))


def normal(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def outcome(parts: Sequence[tuple[int, int, PeerId, Sequence[Included]]], codec: str) -> Outcome:
    results = tuple(
        PartResult(0, 1, start, stop, owner, codec, bytes(32), counts_of(included), bytes(32), b"")
        for start, stop, owner, included in parts
    )
    contributors = (Contributor(OTHER, 1.0, 1, True), Contributor(ME, 1.0, 1, True))
    return Outcome(0, 1, bytes(32), bytes(32), codec, contributors, results, (ME, OTHER), 2)


class Delta:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __call__(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(self.values[start:stop])


def decoded(codec: RangeCodec, start: int, values: torch.Tensor) -> torch.Tensor:
    data = torch.empty(codec.encoded_size(start, start + len(values)), dtype=torch.uint8)
    codec.encode(start, values, data)
    out = torch.empty_like(values)
    codec.decode(start, data, out)
    return out


@pytest.mark.parametrize("name", ["int2", "int1", "top12", "top3", "int4"])
def test_exactly_what_was_included_is_settled(name: str) -> None:
    codec, residual = RangeCodec(name, DENSE), Residual(SIZE, 0.9)
    residual.values.copy_(normal(1))
    before, delta = residual.values.clone(), normal(2)
    x = residual.add_to(delta.clone(), 0)
    assert torch.equal(x, delta + before * 0.9)
    assert torch.equal(residual.values, before)

    reached = CHUNK  # the other owner gave up on us after a chunk
    residual.settle(
        outcome(
            [
                (0, CUT, OTHER, [Included(0, CUT), Included(1, reached)]),
                (CUT, SIZE, ME, [Included(0, SIZE - CUT), Included(1, SIZE - CUT)]),
            ],
            name,
        ),
        ME,
        codec,
        Delta(delta),
    )
    kept = x[:reached] - decoded(codec, 0, x[:CUT])[:reached]
    assert torch.equal(residual.values[:reached], kept)
    assert torch.equal(residual.values[reached:CUT], before[reached:CUT])
    assert not residual.values[CUT:].any()  # added as it was, to my own part


def test_nothing_included_leaves_everything() -> None:
    codec, residual = RangeCodec("int2", DENSE), Residual(SIZE, 0.9)
    residual.values.copy_(normal(1))
    for included in ([], [Included(0, SIZE)], [Included(1, 0)]):
        residual.settle(outcome([(0, SIZE, OTHER, included)], "int2"), ME, codec, Delta(normal(2)))
        assert torch.equal(residual.values, normal(1))


def test_what_i_lost_as_owner_comes_back_by_my_share() -> None:
    codec, residual = RangeCodec("int2", DENSE), Residual(SIZE, 0.9)
    mean, share = normal(3), 0.25
    data = torch.empty(codec.encoded_size(CUT, SIZE), dtype=torch.uint8)
    codec.encode(CUT, mean[CUT:], data)
    for chunk in codec.chunks(CUT, SIZE):
        piece = data[chunk.span]
        residual.note_lost(codec, chunk, mean[chunk.start : chunk.stop], piece, share)
    assert not residual.values.any()  # until the round commits
    everything = [
        (0, CUT, OTHER, [Included(0, CUT)]),
        (CUT, SIZE, ME, [Included(0, SIZE - CUT), Included(1, SIZE - CUT)]),
    ]
    residual.settle(outcome(everything, "int2"), ME, codec, Delta(normal(2)))
    lost = mean[CUT:] - decoded(codec, CUT, mean[CUT:])
    assert torch.allclose(residual.values[CUT:], lost / share)
    assert not residual.values[:CUT].any()

    residual.settle(outcome(everything, "int2"), ME, codec, Delta(normal(2)))
    assert not residual.values.any()  # noted for one round only


def test_a_chunk_merged_twice_leaves_nothing_behind() -> None:
    codec, residual = RangeCodec("int1", DENSE), Residual(SIZE, 0.9)
    chunk = codec.chunks(0, SIZE)[0]
    data = torch.empty(chunk.size, dtype=torch.uint8)
    codec.encode_chunk(chunk, normal(1)[:CHUNK], data)
    for _ in range(2):
        residual.note_lost(codec, chunk, normal(1)[:CHUNK], data, 0.5)
    residual.settle(
        outcome([(0, SIZE, ME, [Included(1, SIZE)])], "int1"), ME, codec, Delta(normal(2))
    )
    assert not residual.values.any()


def test_who_starts_over_has_nothing_to_make_up_for() -> None:
    residual = Residual(SIZE, 0.9)
    residual.values.copy_(normal(1))
    residual.reset()
    assert not residual.values.any()


class Waiting:
    """A trainer that stands still at the snapshot of a round."""

    def __init__(self, snapshot: int | None) -> None:
        self.snapshot = snapshot

    async def hold(self) -> int | None:
        return self.snapshot

    async def release(self, *, contributed: bool, reset: bool) -> None:
        pass


@pytest.fixture
def replica() -> Iterator[OuterReplica]:
    manifest = Manifest(rounds=Rounds(codec="int2", feedback=0.9))
    vectors = SharedVectors.create(SIZE)
    codec = RangeCodec("int2", DENSE)
    made = OuterReplica(manifest, ME, vectors, codec, inline, (ME, OTHER))
    made.base.copy_(normal(1))
    made.sent.copy_(normal(2))
    made.residual = Residual(SIZE, 0.9)
    made.residual.values.copy_(normal(3))
    yield made
    del made.base, made.sent
    vectors.close()


async def commit(replica: OuterReplica, snapshot: int | None, reached: int = SIZE) -> None:
    """Round 1 comes to an end: all of it is the other's part, and so much of mine is in it."""
    replica.trainer = Waiting(snapshot)
    done = outcome([(0, SIZE, OTHER, [Included(0, SIZE), Included(1, reached)])], "int2")
    data = torch.empty(replica.codec.encoded_size(0, SIZE), dtype=torch.uint8)
    replica.codec.encode(0, normal(5), data)
    certificate = Certificate(bytes(32), 0, 0, (ME, OTHER), done, ())
    await replica.apply(certificate, {(0, SIZE): data})


async def test_a_committed_round_settles_the_replicas_residual(replica: OuterReplica) -> None:
    assert replica.residual is not None
    x = normal(1) - normal(2) + normal(3) * 0.9
    assert torch.equal(replica.delta(0, SIZE, torch.empty(SIZE)), x)
    assert torch.equal(replica.delta(7, 99, torch.empty(92)), x[7:99])
    await commit(replica, snapshot=1)
    assert torch.equal(replica.residual.values, x - decoded(replica.codec, 0, x))
    assert not torch.equal(replica.base, normal(1))


@pytest.mark.parametrize("reached", [0, CHUNK, SIZE])
async def test_a_round_whose_snapshot_is_gone_settles_what_was_merged_of_it(
    replica: OuterReplica, reached: int
) -> None:
    """The ranks have died since: it was sent with e, and none of it may be sent again."""
    assert replica.residual is not None
    await commit(replica, snapshot=None, reached=reached)
    assert not replica.residual.values[:reached].any()
    assert torch.equal(replica.residual.values[reached:], normal(3)[reached:])


@pytest.mark.parametrize("known", [True, False])
async def test_a_download_over_such_a_round_settles_it_likewise(
    replica: OuterReplica, known: bool
) -> None:
    assert replica.residual is not None
    done = outcome([(0, SIZE, OTHER, [Included(0, SIZE), Included(1, CHUNK)])], "int2")
    here = replica.place
    place = Place(here.run, 0, here.round + 2, bytes([3]) * 32, b"", 9)
    state = ChainStanding(place, replica.roster, None, Lineage(here.run, (ME, OTHER)))
    replica.trainer = Waiting(None)
    decided = done if known else None
    await replica.jump([normal(6), normal(7)], state, keep="local", decided=decided, sent=True)
    left = CHUNK if known else SIZE
    assert not replica.residual.values[:left].any()
    assert torch.equal(replica.residual.values[left:], normal(3)[left:])


@pytest.mark.parametrize(("keep", "stays"), [("nothing", False), ("local", True), ("all", True)])
async def test_a_download_keeps_it_with_the_local_work(
    replica: OuterReplica, keep: str, stays: bool
) -> None:
    assert replica.residual is not None
    state = ChainStanding(
        replica.place, replica.roster, None, Lineage(replica.manifest.run_id, (ME, OTHER))
    )
    await replica.jump([normal(6), normal(7)], state, keep=keep)
    assert torch.equal(replica.residual.values, normal(3) if stays else torch.zeros(SIZE))


def test_it_is_in_checkpoints(tmp_path: Path) -> None:
    identity = Identity.generate()
    signed = SignedManifest.create(Manifest(), identity)
    store = CheckpointStore(tmp_path)
    for number, residual in enumerate((None, normal(3))):
        with store.draft() as draft:
            write_outer(draft, OuterFiles(normal(1), {"v": normal(2)}, signed, residual))
            store.commit(draft, Facts(run=signed.run_id.hex(), round=number, step=0, tokens=0))
        back = read_newest(tmp_path / f"ckpt-{number:08d}")[1]
        assert torch.equal(back.base, normal(1))
        if residual is None:
            assert back.residual is None
        else:
            assert back.residual is not None
            assert torch.equal(back.residual, residual)
    with store.draft() as draft:
        write_outer(draft, OuterFiles(normal(1), {"v": normal(2)}, signed, torch.zeros(3)))
        store.commit(draft, Facts(run=signed.run_id.hex(), round=9, step=0, tokens=0))
    with pytest.raises(CheckpointError, match="cannot be used"):
        read_newest(tmp_path / "ckpt-00000009")
