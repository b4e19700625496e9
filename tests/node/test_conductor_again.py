"""What a conductor does when its trainer dies and its ranks are started again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conductor_kit import (
    OTHER,
    SIZE,
    Gate,
    Trainer,
    at_once,
    commit_without,
    conductor,
    nobody,
    snapshot,
    take_in,
)

from node.checkpoints.trainer_files import Taken
from node.island.beginning import Stage
from node.island.ownership import VectorOwnership
from node.island.rank_ends import TrainerDied
from node.replicas.eager_state import EagerReplica
from node.replicas.own_state import OwnReplica
from node.trainer.channel import Applied, Begin, ChannelClosedError, Saved, StepDone
from node.trainer.shared import SharedVectors
from node.trainer.trainer_state import FOLDER, STATE, FragmentState, StepTotals, TrainerState
from protocols.errors import OperatorError
from protocols.messages import UNKNOWN_ETA_S


@pytest.fixture
def vectors() -> Iterator[SharedVectors]:
    made = SharedVectors.create(SIZE)
    yield made
    made.close()


async def test_a_trainer_that_dies_before_it_begins_is_sent_nothing(
    vectors: SharedVectors,
) -> None:
    """The next one would begin before it is known what it has built, and then again."""
    gate = Gate()
    gate.open.set()
    made, _ = conductor(vectors, gate.offload)
    trainer = cast(Trainer, made.island)
    made.beginning.built()

    async def refresh() -> None:
        trainer.alive = False
        made.beginning.lost()

    made.refresh = refresh
    await made._begin()
    assert trainer.sent == []
    assert not made.beginning.begun
    assert made._ownership.is_free(0)
    trainer.alive = True
    made.beginning.built()
    await made._begin()
    assert len(trainer.sent) == 1


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("member", [True, False])
async def test_who_only_follows_rounds_has_no_ranks_that_ever_begin_without_one_more(
    vectors: SharedVectors, begun: bool, member: bool
) -> None:
    """A member's ranks that died will begin again, and so come to the end of the run."""
    made, _ = conductor(vectors, at_once)
    if not begun:
        made.beginning.lost()
    if not member:
        made.replicas[0]._roster = (OTHER,)
    assert made.follows is (not begun and not member)


@pytest.mark.parametrize("kept", [True, False])
async def test_ranks_that_are_started_again_have_the_newest_moments(
    vectors: SharedVectors, kept: bool
) -> None:
    gate = Gate()
    gate.open.set()
    made, _ = conductor(vectors, gate.offload)
    trainer = cast(Trainer, made.island)
    there = Taken(Path("checkpoint"), 0) if kept else None

    async def spare() -> Taken | None:
        return there

    async def restart(**changes: int) -> None:
        pass

    made.spare, trainer.restart = spare, restart  # type: ignore[attr-defined]
    await made._start_again(micro_batch=1)
    made.beginning.built()
    await made._begin()
    (begin,) = trainer.sent
    assert (begin.moments, begin.moments_steps) == ("checkpoint" * kept, 0)
    assert begin.rewarm is made.beginning.joined is not kept
    assert not begin.resume


async def test_who_leaves_without_ranks_waits_for_none(vectors: SharedVectors) -> None:
    """Once they cannot be started again: a round may have been on its way to them."""
    made, _ = conductor(vectors, at_once)
    trainer = cast(Any, made.island)
    trainer.settings = SimpleNamespace(compile=False, collective_s=1.0)
    asked = await made.files.save(Path("draft"))
    await made._ownership.take(0)
    made._ownership.written(0)
    died = TrainerDied(0, None, "", "E999", "internal error", Path("log"), "")
    with pytest.raises(OperatorError) as caught:
        await made._on_death(died)
    assert made.failed is caught.value
    assert made._ownership.is_free(0), "as the last checkpoint waits for rounds that are applied"
    assert isinstance(asked.written.exception(), ChannelClosedError)
    assert not made.training


