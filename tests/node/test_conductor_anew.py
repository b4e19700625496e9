"""What becomes of a snapshot when its trainer begins anew, or goes back to the last merge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conductor_kit import (
    ME,
    OTHER,
    SIZE,
    Gate,
    at_once,
    commit,
    commit_without,
    conductor,
    nobody,
    snapshot,
    take_in,
)

from bootstrap.manifest import Manifest
from gossip.catchup.lineage import Lineage
from gossip.place import Place
from node.island.ownership import VectorOwnership
from node.island.readiness import Readiness
from node.replicas.eager_state import EagerReplica
from node.replicas.replica import ChainStanding, OuterReplica
from node.trainer.channel import Applied, Begin, Snapshot
from node.trainer.shared import SharedVectors


@pytest.fixture
def vectors() -> Iterator[SharedVectors]:
    made = SharedVectors.create(SIZE)
    yield made
    made.close()


ALIGNED: dict[str, Any] = {
    "mode": "fedavg",
    "rounds": {"align": True},
    "outer": {"optimizer": "heavyball"},
}


async def test_a_trainer_that_begins_anew_stands_on_no_guess(vectors: SharedVectors) -> None:
    gate = Gate()
    gate.open.set()
    made, _ = conductor(vectors, gate.offload, {"mode": "eager"}, EagerReplica)
    replica = made.replicas[0]
    assert isinstance(replica, EagerReplica)
    await replica.aim()
    await replica.arrived()
    made.beginning.built()
    await made._begin()
    replica.sent.copy_(replica.base - 1)  # the new trainer's first snapshot
    assert replica.delta(0, SIZE, torch.empty(SIZE)).allclose(torch.ones(SIZE), atol=1e-5)


@pytest.mark.parametrize("then", ["moving", "moved", "reset"])
async def test_what_is_sent_of_a_snapshot_stays_as_it_was_when_its_trainer_begins_anew(
    vectors: SharedVectors, then: str
) -> None:
    """Whether or not the trainer has said that it moved to its guess: the exchange is on."""
    made, _ = conductor(vectors, at_once, {"mode": "eager"}, EagerReplica)
    assert made._guesses is not None
    replica = made.replicas[0]
    before = replica.delta(0, SIZE, torch.empty(SIZE)).clone()
    await made._guesses.make()
    if then != "moving":
        await made._guesses.moved()
    assert replica.delta(0, SIZE, torch.empty(SIZE)).equal(before)
    if then == "reset":
        made._reset_due = {0}
        await made._reset_if_due()
    else:
        made._guesses.lost()
        made._ownership.free()
        made.beginning.built()
        await made._begin()
    made._ownership.free()
    assert replica.delta(0, SIZE, torch.empty(SIZE)).equal(before)
    assert await made.save(Path("draft")) is not None, "it is on no guess"
    assert cast(Any, made.island).sent[-1].__class__.__name__ == "Save"


@pytest.mark.parametrize("reset", [False, True])
async def test_no_snapshot_takes_the_place_of_one_that_is_being_sent(
    vectors: SharedVectors, reset: bool
) -> None:
    """Its slices would be of two, and the round would count the later one as merged."""
    made, chain = conductor(vectors, at_once)
    replica = made.replicas[0]
    snapshot(vectors)
    chain.contributes = True
    if reset:
        made._reset_due = {0}
        await made._reset_if_due()
    else:
        vectors.clear()  # its ranks are no more
        made.beginning.built()
        await made._begin()
    vectors.clear()  # the trainer has read what it was given
    made._ownership.free()
    assert not vectors.try_snapshot()
    await commit_without(replica)
    chain.contributes = False
    vectors.clear(0)
    assert vectors.try_snapshot()
    vectors.end_snapshot(1)


@pytest.mark.parametrize("mode", ["diloco", "async"])
@pytest.mark.parametrize("kept", [False, True])
async def test_a_trainer_that_goes_back_does_not_read_again_what_is_still_to_be_merged(
    vectors: SharedVectors, kept: bool, mode: str
) -> None:
    made, chain = conductor(vectors, at_once, {"mode": mode})
    await made._on_snapshot(replace(snapshot(vectors), round_step=7))
    chain.contributes = kept
    for _ in range(2):  # also where it is lost again
        made._reset_due = {0}
        await made._reset_if_due()
        back = cast(Any, made.island).sent[-1]
        assert (back.reset, back.round_step) == (True, 7 if kept else 0)
        assert made.course.since == (7 if kept and mode == "diloco" else 0)
        vectors.clear()
        made._ownership.free()
    made._reset_due = {0}
    await commit_without(made.replicas[0])
    back = cast(Any, made.island).sent[-1]
    assert (back.reset, back.round_step) == (True, 0), "another round has other windows"


def test_windows_whose_steps_one_fragment_has_are_read_again_for_none() -> None:
    """A cycle ends with fragment 0's round."""
    three = cast(Any, SimpleNamespace(mode="diloco"))
    made = Readiness(
        three,
        cast(Any, None),
        cast(Any, (None,) * 3),
        cast(Any, None),
        VectorOwnership(3, free=True),
    )
    nothing = [False] * 3
    made.snapshot_step[1] = 5
    assert made.steps_read_of(nothing) == 0
    assert made.steps_read_of([False, True, False]) == 5
    made.answered(1, contributed=False)
    assert made.steps_read_of(nothing) == 0
    made.answered(1, contributed=True)
    made.snapshot_step[2] = 8
    assert made.steps_read_of(nothing) == 5
    assert made.steps_read_of([False, False, True]) == 8
    made.answered(0, contributed=True)
    assert made.steps_read_of([True] * 3) == 0


