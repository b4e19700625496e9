"""What a conductor does when something happens while it waits for something else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
import torch
from conductor_kit import (
    OTHER,
    SIZE,
    Chain,
    Gate,
    at_once,
    commit,
    commit_without,
    conductor,
    snapshot,
)
from replica_kit import normal

from gossip.rounds.gathering import Gathering
from node.conductor import Conductor
from node.island.beginning import Stage
from node.island.silence import Silent
from node.replicas.eager_state import EagerReplica
from node.replicas.own_state import OwnReplica
from node.trainer.channel import (
    Begin,
    ChannelClosedError,
    InnerSteps,
    Ready,
    Saved,
    Staged,
    StepDone,
    Stopped,
)
from node.trainer.shared import SharedVectors


@pytest.fixture
def vectors() -> Iterator[SharedVectors]:
    made = SharedVectors.create(SIZE)
    yield made
    made.close()


@pytest.mark.parametrize("voids", [False, True])
async def test_a_trainer_is_told_where_it_keeps_nothing(
    vectors: SharedVectors, voids: bool
) -> None:
    made, _ = conductor(vectors, at_once)
    made.replicas[0].voids = voids
    await made.release(0, contributed=False, reset=False)
    (told,) = cast(Any, made.island).sent
    assert told.voids is voids


async def test_an_evaluation_is_asked_for_though_the_count_of_rounds_leaps_over_its_multiple(
    vectors: SharedVectors,
) -> None:
    tables = {"mode": "gossip", "rounds": {"eval_every": 10}}
    made, _ = conductor(vectors, at_once, tables, OwnReplica)
    replica = made.replicas[0]
    for round_ in (7, 12, 19, 26):
        replica._place = replace(replica.place, round=round_)
        await made.release(0, contributed=False, reset=False)
        made._ownership.free(0)
    assert [told.evaluate for told in cast(Any, made.island).sent] == [False, True, False, True]


async def test_a_snapshot_is_ready_for_its_round(vectors: SharedVectors) -> None:
    gate = Gate()
    gate.open.set()
    made, chain = conductor(vectors, gate.offload)
    await made._on_snapshot(snapshot(vectors))
    assert [said["ready"] for said in chain.said] == [True]


async def test_a_step_tells_of_the_islands_that_live_and_of_no_server(
    vectors: SharedVectors,
) -> None:
    made, _ = conductor(vectors, at_once)
    told: list[Any] = []
    cast(Any, made.events).emit = told.append
    there = [SimpleNamespace(role=role) for role in ("island", "server", "island")]
    cast(Any, made.swarm).membership.members_alive = lambda now: there
    await made._on_step(StepDone(0, 1, 3.0, None, 0.1, 64, 1.0))
    assert [one.peers for one in told] == [3]


@pytest.mark.parametrize("begun", [True, False])
async def test_a_trainer_is_put_to_rest_for_good_as_its_node_leaves(
    vectors: SharedVectors, begun: bool
) -> None:
    """Neither a round that is still applied nor one that wants its work has it train again."""
    made, _ = conductor(vectors, at_once, {"mode": "fedavg"})
    told = cast(Any, made.island).sent
    if not begun:
        made.beginning.stage = Stage.BUILT
    await made.rest()
    assert told == [InnerSteps(0)] * begun
    made.course.targets.drawn = lambda swarm: True  # type: ignore[method-assign]
    await made.look_again()
    assert told == [InnerSteps(0)] * begun
    await made.release(0, contributed=False, reset=False)
    assert [one.target_steps for one in told] == [0] * (1 + begun)


@pytest.mark.parametrize(
    ("weights", "skipped", "share"),
    [("tokens", 2, 3 / 5), ("tokens", 5, 1 / 5), ("rate", 2, 3 / 5)],
)
async def test_steps_that_changed_nothing_weigh_nothing(
    vectors: SharedVectors, weights: str, skipped: int, share: float
) -> None:
    """Whoever has none left counts for one, so that a round of such islands has a weight."""
    tables = {"mode": "diloco", "merge": {"weights": weights}}
    taken = snapshot(vectors)
    for part in (0, skipped):
        made, chain = conductor(vectors, at_once, tables)
        await made._on_snapshot(replace(taken, skipped=part))
        (said,) = chain.said
        if not part:
            whole = said["weight"]
    assert said["weight"] == pytest.approx(share * whole)
    assert (said["tokens"], said["steps"]) == (taken.tokens, taken.steps)


async def test_parameters_that_no_letter_carries_are_not_offered_and_the_trainer_goes_back(
    vectors: SharedVectors,
) -> None:
    """Encoded, they would end the node; they are of no more use than what is not finite."""
    tables = {"mode": "gossip", "rounds": {"codec": "auto", "codecs": ["bf16", "fp16"]}}
    made, chain = conductor(vectors, at_once, tables, OwnReplica)
    events: list[Any] = []
    made.events = cast(Any, SimpleNamespace(emit=events.append))
    made.replicas[0].sent[7] = 70_000.0
    await made._on_snapshot(snapshot(vectors))
    assert [event.detail for event in events] == [
        "own training is beyond what fp16 can carry; back to the last merge"
    ]
    assert [said["ready"] for said in chain.said] == [False]
    (told,) = cast(Any, made.island).sent
    assert told.reset
    assert torch.equal(made.replicas[0].base, normal(1, SIZE))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
async def test_what_memory_has_spoilt_since_the_trainer_looked_is_not_offered(
    vectors: SharedVectors, wrong: float
) -> None:
    """Its norm cannot even be said: that ended the node."""
    made, chain = conductor(vectors, at_once)
    events: list[Any] = []
    made.events = cast(Any, SimpleNamespace(emit=events.append))
    made.replicas[0].sent[7] = wrong
    await made._on_snapshot(snapshot(vectors))
    assert [event.detail for event in events] == [
        "own training is not finite; back to the last merge"
    ]
    assert not any(said["ready"] for said in chain.said)
    assert made.readiness.sketched == [(-1, 0)], "nor is it in a sketch"
    (told,) = cast(Any, made.island).sent
    assert told.reset


async def test_a_round_without_a_snapshot_of_ours_says_nothing_of_transfers(
    vectors: SharedVectors,
) -> None:
    """The last snapshot was of an earlier round, which has answered it."""
    made, chain = conductor(vectors, at_once)
    chain.under_way = True
    seconds: list[float] = []
    made.course.chooser.transfer = cast(Any, SimpleNamespace(add=seconds.append, most=0.0))
    await made._on_snapshot(snapshot(vectors))
    await commit_without(made.replicas[0])
    assert len(seconds) == 1
    vectors.clear(0)
    made._ownership.free(0)
    await made.hold(0)
    assert len(seconds) == 1


@pytest.mark.parametrize("read", [True, False], ids=["the trainer has read it", "it has not yet"])
async def test_what_a_round_has_left_behind_is_not_ready_for_the_next(
    vectors: SharedVectors, read: bool
) -> None:
    gate = Gate()
    made, chain = conductor(vectors, gate.offload)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        looking = tasks.create_task(made._on_snapshot(snapshot(vectors)))
        await gate.reached.wait()
        await commit_without(made.replicas[0])
        assert made.replicas[0].place.round == 1
        if read:
            vectors.clear(0)
            made._ownership.free(0)
        gate.open.set()
        await looking
    assert chain.said == []  # Δ would be the outer step that was just taken, turned round


async def test_people_are_told_of_a_trainer_that_is_silent(vectors: SharedVectors) -> None:
    made, _ = conductor(vectors, at_once)
    told: list[Any] = []
    made.events = cast(Any, SimpleNamespace(emit=told.append))
    events: asyncio.Queue[Any] = asyncio.Queue()
    cast(Any, made.island).next_event = events.get
    for event in (Silent("it builds its model"), Stopped()):
        events.put_nowait(event)
    await made.run()
    assert [event.text for event in told] == ["it builds its model"]


async def run_with_a_checkpoint(vectors: SharedVectors, *reports: Any) -> Any:
    """What becomes of a checkpoint that is asked for when the trainer reports this."""
    conducting, _ = conductor(vectors, at_once)
    events: asyncio.Queue[Any] = asyncio.Queue()
    cast(Any, conducting.island).next_event = events.get
    running = asyncio.create_task(conducting.run())

    async def save() -> Any:
        asked = await conducting.save(Path("draft"))
        assert asked is not None
        await asked.copied
        return await asked.written

    saving = asyncio.create_task(save())
    async with asyncio.timeout(10):
        while not cast(Any, conducting.island).sent:  # noqa: ASYNC110 - a list of a fake
            await asyncio.sleep(0)
        for report in reports:
            events.put_nowait(report)
        await running
        return await saving


@pytest.mark.parametrize("before", [[], [Staged("draft")]], ids=["asked", "being written"])
async def test_a_trainer_that_is_gone_is_not_waited_for(
    vectors: SharedVectors, before: list[Any]
) -> None:
    """A script that was killed while its node saves: the node may leave at once."""
    with pytest.raises(ChannelClosedError):
        await run_with_a_checkpoint(vectors, *before, Stopped())


async def test_a_trainer_that_has_ended_in_order_has_saved(vectors: SharedVectors) -> None:
    saved = Saved("draft", "", False)
    assert await run_with_a_checkpoint(vectors, Staged("draft"), saved, Stopped()) == saved


async def test_files_are_asked_for_between_the_move_back_and_the_next_guess(
    vectors: SharedVectors,
) -> None:
    """What is written is off every guess, though rounds may be applied before it is copied."""
    made, _ = conductor(vectors, at_once, {"mode": "eager"}, EagerReplica)
    assert made._guesses is not None
    await made._guesses.make()
    assert await made.save(Path("draft")) is None, "it is about to be on a guess"
    await made._guesses.moved()
    assert await made.save(Path("draft")) is None, "it is on a guess"
    back = asyncio.create_task(made.take_back())
    await asyncio.sleep(0)
    assert await made.save(Path("draft")) is None, "it is about to go back"
    await made._guesses.moved()
    await back
    asked = await made.save(Path("draft"))
    assert asked is not None
    assert not asked.copied.done()
    sent = [type(command).__name__ for command in cast(Any, made.island).sent]
    assert sent == ["Shift", "Shift", "Save", "Shift"]


async def test_no_guess_is_made_again_of_a_snapshot_that_was_merged_meanwhile(
    vectors: SharedVectors,
) -> None:
    made, _ = conductor(vectors, at_once, {"mode": "eager"}, EagerReplica)
    assert made._guesses is not None
    await made._guesses.make()
    await made._guesses.moved()
    back = asyncio.create_task(made.take_back())
    await asyncio.sleep(0)
    await made._guesses.moved()
    await back
    await commit_without(made.replicas[0])
    assert await made.save(Path("draft")) is not None
    sent = [type(command).__name__ for command in cast(Any, made.island).sent]
    assert sent == ["Shift", "Shift", "Apply", "Save"]


def creator_that_waits(vectors: SharedVectors) -> tuple[Conductor, Chain]:
    """For two others, and for its own trainer."""
    made, chain = conductor(vectors, at_once)
    made.gathering = Gathering(3)
    chain.kick = lambda: None  # type: ignore[attr-defined]
    made.beginning.stage = Stage.COMING
    made.layout = cast(Any, SimpleNamespace(size=SIZE, digest="00", cuts=made.layout.cuts))
    return made, chain


async def test_the_trainer_of_a_creator_that_waits_begins_after_the_first_round(
    vectors: SharedVectors,
) -> None:
    made, chain = creator_that_waits(vectors)
    await made._on_ready(Ready(SIZE, b"\0"))
    sent = cast(Any, made.island).sent
    assert sent == []
    assert made.gathering.able
    assert chain.said == [], "who waits for it is not told when it will be ready"
    made.beginning.joined = True  # as those whom it lets in
    await commit(made.replicas[0], {OTHER: 0})
    (begin,) = sent
    assert isinstance(begin, Begin)
    assert not begin.rewarm, "nobody's optimizer is warmer"


async def test_a_creator_that_waits_does_not_count_while_its_ranks_start_again(
    vectors: SharedVectors,
) -> None:
    made, _ = creator_that_waits(vectors)
    cast(Any, made.island).restart = AsyncMock()
    await made._on_ready(Ready(SIZE, b"\0"))
    await made._start_again()
    assert not made.gathering.able
    await made._on_ready(Ready(SIZE, b"\0"))
    assert made.gathering.able


async def test_who_waits_to_be_let_in_says_that_it_can_begin(vectors: SharedVectors) -> None:
    made, chain = conductor(vectors, at_once)
    made.beginning.stage, made.beginning.expects_moments = Stage.COMING, True
    made.layout = cast(Any, SimpleNamespace(size=SIZE, digest="00", cuts=made.layout.cuts))
    await made._on_ready(Ready(SIZE, b"\0"))
    assert cast(Any, made.island).sent == []
    assert chain.said == [{"eta": 60.0}]