@pytest.mark.parametrize("begun", [False, True])
async def test_ranks_that_die_while_they_resume_begin_from_the_checkpoint_again(
    vectors: SharedVectors, begun: bool
) -> None:
    """What it holds of work that is not merged is there until they have it."""
    made, _ = conductor(vectors, at_once)
    trainer = cast(Trainer, made.island)
    trainer.restart = nobody  # type: ignore[attr-defined]
    made.beginning.checkpoint = Path("ckpt-00000000")
    made.beginning.built()
    await made._begin()
    assert not made._ownership.is_free(0)
    if begun:
        await take_in(made, Applied(0, 0, 0, None, None))
    await made._start_again()
    assert made._ownership.is_free(0) is begun, "rounds wait until it stands where that was made"
    made.beginning.built()
    await made._begin()
    resumed = [begin.resume for begin in trainer.sent]
    assert resumed == ["ckpt-00000000", "" if begun else "ckpt-00000000"]


@pytest.mark.parametrize("where", ["before it begins", "while it begins", "once it has read them"])
async def test_a_newcomer_s_ranks_that_die_early_have_the_donor_s_moments_all_the_same(
    vectors: SharedVectors, tmp_path: Path, where: str
) -> None:
    made, _ = conductor(vectors, at_once)
    trainer, file = cast(Trainer, made.island), tmp_path / "moments.taken"
    trainer.restart = nobody  # type: ignore[attr-defined]
    file.write_bytes(b"moments")

    async def spare() -> Taken | None:
        return None  # it has no checkpoint yet

    made.spare, made.beginning.joined = spare, True
    made.beginning.built()
    if where == "before it begins":
        made.beginning.expects_moments = True
        await made._start_again()
        await made.take(Taken(file, 7))
    else:
        await made.take(Taken(file, 7))
        if where == "once it has read them":
            made._has_begun()
            assert not file.exists()
        await made._start_again()
    made.beginning.built()
    await made._begin()
    begin, kept = trainer.sent[-1], where != "once it has read them"
    assert (begin.moments, begin.moments_steps) == ((str(file), 7) if kept else ("", 0))
    assert begin.rewarm is not kept


@pytest.mark.parametrize("mode", ["diloco", "async"])
async def test_steps_of_a_cycle_are_counted_as_the_trainer_counts_them(
    vectors: SharedVectors, tmp_path: Path, mode: str
) -> None:
    """From where ranks begin: others plan by when they will be ready."""
    made, chain = conductor(vectors, at_once, {"mode": mode})
    cast(Any, made.island).restart = nobody
    made.pace.add(StepDone(0, 1, 3.0, None, 0.1, 64, 1.0))
    made.course.since, made.course.target = 400, 500
    assert made.eta(0) == 100
    await made._start_again()
    assert chain.said == [{"ready": False, "eta": UNKNOWN_ETA_S}]
    made.beginning.built()
    await made._begin()
    made.course.target = 500
    assert made.eta(0) == 500
    share = FragmentState(round=0, carried=StepTotals(steps=30), unsent=StepTotals(steps=5))
    standing = TrainerState(
        fragments=(share,), round_step=20, step=90, tokens=1, rewarm_from=None, optimizer_steps=1
    )
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / STATE).write_text(standing.model_dump_json())
    made.beginning.checkpoint = tmp_path
    made.beginning.built()
    await made._begin()
    made.course.target = 500
    assert made.eta(0) == (480 if mode == "diloco" else 465)


async def test_ranks_that_were_started_meanwhile_are_told_of_no_round_before_they_begin(
    vectors: SharedVectors,
) -> None:
    """An evaluation waits for another fragment, which may take longer than they need to come up."""
    made, _ = conductor(vectors, at_once, {"mode": "diloco", "rounds": {"eval_every": 1}})
    trainer = cast(Trainer, made.island)

    async def restart() -> None:
        trainer.starts += 1

    trainer.restart = restart  # type: ignore[attr-defined]
    made._ownership = VectorOwnership(2, free=True)
    await made._ownership.take(1)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        applying = tasks.create_task(commit_without(made.replicas[0]))
        while made.replicas[0].place.round == 0:  # noqa: ASYNC110 - a field
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        await made._start_again()
        made.beginning.built()
        beginning = tasks.create_task(made._begin())
        await asyncio.sleep(0)
        assert not applying.done()
        assert not beginning.done()
        made._ownership.written(1)
    assert [(type(sent), sent.round) for sent in trainer.sent] == [(Begin, 1)]


