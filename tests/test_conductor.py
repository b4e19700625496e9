"""What a conductor does when something happens while it waits for something else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from gossip_kit import counts_of
from replica_kit import ME, OTHER, normal

from bootstrap.manifest import Manifest
from node.conductor import Conductor
from node.eager_state import EagerReplica
from node.own_state import OwnReplica
from node.replica import OuterReplica
from node.trainer.channel import (
    Applied,
    Begin,
    ChannelClosedError,
    Saved,
    Snapshot,
    Staged,
    StepDone,
    Stopped,
)
from node.trainer.resume import FOLDER, STATE, Share, Standing, Work
from node.trainer.shared import SharedVectors
from node.trainer_files import Taken
from node.turns import Turns
from protocols.codecs import RangeCodec
from protocols.counts import Included
from protocols.messages import UNKNOWN_ETA_S, Certificate, Contributor, Outcome, PartResult
from protocols.tasks import Offload

SIZE = 3000
ALIGNED: dict[str, Any] = {
    "mode": "fedavg",
    "rounds": {"align": True},
    "outer": {"optimizer": "heavyball"},
}


class Gate:
    """A pool whose first piece of work is done at once, and heard of when the gate opens."""

    def __init__(self) -> None:
        self.open, self.reached = asyncio.Event(), asyncio.Event()

    async def offload(self, work: Callable[[], Any]) -> Any:
        done = work()
        if not self.reached.is_set():
            self.reached.set()
            await self.open.wait()
        return done


class Trainer:
    """An island whose trainer reads at once what it is given."""

    alive, starts, directory = True, 1, Path()

    def __init__(self, vectors: SharedVectors) -> None:
        self.vectors = vectors
        self.sent: list[Any] = []

    async def claim(self, fragment: int = 0) -> None:
        assert self.vectors.try_claim(fragment)

    async def send(self, command: Any) -> None:
        self.sent.append(command)


class Chain:
    """What this node says of itself."""

    planned, contributes, fragment = False, False, 0

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def timed(self) -> list[float]:
        return []

    def update(self, **changes: Any) -> None:
        self.said.append(changes)


@pytest.fixture
def vectors() -> Iterator[SharedVectors]:
    made = SharedVectors.create(SIZE)
    yield made
    made.close()


def conductor(
    vectors: SharedVectors,
    offload: Offload,
    tables: dict[str, Any] | None = None,
    kind: type[OuterReplica] = OuterReplica,
) -> tuple[Conductor, Chain]:
    """At round 0, with a trainer that trains, and a snapshot out."""
    manifest = Manifest.model_validate(tables or {"mode": "diloco"})
    replica = kind(manifest, ME, vectors, RangeCodec("fp32", SIZE), offload, (ME, OTHER), 0)
    replica.base.copy_(normal(1, SIZE))
    replica.sent.copy_(replica.base + 0.01 * normal(2, SIZE))
    layout = SimpleNamespace(size=SIZE, cuts=(slice(0, SIZE),))

    async def on_applied(applied: Any) -> None:
        pass

    made = Conductor(
        manifest,
        ME,
        cast(Any, Trainer(vectors)),
        (replica,),
        cast(Any, layout),
        cast(Any, SimpleNamespace(emit=lambda event: None)),
        None,
        on_applied,
        joined=False,
    )
    chain = Chain()
    nobody = SimpleNamespace(islands_alive=lambda now: (), announcement=lambda peer: None)
    presence = SimpleNamespace(note=lambda **changes: None, status=None)
    made.swarm = cast(
        Any,
        SimpleNamespace(
            chains=[chain], me=ME, presence=presence, membership=nobody, now=lambda: 0.0
        ),
    )
    made._begun = True
    return made, chain


def snapshot(vectors: SharedVectors) -> Snapshot:
    assert vectors.try_snapshot()
    vectors.end_snapshot(0)
    return Snapshot(round=0, steps=5, tokens=640, loss=3.0, seconds=1.0, finite=True)


async def at_once(work: Callable[[], Any]) -> Any:
    return work()


async def take_in(made: Conductor, *reports: Any) -> None:
    """The trainer reports this."""
    told = iter([*reports, Stopped(0, 0)])

    async def next_event() -> Any:
        return next(told)

    cast(Any, made.island).next_event = next_event
    await made.run()


async def commit_without(replica: OuterReplica) -> None:
    """A round of the other island alone."""
    place = replica.place
    counts = counts_of((Included(0, SIZE),))
    part = PartResult(0, 0, 0, SIZE, OTHER, "fp32", bytes(32), counts, bytes(32), b"")
    outcome = Outcome(
        0,
        0,
        place.previous,
        place.state,
        "fp32",
        (Contributor(OTHER, 1.0, 1, True),),
        (part,),
        (ME, OTHER),
        1,
    )
    data = torch.empty(replica.codec.encoded_size(0, SIZE), dtype=torch.uint8)
    replica.codec.encode(0, 0.01 * normal(3, SIZE), data)
    certificate = Certificate(bytes(32), 0, 0, (ME, OTHER), outcome, ())
    await replica.apply(certificate, {(0, SIZE): data})


async def test_a_trainer_that_dies_before_it_begins_is_sent_nothing(
    vectors: SharedVectors,
) -> None:
    """The next one would begin before it is known what it has built, and then again."""
    gate = Gate()
    gate.open.set()
    made, _ = conductor(vectors, gate.offload)
    trainer = cast(Trainer, made.island)
    made._begun, made.ready = False, cast(Any, object())

    async def refresh() -> None:
        trainer.alive, made.ready = False, None

    made.refresh = refresh
    await made._begin()
    assert trainer.sent == []
    assert not made._begun
    assert made._turns.is_free(0)
    trainer.alive, made.ready = True, cast(Any, object())
    await made._begin()
    assert len(trainer.sent) == 1


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
    made.ready = cast(Any, object())
    await made._begin()
    (begin,) = trainer.sent
    assert (begin.moments, begin.moments_steps) == ("checkpoint" * kept, 0)
    assert begin.rewarm is made.joined is not kept
    assert not begin.resume


async def nobody(**changes: int) -> None:
    """Ranks that are started again; what they say comes later."""


@pytest.mark.parametrize("begun", [False, True])
async def test_ranks_that_die_while_they_resume_begin_from_the_checkpoint_again(
    vectors: SharedVectors, begun: bool
) -> None:
    """What it holds of work that is not merged is there until they have it."""
    made, _ = conductor(vectors, at_once)
    trainer = cast(Trainer, made.island)
    trainer.restart = nobody  # type: ignore[attr-defined]
    made._begun, made.ready, made.resume_dir = False, cast(Any, object()), Path("ckpt-00000000")
    await made._begin()
    assert not made._turns.is_free(0)
    if begun:
        await take_in(made, Applied(0, 0, 0, None, None))
    await made._start_again()
    assert made._turns.is_free(0) is begun, "rounds wait until it stands where that was made"
    made.ready = cast(Any, object())
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

    made.spare, made.joined = spare, True
    made._begun, made.ready = False, cast(Any, object())
    if where == "before it begins":
        made.expects_moments = True
        await made._start_again()
        await made.take(Taken(file, 7))
    else:
        await made.take(Taken(file, 7))
        if where == "once it has read them":
            made._has_begun()
            assert not file.exists()
        await made._start_again()
    made.ready = cast(Any, object())
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
    made._since, made._target = 400, 500
    assert made.eta(0) == 100
    await made._start_again()
    assert chain.said == [{"ready": False, "eta": UNKNOWN_ETA_S}]
    made.ready = cast(Any, object())
    await made._begin()
    made._target = 500
    assert made.eta(0) == 500
    share = Share(round=0, carried=Work(steps=30), unsent=Work(steps=5))
    standing = Standing(
        fragments=(share,), round_step=20, step=90, tokens=1, rewarm_from=None, optimizer_steps=1
    )
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / STATE).write_text(standing.model_dump_json())
    made.resume_dir = tmp_path
    await made._begin()
    made._target = 500
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
    made._turns = Turns(2, free=True)
    await made._turns.take(1)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        applying = tasks.create_task(commit_without(made.replicas[0]))
        while made.replicas[0].place.round == 0:  # noqa: ASYNC110 - a field
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        await made._start_again()
        made.ready = cast(Any, object())
        beginning = tasks.create_task(made._begin())
        await asyncio.sleep(0)
        assert not applying.done()
        assert not beginning.done()
        made._turns.written(1)
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
        made.ready = cast(Any, object())
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
        restarted.append(made._since)
        trainer.grown = False

    trainer.restart = restart
    made.swarm, made._since = None, 7

    async def step() -> None:
        made._on_step(StepDone(0, 1, 3.0, None, 0.1, 64, 1.0))
        await made._take_hosts_in()

    trainer.grown = True
    await step()
    assert restarted == [], "in the middle of a cycle much would be lost"
    made._since = 0
    await made.files.save(Path("draft"))
    for _ in range(3):
        await step()
    assert restarted == []
    made.files.told(Saved("draft", "", full=False))
    await step()
    assert restarted == [4]
    made._begun = True
    await step()
    assert restarted == [4]


async def test_a_trainer_that_begins_anew_stands_on_no_guess(vectors: SharedVectors) -> None:
    gate = Gate()
    gate.open.set()
    made, _ = conductor(vectors, gate.offload, {"mode": "eager"}, EagerReplica)
    replica = made.replicas[0]
    assert isinstance(replica, EagerReplica)
    await replica.aim()
    await replica.arrived()
    made._begun, made.ready = False, cast(Any, object())
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
        made._turns.free()
        made._begun, made.ready = False, cast(Any, object())
        await made._begin()
    made._turns.free()
    assert replica.delta(0, SIZE, torch.empty(SIZE)).equal(before)
    assert await made.save(Path("draft")) is not None, "it is on no guess"
    assert cast(Any, made.island).sent[-1].__class__.__name__ == "Checkpoint"


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
        made._begun, made.ready = False, cast(Any, object())
        await made._begin()
    vectors.clear()  # the trainer has read what it was given
    made._turns.free()
    assert not vectors.try_snapshot()
    await commit_without(replica)
    chain.contributes = False
    vectors.clear(0)
    assert vectors.try_snapshot()
    vectors.end_snapshot(1)


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
        made.ready = cast(Any, object())
        await made._begin()
        begin = cast(Any, made.island).sent[-1]
        assert isinstance(begin, Begin)
        return begin

    chain.contributes = kept
    for _ in range(2):  # also where these die
        assert (await begun()).round_step == (7 if kept else 0)
    assert made._since == (7 if kept and mode == "diloco" else 0)
    vectors.clear()
    made._turns.free()
    await commit_without(made.replicas[0])
    assert (await begun()).round_step == 0, "another round has other windows"


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
        made._turns.free()
    assert turning.gone >= 1
    if way == "reset":
        made._reset_due = {0}
        await made._reset_if_due()
    else:
        await made._start_again()
        made.ready = cast(Any, object())
        await made._begin()
    assert turning.gone == 0
    vectors.clear()
    made._turns.free()
    await commit_without(made.replicas[0])
    assert turning.gone > 0, "it has been training since"


async def test_rounds_that_a_client_rests_in_do_not_make_its_next_work_late(
    vectors: SharedVectors,
) -> None:
    made, _ = conductor(vectors, at_once, ALIGNED)
    turning = made.replicas[0].turning
    assert turning is not None
    drawn = [False, False, True, True]
    cast(Any, made)._targets.drawn = lambda swarm: drawn.pop(0)
    ages = []
    for _ in range(4):
        await commit_without(made.replicas[0])
        vectors.clear()
        made._turns.free()
        ages.append(turning.gone)
    assert ages[:3] == [0, 0, 0]
    assert ages[3] > 0


async def test_ranks_that_begin_anew_leave_a_snapshot_once_the_round_is_over(
    vectors: SharedVectors,
) -> None:
    """Also where it has ended before they were there."""
    made, _ = conductor(vectors, at_once)
    vectors.keep(0, on=True)  # of ranks that have died as well
    made._begun, made.ready = False, cast(Any, object())
    await commit_without(made.replicas[0])
    vectors.clear()
    assert [type(sent) for sent in cast(Any, made.island).sent] == [Begin]
    assert vectors.try_snapshot()
    vectors.end_snapshot(1)


@pytest.mark.parametrize("voids", [False, True])
async def test_a_trainer_is_told_where_it_keeps_nothing(
    vectors: SharedVectors, voids: bool
) -> None:
    made, _ = conductor(vectors, at_once)
    made.replicas[0].voids = voids
    await made.resume(0, contributed=False, reset=False)
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
        await made.resume(0, contributed=False, reset=False)
        made._turns.free(0)
    assert [told.evaluate for told in cast(Any, made.island).sent] == [False, True, False, True]


async def test_a_snapshot_is_ready_for_its_round(vectors: SharedVectors) -> None:
    gate = Gate()
    gate.open.set()
    made, chain = conductor(vectors, gate.offload)
    await made._on_snapshot(snapshot(vectors))
    assert [said["ready"] for said in chain.said] == [True]


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


async def test_a_round_without_a_snapshot_of_ours_says_nothing_of_transfers(
    vectors: SharedVectors,
) -> None:
    """The last snapshot was of an earlier round, which has answered it."""
    made, chain = conductor(vectors, at_once)
    chain.planned = True
    seconds: list[float] = []
    made._chooser.transfer = cast(Any, SimpleNamespace(add=seconds.append, most=0.0))
    await made._on_snapshot(snapshot(vectors))
    await commit_without(made.replicas[0])
    assert len(seconds) == 1
    vectors.clear(0)
    made._turns.free(0)
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
            made._turns.free(0)
        gate.open.set()
        await looking
    assert chain.said == []  # Δ would be the outer step that was just taken, turned round


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
        await run_with_a_checkpoint(vectors, *before, Stopped(0, 0))


async def test_a_trainer_that_has_ended_in_order_has_saved(vectors: SharedVectors) -> None:
    saved = Saved("draft", "", False)
    assert await run_with_a_checkpoint(vectors, Staged("draft"), saved, Stopped(1, 8)) == saved


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
    assert sent == ["Shift", "Shift", "Checkpoint", "Shift"]


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
    assert sent == ["Shift", "Shift", "Apply", "Checkpoint"]
