"""PowerSGD as outer state: bases are what all have in common, errors are an island's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gossip_kit import counts_of
from lowrank_kit import Islands, entries
from pydantic import ValidationError
from test_replica_fragments import ME, OTHER, inline, normal

from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from diloco.lowrank import Plan
from node.checkpoints.checkpoint import CheckpointError, CheckpointStore
from node.checkpoints.index import Facts
from node.checkpoints.outer_files import OuterFiles, read_newest, write_outer
from node.checkpoints.saving import floats_saved
from node.modes import check_runs
from node.replicas.lowrank_state import BASES, LowRankReplica
from node.replicas.replica import ChainStanding
from node.trainer.layout import Layout
from node.trainer.shared import SharedVectors
from protocols.codecs import RangeCodec
from protocols.counts import Included
from protocols.errors import OperatorError
from protocols.identity import Identity, PeerId
from protocols.messages import Certificate, Contributor, Outcome, PartResult

SHAPES = [(96, 20), (20, 60), (5, 40), (20,), (3,)]
SIZE = 96 * 20 + 20 * 60 + 5 * 40 + 23
DENSE = SIZE - 23
PLAN = Plan.of(entries(SHAPES), 4)
INNER = {"warmup_steps": 0, "schedule": "constant", "lr": 0.01, "weight_decay": 0.5}
GIVEN: dict[str, Any] = {
    "mode": "allreduce",
    "outer": {"optimizer": "powersgd"},
    "rounds": {"codec": "fp32"},
    "inner": INNER,
}
MANIFEST = Manifest.model_validate(GIVEN)
KEPT: list[SharedVectors] = []


class Waiting:
    """A trainer whose gradient of a round is out, or that has none."""

    def __init__(self, replica: LowRankReplica) -> None:
        self.replica, self.out = replica, True

    async def hold(self) -> int | None:
        return self.replica.place.round if self.out else None

    async def release(self, *, contributed: bool, reset: bool) -> None:
        pass


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    KEPT.clear()


def replica(me: PeerId = ME) -> LowRankReplica:
    vectors = SharedVectors.create(SIZE)
    KEPT.append(vectors)
    made = LowRankReplica(
        MANIFEST, me, vectors, RangeCodec("fp32", DENSE), inline, (ME, OTHER), plan=PLAN
    )
    made.base.copy_(normal(1, SIZE))
    made.residual = made.new_residual()
    made.trainer = Waiting(made)
    return made


def sent(one: LowRankReplica, gradient: torch.Tensor) -> torch.Tensor:
    """What it sends of a gradient, and its norm is that of what is sent."""
    one.sent.copy_(gradient)
    norm = one.norm()
    found = one.delta(0, one.size, torch.empty(one.size)).clone()
    assert norm == pytest.approx(found.norm().item(), rel=1e-5)
    assert one.delta(7, 99, torch.empty(92)).equal(found[7:99])
    return found


async def commit(
    one: LowRankReplica,
    mean: torch.Tensor,
    of: Sequence[PeerId] = (ME, OTHER),
    *,
    reached: int | None = None,
    empty: slice = slice(0, 0),
) -> None:
    """A round that brings ``mean``, in two parts; of mine the elements before ``reached``."""
    place, size, parts, data = one.place, one.size, [], {}
    cuts = sorted({0, size // 3, empty.start, empty.stop, size})
    for start, stop in itertools.pairwise(cuts):
        void = (start, stop) == (empty.start, empty.stop)
        mine = stop if reached is None else min(max(start, reached), stop)
        included = [
            Included(index, (mine if peer == ME else stop) - start)
            for index, peer in enumerate(of)
            if not void
        ]
        digest = b"" if void else bytes(32)
        parts.append(
            PartResult(
                0, place.round, start, stop, OTHER, "fp32", digest, counts_of(included),
                bytes(32), b"",
            )
        )  # fmt: skip
        data[start, stop] = mean[start:stop].clone().view(torch.uint8)
    who = tuple(Contributor(peer, 1.0, 1, True) for peer in of)
    outcome = Outcome(
        0, place.round, place.previous, place.state, "fp32", who, tuple(parts), (ME, OTHER),
        place.work + 1,
    )  # fmt: skip
    run = one.manifest.run_id
    await one.apply(Certificate(run, 0, 0, (ME, OTHER), outcome, ()), data)


async def test_rounds_of_factors_are_adamw_on_the_dense_rule() -> None:
    """Two islands against the pure rule, with torch's own AdamW as the optimizer."""
    one, other, dense = replica(), replica(OTHER), Islands(2, SHAPES)
    dense.bases = one.bases.clone()  # another seed
    reference = [
        torch.nn.Parameter(one.base[cut].clone()) for cut in (slice(DENSE), slice(DENSE, None))
    ]
    adamw = torch.optim.AdamW(
        [
            {"params": reference[:1], "weight_decay": 0.5},
            {"params": reference[1:], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=MANIFEST.inner.betas,
        eps=MANIFEST.inner.eps,
    )
    for round_ in range(5):
        gradients = [normal(10 * round_ + i, SIZE) for i in range(2)]
        mean = (sent(one, gradients[0]) + sent(other, gradients[1])) / 2
        for replica_ in (one, other):
            await commit(replica_, mean)
        common = dense.take(gradients)
        reference[0].grad, reference[1].grad = common[:DENSE].clone(), common[DENSE:].clone()
        adamw.step()
        assert one.place.state == other.place.state
    assert torch.allclose(one.base, torch.cat([p.detach() for p in reference]), atol=1e-5)
    for mine, expected in zip((one, other), dense.errors, strict=True):
        assert mine.residual is not None
        assert torch.allclose(mine.residual.values, expected, atol=1e-4)
    assert one.residual is not None
    assert other.residual is not None
    assert not one.residual.values.equal(other.residual.values)


async def test_the_bases_are_state_of_all_and_a_newcomer_downloads_them() -> None:
    first, newcomer = replica(), replica(OTHER)
    await first.settle()
    await newcomer.settle()
    assert first.place.state == newcomer.place.state  # nobody has to tell how to begin
    for seed in range(3):
        await commit(first, normal(seed, PLAN.size))
    assert list(first.vectors) == ["m", "s", BASES]
    before = first.place.state
    first.bases[0] += 1e-3
    await first.settle()
    assert first.place.state != before
    first.bases[0] -= 1e-3
    state = ChainStanding(first.place, first.roster, None, None)  # type: ignore[arg-type]
    await newcomer.jump([vector.clone() for vector in first.state], state, keep="nothing")
    await first.settle()
    assert newcomer.place.state == first.place.state
    for seed in range(3, 6):
        mean = normal(seed, PLAN.size)
        await commit(first, mean)
        await commit(newcomer, mean)
        assert newcomer.place == first.place


async def test_a_round_without_this_island_leaves_its_errors() -> None:
    one = replica()
    assert one.residual is not None
    sent(one, normal(3, SIZE))
    await commit(one, normal(4, PLAN.size))
    before, bases = one.residual.values.clone(), one.bases.clone()
    assert before.any()
    sent(one, normal(5, SIZE))
    await commit(one, normal(6, PLAN.size), (OTHER,))
    assert one.residual.values.equal(before)
    assert not one.bases.equal(bases)


@pytest.mark.parametrize("inherited", [True, False])
async def test_of_errors_what_was_sent_before_a_restart_is_taken_away(inherited: bool) -> None:
    """That round's factors had as much of them as lies in the span of its bases, and no more.

    Of this node with its checkpoint's, or of its ranks alone.
    """
    one = replica()
    assert one.residual is not None
    assert isinstance(one.trainer, Waiting)
    one.residual.values.copy_(normal(8, SIZE))
    before, bases = one.residual.values.clone(), one.bases.clone()
    one.inherited, one.trainer.out = inherited, False
    await commit(one, normal(7, PLAN.size))
    for matrix, basis in zip(PLAN.matrices, PLAN.factors(bases, -1), strict=True):
        whole, projector = matrix.of(before), basis @ basis.T
        said = whole @ projector if matrix.goes_left(0) else projector @ whole
        assert torch.allclose(matrix.of(one.residual.values), whole - said, atol=1e-4)
    assert not one.inherited


async def test_what_an_owner_did_not_wait_for_stays_with_the_island() -> None:
    """e + what was counted of the factors is the whole gradient, element by element."""
    one, reached = replica(), PLAN.size // 5
    gradient = normal(3, SIZE)
    own = sent(one, gradient)
    bases = one.bases.clone()
    await commit(one, normal(4, PLAN.size), reached=reached)
    assert one.residual is not None
    own[reached : PLAN.size // 3] = 0.0  # of the first part; of the second there is nothing either
    own[PLAN.size // 3 :] = 0.0
    ways = zip(PLAN.matrices, PLAN.factors(bases, -1), PLAN.factors(own, 0), strict=True)
    for matrix, basis, factor in ways:
        counted = factor @ basis.T if matrix.goes_left(0) else basis @ factor.T
        kept = matrix.of(one.residual.values)
        assert torch.allclose(kept + counted, matrix.of(gradient), atol=1e-4)


async def test_a_part_that_nobody_has_is_a_gradient_of_zero() -> None:
    one, other = replica(), replica(OTHER)
    mean, hole = normal(4, PLAN.size), slice(40, 90)
    zeroed = mean.clone()
    zeroed[hole] = 0.0
    await commit(one, mean, (OTHER,), empty=hole)
    await commit(other, zeroed, (OTHER,))
    for mine, theirs in zip(one.state, other.state, strict=True):
        assert mine.equal(theirs)
    assert not one._mean.any()  # nothing is left of it for the next round


async def empty_round(one: LowRankReplica) -> None:
    """A round that is only about who is in office next."""
    place = one.place
    result = PartResult(
        0, place.round, 0, PLAN.size, OTHER, "fp32", b"", counts_of([]), bytes(32), b""
    )
    outcome = Outcome(
        0, place.round, place.previous, place.state, "fp32", (), (result,), (ME, OTHER), 0
    )
    await one.apply(Certificate(bytes(32), 0, 0, (ME, OTHER), outcome, ()), {})


async def test_a_round_of_nothing_moves_nothing() -> None:
    one = replica()
    before = {name: vector.clone() for name, vector in one.vectors.items() if name != BASES}
    base = one.base.clone()
    await empty_round(one)
    assert one.place.round == 1
    assert one.base.equal(base)
    assert all(one.vectors[name].equal(then) for name, then in before.items())


async def test_the_round_after_one_of_nothing_is_a_projection_again() -> None:
    """It is the other side's turn, whose bases are orthonormal as ever, and equal everywhere."""
    one, other, dense = replica(), replica(OTHER), Islands(2, SHAPES)
    for replica_ in (one, other):
        await empty_round(replica_)
    assert one.place.state == other.place.state
    for basis in PLAN.factors(one.bases, 0):
        assert torch.allclose(basis.T @ basis, torch.eye(PLAN.rank), atol=1e-5)
    dense.bases, dense.round = one.bases.clone(), 1
    gradients = [normal(20 + i, SIZE) for i in range(2)]
    mean = (sent(one, gradients[0]) + sent(other, gradients[1])) / 2
    for replica_ in (one, other):
        await commit(replica_, mean)
    dense.take(gradients)
    for mine, expected in zip((one, other), dense.errors, strict=True):
        assert mine.residual is not None
        assert torch.allclose(mine.residual.values, expected, atol=1e-4)
        assert mine.residual.values.norm() < normal(20, SIZE).norm()


def test_norms_and_small_matrices_travel_finely() -> None:
    made = replica()
    assert made.codec.dense == PLAN.kept
    assert made.size == PLAN.size < SIZE / 2
    assert made.dense == DENSE  # what decays


def test_a_checkpoint_holds_bases_and_errors(tmp_path: Path) -> None:
    manifest = Manifest.model_validate({"mode": "allreduce", "outer": {"optimizer": "powersgd"}})
    layout = Layout.of_manifest(manifest)
    plan = Plan.of([(entry.offset, entry.shape) for entry in layout.entries], 4)
    base = normal(1, layout.size)
    vectors = {
        "m": normal(2, layout.size),
        "s": normal(3, layout.size),
        BASES: normal(4, plan.kept),
    }
    signed = SignedManifest.create(manifest, Identity.from_seed(bytes(32)))
    store, facts = (
        CheckpointStore(tmp_path),
        Facts(run=signed.run_id.hex(), round=1, step=1, tokens=1),
    )
    with store.draft() as draft:
        write_outer(draft, OuterFiles(base, vectors, signed, residual=normal(5, layout.size)))
        path = store.commit(draft, facts).path
    back = read_newest(path)[1]
    assert back.residual is not None
    assert back.residual.equal(normal(5, layout.size))
    assert {name: vector.equal(vectors[name]) for name, vector in back.vectors.items()} == {
        "m": True, "s": True, BASES: True,
    }  # fmt: skip
    assert floats_saved(manifest) == 7
    with store.draft() as draft:  # of another rank
        write_outer(draft, OuterFiles(base, vectors | {BASES: normal(4, plan.kept // 2)}, signed))
        path = store.commit(draft, facts).path
    with pytest.raises(CheckpointError):
        read_newest(path)


def test_what_powersgd_cannot_have_is_refused() -> None:
    assert (MANIFEST.outer.rank, MANIFEST.rounds.feedback) == (4, 1.0)
    check_runs(Manifest.model_validate(GIVEN))
    with pytest.raises(ValidationError, match="int4 or a finer codec"):
        Manifest.model_validate(GIVEN | {"rounds": {"codec": "int2"}})
    with pytest.raises(ValidationError, match="it is for gradients"):
        Manifest.model_validate({"outer": {"optimizer": "powersgd"}})
    wide = Manifest.model_validate(GIVEN | {"outer": {"optimizer": "powersgd", "rank": 200}})
    with pytest.raises(OperatorError, match=r"rank 200: no matrix has more than 400") as caught:
        check_runs(wide)
    assert caught.value.code == "E204"