async def test_in_pairs_the_sketch_of_fragments_is_as_old_as_its_oldest_part() -> None:
    """Whatever number the island's rounds have leapt to since."""
    said: list[dict[str, Any]] = []
    still = SimpleNamespace(round=0, work=0)
    replica = SimpleNamespace(place=still, sent=torch.ones(SIZE), norm=lambda: 1.0, offload=at_once)
    vectors = SimpleNamespace(snapshot=lambda fragment: still.round)
    made = Readiness(
        Manifest.model_validate({"mode": "gossip", "rounds": {"fragments": 2}}),
        cast(Any, SimpleNamespace(vectors=vectors)),
        cast(Any, (replica,) * 2),
        cast(Any, SimpleNamespace(cuts=(slice(0, SIZE), slice(SIZE, 2 * SIZE)))),
        VectorOwnership(2, free=True),
    )
    swarm = cast(Any, SimpleNamespace(presence=SimpleNamespace(note=lambda **s: said.append(s))))
    for still.round, fragment in ((3, 0), (3, 1), (9, 0), (10, 1), (16, 1), (22, 1)):
        taken = Snapshot(still.round, 5, 640, finite=True, fragment=fragment)
        assert await made.contribution(taken, swarm, ramped=False)
    assert [one["sketch_round"] for one in said] == [3, 9, 10, 15, 21]


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("reset", [False, True])
async def test_what_is_offered_of_a_trainer_that_goes_back_stays_ready_where_it_is_kept(
    vectors: SharedVectors, reset: bool, kept: bool
) -> None:
    """The round would not begin without it, and no other snapshot is left before it has ended."""
    made, chain = conductor(vectors, at_once)
    cast(Any, made.island).restart = nobody
    chain.contributes = kept
    if reset:
        made._reset_due = {0}
        await made._reset_if_due()
    else:
        await made._start_again()
    assert [said["ready"] for said in chain.said] == ([] if kept else [False])


@pytest.mark.parametrize("way", ["ranks begin", "reset"])
async def test_what_is_learnt_anew_is_not_turned_for_the_age_of_what_was_given_up(
    vectors: SharedVectors, way: str
) -> None:
    made, _ = conductor(vectors, at_once, ALIGNED)
    cast(Any, made.island).restart = nobody
    turning = made.replicas[0].turning
    assert turning is not None
    turning.train()
    for _ in range(2):
        await commit_without(made.replicas[0])
        vectors.clear()
        made._ownership.free()
    assert turning.gone >= 1
    if way == "reset":
        made._reset_due = {0}
        await made._reset_if_due()
    else:
        await made._start_again()
        made.beginning.built()
        await made._begin()
    assert turning.gone == 0
    vectors.clear()
    made._ownership.free()
    await commit_without(made.replicas[0])
    assert turning.gone > 0, "it has been training since"


async def test_rounds_that_a_client_rests_in_do_not_make_its_next_work_late(
    vectors: SharedVectors,
) -> None:
    made, _ = conductor(vectors, at_once, ALIGNED)
    turning = made.replicas[0].turning
    assert turning is not None
    drawn = [False, False, True, True]
    cast(Any, made).course.targets.drawn = lambda swarm: drawn.pop(0)
    ages = []
    for _ in range(4):
        await commit_without(made.replicas[0])
        vectors.clear()
        made._ownership.free()
        ages.append(turning.gone)
    assert ages[:3] == [0, 0, 0]
    assert ages[3] > 0


