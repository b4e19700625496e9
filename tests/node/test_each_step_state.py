"""The outer state of eager rounds, of rounds of gradients, and of rounds of a few coordinates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from gossip_kit import counts_of
from replica_kit import ME, OTHER, normal

from bootstrap.manifest import Inner, Manifest
from diloco import sparta
from gossip.catchup.lineage import Lineage
from gossip.plans.rules import Rules
from node.replicas.eager_state import EagerReplica
from node.replicas.gradient_state import GradientReplica
from node.replicas.replica import ChainStanding, OuterReplica
from node.replicas.sparse_state import SparseReplica
from node.trainer.shared import SharedVectors
from protocols.codecs import RangeCodec
from protocols.counts import Included
from protocols.memory.virtual_time import inline
from protocols.messages import Certificate, Contributor, Outcome, PartResult

SIZE, DENSE = 3000, 2500
VECTORS: list[SharedVectors] = []


class Waiting:
    """A trainer that stands still at the snapshot of the round that comes."""

    def __init__(self, replica: OuterReplica) -> None:
        self.replica = replica

    async def hold(self) -> int | None:
        return self.replica.place.round

    async def release(self, *, contributed: bool, reset: bool) -> None:
        pass


def replica(kind: type[OuterReplica], manifest: Manifest) -> OuterReplica:
    """At round 0, with a snapshot out."""
    vectors = SharedVectors.create(SIZE)
    VECTORS.append(vectors)
    made = kind(manifest, ME, vectors, RangeCodec("fp32", DENSE), inline, (ME, OTHER))
    made.base.copy_(normal(1, SIZE))
    made.sent.copy_(made.base + 0.01 * normal(2, SIZE))
    made.trainer = Waiting(made)
    return made


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    VECTORS.clear()


async def commit(
    replica: OuterReplica, mean: torch.Tensor, *, mine: bool, scale: float = 1.0
) -> None:
    """A round of two islands of one weight, or of the other alone; mine is scaled."""
    place = replica.place
    size = len(mean)
    who = [Included(0, size), *([Included(1, size)] if mine else [])]
    part = PartResult(
        0, place.round, 0, size, OTHER, "fp32", bytes(32), counts_of(tuple(who)), bytes(32), b""
    )
    outcome = Outcome(
        0,
        place.round,
        place.previous,
        place.state,
        "fp32",
        (Contributor(OTHER, 1.0, 1, True), Contributor(ME, 1.0, 1, True, scale=scale)),
        (part,),
        (ME, OTHER),
        1,
    )
    data = torch.empty(replica.codec.encoded_size(0, size), dtype=torch.uint8)
    replica.codec.encode(0, mean, data)
    await replica.apply(Certificate(bytes(32), 0, 0, (ME, OTHER), outcome, ()), {(0, size): data})


async def moved(replica: EagerReplica, theta: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """θ after a guess, as the trainer moves it."""
    await replica.aim(back=back)
    theta = theta + replica.sent
    await replica.arrived(back=back)
    return theta


@pytest.mark.parametrize("mine", [True, False])
async def test_a_guess_is_corrected_by_what_all_have_agreed_on(mine: bool) -> None:
    eager = replica(EagerReplica, Manifest.model_validate({"mode": "eager"}))
    plain = replica(
        OuterReplica,
        Manifest.model_validate({"mode": "diloco", "outer": {"lr": 0.4, "lr_start": 0.4}}),
    )
    assert isinstance(eager, EagerReplica)
    before, snapshot = eager.base.clone(), eager.sent.clone()
    delta, since = before - snapshot, 0.01 * normal(3, SIZE)
    assert torch.allclose(eager.delta(0, SIZE, torch.empty(SIZE)), delta)
    theta = await moved(eager, snapshot.clone())
    assert not torch.allclose(theta, snapshot, atol=1e-4)  # the outer step of its own share
    assert torch.allclose(eager.delta(0, SIZE, torch.empty(SIZE)), delta, atol=1e-6)
    theta += since
    mean = 0.01 * normal(4, SIZE)
    for one in (eager, plain):
        await commit(one, mean, mine=mine)
    assert eager.base.equal(plain.base)  # the state of all knows nothing of guesses
    theta = eager.base + (theta - eager.sent)
    learnt = since if mine else since - delta
    assert torch.allclose(theta, eager.base + learnt, atol=1e-5)


async def test_of_a_mean_in_which_mine_was_clipped_the_rest_is_the_others() -> None:
    eager = replica(EagerReplica, Manifest.model_validate({"mode": "eager"}))
    assert isinstance(eager, EagerReplica)
    mine = eager.base - eager.sent
    await moved(eager, eager.sent.clone())
    theirs = 0.01 * normal(5, SIZE)
    await commit(eager, 0.5 * theirs + 0.5 * 0.4 * mine, mine=True, scale=0.4)
    assert eager._others is not None
    assert torch.allclose(eager._others, 0.5 * theirs, atol=1e-6)


async def test_a_checkpoint_finds_no_guess_in_the_parameters() -> None:
    eager = replica(EagerReplica, Manifest.model_validate({"mode": "eager"}))
    assert isinstance(eager, EagerReplica)
    snapshot = eager.sent.clone()
    theta = await moved(eager, snapshot.clone())
    guessed = theta.clone()
    theta = await moved(eager, theta, back=True)
    assert torch.allclose(theta, snapshot, atol=1e-6)
    assert not eager.guessed
    theta = await moved(eager, theta)
    assert torch.allclose(theta, guessed, atol=1e-6)


@pytest.mark.parametrize("back", [False, True])
async def test_a_fork_that_lost_brings_its_work_and_no_guess(back: bool) -> None:
    eager = replica(EagerReplica, Manifest.model_validate({"mode": "eager"}))
    assert isinstance(eager, EagerReplica)
    snapshot, since = eager.sent.clone(), 0.01 * normal(3, SIZE)
    theta = await moved(eager, snapshot.clone())
    if back:  # a checkpoint was made meanwhile
        theta = await moved(eager, theta, back=True)
    there = [normal(6, SIZE), *(vector.clone() for vector in eager.state[1:])]
    place = dataclasses.replace(eager.place, round=1, previous=b"h" * 32, work=9)
    standing = ChainStanding(place, (ME, OTHER), None, Lineage(place.run, (ME, OTHER)))
    await eager.jump(there, standing, keep="all")
    theta = eager.base + (theta + since - eager.sent)
    assert eager.base.equal(there[0])
    assert torch.allclose(theta, snapshot + since, atol=1e-6)


async def test_rounds_of_gradients_are_adamw() -> None:
    inner = Inner(warmup_steps=0, schedule="constant", lr=0.01, weight_decay=0.5)
    state = replica(GradientReplica, Manifest(mode="allreduce", inner=inner))
    reference = [
        torch.nn.Parameter(state.base[cut].clone()) for cut in (slice(DENSE), slice(DENSE, None))
    ]
    torch_adamw = torch.optim.AdamW(
        [
            {"params": reference[:1], "weight_decay": 0.5},
            {"params": reference[1:], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=inner.betas,
        eps=inner.eps,
    )
    for step in range(4):
        gradient = normal(10 + step, SIZE)
        state.sent.copy_(gradient)
        assert state.delta(0, SIZE, torch.empty(SIZE)).equal(gradient)
        reference[0].grad, reference[1].grad = gradient[:DENSE].clone(), gradient[DENSE:].clone()
        torch_adamw.step()
        await commit(state, gradient, mine=True)
    assert torch.allclose(state.base, torch.cat([p.detach() for p in reference]), atol=1e-6)


async def test_one_bit_adam_sends_momentum_once_it_is_warm() -> None:
    given = {"mode": "allreduce", "outer": {"optimizer": "onebit-adam", "warmup_rounds": 2}}
    state = replica(GradientReplica, Manifest.model_validate(given))
    for step in range(2):
        state.sent.copy_(normal(10 + step, SIZE))
        assert state.delta(0, SIZE, torch.empty(SIZE)).equal(state.sent)
        await commit(state, state.sent.clone(), mine=True)
    momentum, frozen = state.vectors["m"].clone(), state.vectors["s"].clone()
    assert bool((frozen > 0).all())
    sent = state.delta(100, 200, torch.empty(100))
    assert torch.allclose(sent, 0.9 * momentum[100:200] + 0.1 * state.sent[100:200])
    await commit(state, normal(20, SIZE), mine=True)
    assert state.vectors["m"].equal(normal(20, SIZE))
    assert state.vectors["s"].equal(frozen)


def test_the_codec_is_another_one_from_the_switch_on() -> None:
    rules = Rules(10, ("bf16", "int1"), lambda name, start, stop: stop - start, switch=3)
    assert [rules.at(round_).codecs for round_ in (2, 3)] == [("bf16",), ("int1",)]
    assert dataclasses.replace(rules, switch=None).at(5).codecs == rules.codecs


async def test_a_round_of_coordinates_averages_those_and_keeps_the_rest() -> None:
    """Two islands: at the draw both have the mean, elsewhere each what it has learnt."""
    share = 0.3  # 900 of 3000; the last draw of a walk has 300
    given = {"mode": "sparta", "rounds": {"share": share, "codec": "fp32"}}
    state = replica(SparseReplica, Manifest.model_validate(given))
    theta = state.sent.clone()
    other = state.base + 0.01 * normal(3, SIZE)
    state.codec = RangeCodec("fp32", state.size)
    merged = torch.zeros(SIZE, dtype=torch.bool)
    for round_ in range(4):
        before = state.base.clone()
        at = sparta.coordinates(SIZE, share, round_, 0).sort().values
        own = state.delta(0, state.size, torch.empty(state.size))
        assert own[: len(at)].equal(before[at] - theta[at])
        assert not own[len(at) :].any()
        assert torch.equal(state.delta(100, 200, torch.empty(100)), own[100:200])
        theirs = torch.zeros(state.size)
        theirs[: len(at)] = before[at] - other[at]
        await commit(state, (own + theirs) / 2, mine=True)
        theta_before, theta = theta, state.base + (theta - state.sent)
        merged[at] = True
        here = torch.zeros(SIZE, dtype=torch.bool)
        here[at] = True
        assert torch.allclose(theta[here], ((theta_before + other) / 2)[here], atol=1e-6)
        assert torch.allclose(theta[~here], theta_before[~here], atol=1e-6)
        assert state.base[~here].equal(before[~here])
        state.sent.copy_(theta)
    assert merged.all()


async def test_a_round_of_coordinates_without_this_island_takes_nothing_from_it() -> None:
    given = {"mode": "sparta", "rounds": {"share": 0.3, "codec": "fp32"}}
    state = replica(SparseReplica, Manifest.model_validate(given))
    state.codec = RangeCodec("fp32", state.size)
    before, theta = state.base.clone(), state.sent.clone()
    await commit(state, 0.01 * normal(5, state.size), mine=False)
    assert torch.allclose(state.base - state.sent, state.base - before)
    after = state.base + (theta - state.sent)
    assert torch.allclose(after - state.base, theta - before, atol=1e-6)
