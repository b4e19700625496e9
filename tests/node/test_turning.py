"""Late work under ``node start`` is turned as the rule says, whatever range of it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gossip_kit import counts_of
from pydantic import ValidationError

from bootstrap.manifest import Manifest
from diloco import asynchronous
from gossip.catchup.lineage import Lineage
from gossip.place import Place
from node.replicas.replica import ChainStanding, OuterReplica
from node.replicas.turning import Turning
from node.trainer.shared import SharedVectors
from protocols.codecs import CHUNK, RangeCodec
from protocols.counts import Included
from protocols.identity import Identity, PeerId
from protocols.memory.virtual_time import inline
from protocols.messages import Certificate, Contributor, Outcome, PartResult

SIZE = CHUNK * 2 + 700
ME = PeerId(Identity.from_seed(b"m" * 32).peer_id)
ASYNC = {"mode": "async", "rounds": {"align": True, "codec": "fp32"}}


def normal(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def replica() -> Iterator[OuterReplica]:
    vectors = SharedVectors.create(SIZE)
    codec = RangeCodec("fp32", SIZE - 100)
    made = OuterReplica(Manifest.model_validate(ASYNC), ME, vectors, codec, inline, (ME,))
    made.base.copy_(normal(1))
    made.sent.copy_(made.base - normal(2))
    made.vectors["v"].copy_(normal(3) * 0.1)
    yield made
    vectors.close()


def delta(replica: OuterReplica, start: int, stop: int) -> torch.Tensor:
    return replica.delta(start, stop, torch.empty(stop - start))


def late(replica: OuterReplica, rounds: float) -> Turning:
    assert replica.turning is not None
    replica.turning.train()
    for _ in range(4):  # four of four islands, one after the other
        replica.turning.note(rounds / 4, mine=False)
    return replica.turning


async def arrival(replica: OuterReplica, round_: int) -> None:
    """A round that merges the work of the second of the roster alone."""
    who, place = replica.roster[1], replica.place
    counts = counts_of((Included(0, SIZE),))
    part = PartResult(0, round_, 0, SIZE, who, "fp32", bytes(32), counts, bytes(32), b"")
    contributors = (Contributor(who, 1.0, 1, True),)
    outcome = Outcome(
        0, round_, place.previous, place.state, "fp32", contributors, (part,), replica.roster, 1
    )
    data = {(0, SIZE): normal(round_).view(torch.uint8)}
    await replica.apply(Certificate(bytes(32), 0, 0, replica.roster, outcome, ()), data)


def turned_block(own: torch.Tensor, way: torch.Tensor) -> torch.Tensor:
    """Of work that is two rounds late."""
    keep, add = asynchronous.turning(own, way, 2)
    return keep * own + add * way


def test_late_work_is_turned_by_the_rule_and_keeps_its_norm(replica: OuterReplica) -> None:
    before = delta(replica, 0, SIZE)
    late(replica, 2.0)
    norm = replica.norm()
    way = replica.vectors["v"]
    blocks = zip(before.split(CHUNK), way.split(CHUNK), strict=True)
    expected = torch.cat([turned_block(*block) for block in blocks])
    turned = delta(replica, 0, SIZE)
    assert torch.allclose(turned, expected, atol=1e-6)
    assert norm == pytest.approx(before.norm().item(), rel=1e-3)
    assert torch.dot(turned, way) > torch.dot(before, way)
    for start, stop in ((0, 5), (CHUNK - 3, CHUNK + 3), (10, SIZE), (SIZE - 1, SIZE)):
        assert delta(replica, start, stop).equal(turned[start:stop])


def test_work_of_the_same_round_stays_as_it_is(replica: OuterReplica) -> None:
    before = delta(replica, 0, SIZE)
    late(replica, 0.75)  # three of four have been in a round meanwhile: all are as fast
    replica.norm()
    assert delta(replica, 0, SIZE).equal(before)
    turning = late(replica, 3.0)
    turning.note(0.25, mine=True)
    replica.norm()
    assert delta(replica, 0, SIZE).equal(before)
    late(replica, 3.0).reset()
    replica.norm()
    assert delta(replica, 0, SIZE).equal(before)


def test_who_rests_with_nothing_in_hand_is_not_late(replica: OuterReplica) -> None:
    turning = late(replica, 2.0)
    turning.note(0.5, mine=True)
    for _ in range(3):  # rounds of other clients
        turning.note(0.5, mine=False)
    assert turning.gone == 0
    turning.train()  # from the newest base
    turning.note(0.5, mine=False)
    assert turning.gone == 0.5
    turning.note(0.5, mine=False)  # it rests, with what that round went without
    assert turning.gone == 1.0


@pytest.mark.parametrize("islands", range(2, 65))
def test_a_whole_round_of_single_arrivals_is_one(islands: int, replica: OuterReplica) -> None:
    before = delta(replica, 0, SIZE)
    assert replica.turning is not None
    replica.turning.train()
    for _ in range(islands):
        replica.turning.note(1 / islands, mine=False)
    replica.norm()
    assert not delta(replica, 0, SIZE).equal(before)


@pytest.mark.parametrize("keep", ["local", "nothing"])
async def test_rounds_that_were_missed_by_a_download_count_too(
    replica: OuterReplica, keep: str
) -> None:
    """Of four islands that arrive one by one: forty arrivals are ten rounds."""
    assert replica.turning is not None
    replica.turning.train()
    before = replica.place
    roster = tuple(PeerId(Identity.from_seed(bytes([n]) * 32).peer_id) for n in range(4))
    place = Place(before.run, 0, before.round + 40, b"h" * 32, b"", 40)
    state = ChainStanding(place, roster, None, Lineage(before.run, (ME,)))
    await replica.jump([vector.clone() for vector in replica.state], state, keep=keep)
    assert replica.turning.gone == (10 if keep == "local" else 0)


@pytest.mark.parametrize("how", ["replayed", "downloaded"])
@pytest.mark.parametrize(("mode", "gone"), [("diloco", 2.0), ("async", 0.5)])
async def test_a_missed_round_counts_alike_however_it_is_made_up_for(
    mode: str, gone: float, how: str
) -> None:
    """Two rounds of four islands, each with another's work alone: in common rounds it is late by
    both, of single arrivals each is a quarter of one.
    """
    roster = tuple(PeerId(Identity.from_seed(bytes([n]) * 32).peer_id) for n in range(4))
    manifest = Manifest.model_validate({**ASYNC, "mode": mode})
    vectors = SharedVectors.create(SIZE)
    made = OuterReplica(manifest, ME, vectors, RangeCodec("fp32", SIZE), inline, roster)
    assert made.turning is not None
    made.turning.train()
    if how == "replayed":
        for round_ in range(2):
            await arrival(made, round_)
    else:
        place = Place(made.place.run, 0, 2, b"h" * 32, b"", 2)
        state = ChainStanding(place, roster, None, Lineage(place.run, roster))
        await made.jump([vector.clone() for vector in made.state], state, keep="local")
    assert made.turning.gone == gone


async def test_a_round_that_merged_nothing_leaves_nobody_behind(replica: OuterReplica) -> None:
    assert replica.turning is not None
    replica.turning.train()
    place = replica.place
    outcome = Outcome(0, 0, place.previous, place.state, "fp32", (), (), (ME,), place.work)
    await replica.apply(Certificate(bytes(32), 0, 0, (ME,), outcome, ()), {})
    assert replica.turning.gone == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": "fedavg", "rounds": {"align": True}}, "no direction"),
        ({"mode": "gossip", "rounds": {"align": True}}, "nobody's work is late"),
        ({"outer": {"optimizer": "sparseloco"}, "rounds": {"align": True}}, "no direction"),
    ],
)
def test_what_has_no_momentum_cannot_be_aligned(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Manifest.model_validate(changes)


def test_no_turn_follows_from_work_of_the_future() -> None:
    with pytest.raises(ValueError, match="rounds old"):
        asynchronous.turning(torch.ones(3), torch.ones(3), -1)
    # straight against it, and a round late, both count alike: no direction is left
    assert asynchronous.turning(torch.ones(3), -torch.ones(3), 1) == (1.0, 0.0)