async def test_ranks_that_begin_anew_leave_a_snapshot_once_the_round_is_over(
    vectors: SharedVectors,
) -> None:
    """Also where it has ended before they were there."""
    made, _ = conductor(vectors, at_once)
    vectors.keep(0, on=True)  # of ranks that have died as well
    made.beginning.built()
    await commit_without(made.replicas[0])
    vectors.clear()
    assert [type(sent) for sent in cast(Any, made.island).sent] == [Begin]
    assert vectors.try_snapshot()
    vectors.end_snapshot(1)


@pytest.mark.parametrize(
    ("how", "inherited", "keep", "why"),
    [
        ("downloaded", True, "local", "before this node was started again"),
        ("replayed", True, "local", "before this node was started again"),
        ("downloaded", False, "nothing", "more rounds than max_staleness"),
        ("downloaded", False, "local", ""),
        ("gone astray", True, "local", ""),
    ],
)
async def test_people_are_told_what_a_merge_drops_of_an_islands_work(
    vectors: SharedVectors, how: str, inherited: bool, keep: str, why: str
) -> None:
    """But not twice where its training was not finite, which has a line of its own."""
    made, _ = conductor(vectors, at_once)
    told: list[Any] = []
    replica, made.events = made.replicas[0], cast(Any, SimpleNamespace(emit=told.append))
    replica.inherited = inherited
    if how == "downloaded":
        await download(replica, keep)
    elif how == "replayed":
        await commit(replica, {ME: 1, OTHER: 1})
    else:
        made._reset_due = {0}
        await made._reset_if_due()
    (apply,) = cast(Any, made.island).sent
    assert apply.reset is (bool(why) or how == "gone astray")
    dropped = 12 if apply.reset else 0
    await take_in(made, Applied(replica.place.round, 12, 64, None, 0, dropped=dropped))
    await take_in(made, Applied(replica.place.round, 12, 64, None, 0, dropped=dropped))
    lines = [event.text for event in told]
    assert len(lines) == bool(why)
    assert all("drops what it has learnt in 12 inner steps" in line for line in lines)
    assert all(why in line for line in lines)


async def download(replica: OuterReplica, keep: Any) -> None:
    """One that drops all work or none, as a node that has missed many rounds does."""
    place = Place(replica.place.run, 0, replica.place.round + 3, bytes([3]) * 32, b"", 9)
    state = ChainStanding(place, (ME, OTHER), None, Lineage(place.run, (ME,)))
    await replica.jump([vector.clone() for vector in replica.state], state, keep=keep)


@pytest.mark.parametrize("then", ["before they have begun", "lost with them", "nothing was"])
async def test_nothing_is_told_to_be_dropped_for_the_reason_of_another_time(
    vectors: SharedVectors, then: str
) -> None:
    made, _ = conductor(vectors, at_once)
    told: list[Any] = []
    replica, made.events = made.replicas[0], cast(Any, SimpleNamespace(emit=told.append))
    cast(Any, made.island).restart = nobody
    if then == "before they have begun":
        await made._start_again()
        await download(replica, "nothing")
    else:
        await download(replica, "nothing")
        if then == "lost with them":
            await made._start_again()
    if then == "nothing was":
        await take_in(made, Applied(3, 12, 64, None, 0))
    else:
        made.beginning.built()
        await made._begin()
        await take_in(made, Applied(3, 0, 64, None, None))
        vectors.clear()
        made._reset_due = {0}  # its training is not finite, which has a line of its own
        await made._reset_if_due()
        await take_in(made, Applied(3, 12, 64, None, 0, dropped=12))
    assert told == []


async def test_of_several_fragments_it_is_said_which_one_drops_work(
    vectors: SharedVectors,
) -> None:
    made, _ = conductor(vectors, at_once)
    told: list[Any] = []
    replica, made.events = made.replicas[0], cast(Any, SimpleNamespace(emit=told.append))
    await download(replica, "nothing")
    made.replicas = (replica, replica)
    await take_in(made, Applied(3, 12, 64, None, 0, dropped=12))
    (line,) = told
    assert line.text.startswith("drops what it has learnt of fragment 0 in 12 inner steps: ")