async def test_ranks_that_were_started_while_a_guess_was_made_are_not_moved_to_it(
    vectors: SharedVectors,
) -> None:
    gate = Gate()
    made, _ = conductor(vectors, gate.offload, {"mode": "eager"}, EagerReplica)
    trainer = cast(Trainer, made.island)
    assert made._guesses is not None

    async def restart() -> None:
        trainer.starts += 1

    trainer.restart = restart  # type: ignore[attr-defined]
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        guessing = tasks.create_task(made._guesses.make())
        await gate.reached.wait()
        await made._start_again()
        made.beginning.built()
        beginning = tasks.create_task(made._begin())
        await asyncio.sleep(0)
        assert not beginning.done()
        gate.open.set()
        await guessing
    assert [type(sent) for sent in trainer.sent] == [Begin]


async def test_a_host_that_came_is_taken_in_when_nothing_is_written_any_more(
    vectors: SharedVectors,
) -> None:
    """With a checkpoint of each round one is being written at the first step of every cycle."""
    made, _ = conductor(vectors, at_once)
    trainer = cast(Any, made.island)
    trainer.grown, restarted = False, []

    async def restart() -> None:
        restarted.append(made.course.since)
        trainer.grown = False

    trainer.restart = restart
    made.course.since = 7

    async def step() -> None:
        await made._on_step(StepDone(0, 1, 3.0, None, 0.1, 64, 1.0))

    trainer.grown = True
    await step()
    assert restarted == [], "in the middle of a cycle much would be lost"
    made.course.since = 0
    await made.files.save(Path("draft"))
    for _ in range(3):
        await step()
    assert restarted == []
    made.files.told(Saved("draft", "", full=False))
    await step()
    assert restarted == [4]
    made.beginning.stage = Stage.BEGUN
    await step()
    assert restarted == [4]


async def test_hosts_that_were_lost_are_taken_in_again_after_a_round_that_was_merged(
    vectors: SharedVectors,
) -> None:
    made, _ = conductor(vectors, at_once)
    trainer, merged = cast(Any, made.island), []
    trainer.merged = lambda: merged.append(made.replicas[0].place.round)
    await take_in(made, Applied(0, 0, 0, None, None))  # what it begins with
    await take_in(made, Applied(0, 0, 0, None, 0))  # back to the last merge
    assert merged == []
    await commit_without(made.replicas[0])
    await take_in(made, Applied(1, 4, 64, None, 0))
    assert merged == [1]


@pytest.mark.parametrize("mode", ["diloco", "async"])
@pytest.mark.parametrize("kept", [False, True])
async def test_ranks_that_are_started_again_do_not_read_again_what_is_still_to_be_merged(
    vectors: SharedVectors, kept: bool, mode: str
) -> None:
    made, chain = conductor(vectors, at_once, {"mode": mode})
    cast(Any, made.island).restart = nobody
    made.pace.add(StepDone(0, 1, 3.0, None, 0.1, 64, 1.0))
    await made._on_snapshot(replace(snapshot(vectors), round_step=7))

    async def begun() -> Begin:
        vectors.clear()  # its ranks are no more
        await made._start_again()
        made.beginning.built()
        await made._begin()
        begin = cast(Any, made.island).sent[-1]
        assert isinstance(begin, Begin)
        return begin

    chain.contributes = kept
    for _ in range(2):  # also where these die
        assert (await begun()).round_step == (7 if kept else 0)
    assert made.course.since == (7 if kept and mode == "diloco" else 0)
    vectors.clear()
    made._ownership.free()
    await commit_without(made.replicas[0])
    assert (await begun()).round_step == 0, "another round has other windows"


async def test_in_pairs_ranks_that_are_started_again_begin_behind_what_is_exchanged(
    vectors: SharedVectors,
) -> None:
    """A copy of it goes into the outer step; what the new ranks learn is not in that."""
    made, chain = conductor(vectors, at_once, {"mode": "gossip"}, OwnReplica)
    cast(Any, made.island).restart = nobody
    made.pace.add(StepDone(0, 1, 3.0, None, 0.1, 64, 1.0))
    for step in (7, 12):
        vectors.clear()
        await made._on_snapshot(replace(snapshot(vectors), round_step=step))
        chain.exchanges = True
        vectors.clear()
        await made._start_again()
        made.beginning.built()
        await made._begin()
        assert cast(Any, made.island).sent[-1].round_step == 7
        assert vectors.try_snapshot(), "the copy is what travels"
        vectors.clear()
    made._ownership.free()
    made.replicas[0].blend.start(made.replicas[0].sent)
    await made.replicas[0].finish(0, ours=False)
    assert cast(Any, made.island).sent[-1].round_step == 0, "another round has other windows"
