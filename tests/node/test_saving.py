"""Checkpoints that two processes write: what one does where the other has failed."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from checkpoint_kit import make
from saving_kit import SlowTrainer, keeper_at

from node.checkpoints import patience, saving, trainer_files
from node.checkpoints.checkpoint import CheckpointStore, DiskFullError
from node.checkpoints.index import Facts, said_by, verify
from node.checkpoints.outer_files import OuterFiles
from node.checkpoints.trainer_files import Asked
from node.conductor import Conductor
from node.monitor.events import CheckpointSkipped, Notice
from node.trainer.channel import StepDone
from protocols.memory import virtual_time


async def test_a_draft_that_failed_is_gone_only_when_nobody_writes_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(draft: Path, outer: OuterFiles) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saving, "write_outer", full)
    events: list[Any] = []
    trainer = SlowTrainer()
    keeper = keeper_at(tmp_path, events)
    keeper.conductor = cast(Conductor, trainer)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(keeper.save())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not first.done(), "the trainer is still writing"
        trainer.write()
    assert not first.result()
    assert not os.listdir(tmp_path)
    assert [type(one) for one in events] == [CheckpointSkipped]
    assert "no room" in events[0].reason


async def test_a_full_disk_is_said_once_but_to_who_leaves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the last checkpoint lacks is in no later one."""

    def full(draft: Path, outer: OuterFiles) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    events: list[Any] = []
    keeper = keeper_at(tmp_path, events)
    with monkeypatch.context() as patched:
        patched.setattr(saving, "write_outer", full)
        for _ in range(3):
            assert not await keeper.save()
        assert len(events) == 1
        assert not await keeper.save(wait=True)
        assert len(events) == 2
        assert "(E402)" in events[1].reason
        assert isinstance(keeper.failed, DiskFullError)
    monkeypatch.setattr(keeper, "_fill", whole)
    assert await keeper.save()
    assert keeper.failed is None


async def whole(draft: Path, last: object, alone: bool) -> Facts:
    return Facts(run="r", round=1, step=0, tokens=0)


def test_there_is_room_for_one_like_the_newest_or_there_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, usage = keeper_at(tmp_path / "checkpoints", []), shutil.disk_usage(tmp_path)
    newest = tmp_path / "checkpoints" / "ckpt-00000001"
    newest.mkdir()
    (newest / "outer.bin").write_bytes(bytes(1000))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=999))
    assert keeper.fits()  # nobody knows
    keeper.newest = newest
    assert not keeper.fits()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert keeper.fits()


async def test_a_folder_that_went_away_is_told_and_ends_nothing(tmp_path: Path) -> None:
    events: list[Any] = []
    keeper = keeper_at(tmp_path / "checkpoints", events)
    (tmp_path / "checkpoints").rmdir()
    assert not await keeper.save()
    assert "is gone" in events[0].reason
    assert "(E105)" in events[0].reason


def test_a_long_inner_step_holds_up_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that is applied before the trainer has copied its files is not in the checkpoint."""
    monkeypatch.setattr(saving, "write_outer", lambda draft, outer: None)
    monkeypatch.setattr(patience, "TRAINER_TIMEOUT_S", 1.0)
    keeper = keeper_at(tmp_path, [])

    async def story() -> None:
        rounds, trainer = asyncio.Lock(), SlowTrainer(copies=False)
        for step, seconds in ((5, 0.01), (6, 0.01), (7, 50.0)):  # 50 s a step, of late
            trainer.pace.add(StepDone(3, step, 1.0, 1.0, 1e-3, 64, seconds))
        keeper.conductor = cast(Conductor, trainer)
        keeper.still = lambda: cast(Any, rounds)
        async with asyncio.TaskGroup() as tasks:
            saving_ = tasks.create_task(keeper.save())
            while trainer.copied is None:  # noqa: ASYNC110 - a field of a fake
                await asyncio.sleep(0)
            async with rounds:
                place = SimpleNamespace(round=4, previous=b"", state=b"")
                cast(Any, keeper.replicas[0]).place = place
            await asyncio.sleep(50.0)
            assert not saving_.done(), "it may be as long as its steps are"
            trainer.pace.add(StepDone(3, 8, 1.0, 1.0, 1e-3, 64, 50.0))
            trainer.copied.set_result(None)
            await asyncio.sleep(0)
            trainer.write()
        assert saving_.result()

    virtual_time.run(story())
    found = keeper.store.latest().checkpoint
    assert found is not None
    assert (found.facts.round, found.facts.step) == (3, 8)


async def test_a_round_waits_for_no_thread_that_writes_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has to copy before it changes the vectors, it copies by a thread of rounds."""
    monkeypatch.setattr(saving, "write_outer", lambda draft, outer: None)
    keeper, trainer = keeper_at(tmp_path, []), SlowTrainer()
    keeper.conductor, free = cast(Conductor, trainer), asyncio.Event()

    async def busy(work: Callable[[], Any]) -> Any:
        await free.wait()
        return work()

    keeper.offload = busy
    replica: Any = keeper.replicas[0]
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        saved = tasks.create_task(keeper.save())
        while replica.frozen is None:  # noqa: ASYNC110 - a field of a fake
            await asyncio.sleep(0)
        await replica.frozen.thaw(0)
        assert not free.is_set()
        free.set()
        while trainer.writing is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        trainer.write()
    assert saved.result()


@pytest.mark.parametrize("leaves", [False, True])
def test_steps_that_are_far_longer_all_at_once_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """0.2 s, then 590 s: nothing told of it before. Who leaves meanwhile waits for less."""
    monkeypatch.setattr(saving, "write_outer", lambda draft, outer: None)

    async def story() -> None:
        events: list[Any] = []
        trainer, keeper = SlowTrainer(copies=False), keeper_at(tmp_path, events)
        trainer.pace.add(StepDone(3, 5, 1.0, 1.0, 1e-3, 64, 0.2))
        keeper.conductor = cast(Conductor, trainer)
        async with asyncio.TaskGroup() as tasks:
            saving_ = tasks.create_task(keeper.save())
            await asyncio.sleep(300.0)
            assert not saving_.done()
            if leaves:
                asked = asyncio.get_running_loop().time()
                assert await keeper.save(wait=True), "what there is without the trainer"
                kinds = [one.kind for one in events]
                assert kinds == ["checkpoint_skipped", "checkpoint_skipped", "checkpoint"]
                assert asyncio.get_running_loop().time() - asked < 300.0
            else:
                await asyncio.sleep(290.0)
                assert not saving_.done()
                assert trainer.copied is not None
                trainer.copied.set_result(None)
                await asyncio.sleep(0)
                trainer.write()
        assert saving_.result() is not leaves

    virtual_time.run(story())


@pytest.mark.parametrize("begun", [True, False])
async def test_a_trainer_that_is_stuck_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    monkeypatch.setattr(patience, "TRAINER_TIMEOUT_S", 0.1)
    events: list[Any] = []
    trainer, keeper = SlowTrainer(copies=False), keeper_at(tmp_path, events)
    if begun:
        trainer.pace.add(StepDone(3, 5, 1.0, 1.0, 1e-3, 64, 0.001))
    else:  # who is at its first step may take longer
        monkeypatch.setattr(patience, "FIRST_STEP_S", 0.3)
    keeper.conductor = cast(Conductor, trainer)
    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(60):  # an hour, if it counted as at its first step
        assert not await keeper.save()
    assert trainer.writing is not None
    assert trainer.writing.cancelled(), "nothing is being written"
    assert begun or asyncio.get_running_loop().time() - began >= 0.3
    assert "one inner step" in events[0].reason
    assert not os.listdir(tmp_path)


def test_a_checkpoint_without_hard_links_is_copied_as_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    path = make(store, 3).path

    def refuses(*given: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    aside = store.aside(path)
    assert aside == path
    store.drop(aside)
    assert os.listdir(tmp_path) == [path.name]
    verify(path)


def test_checkpoints_by_time_leave_the_disk_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large model one takes minutes: the next is not to begin as it ends."""

    class Writes(SlowTrainer):
        async def save(self, draft: Path) -> Asked:
            asked = await super().save(draft)
            begun.append(_now())
            asyncio.get_running_loop().call_later(100.0, self.write)
            return asked

    begun: list[float] = []
    events: list[Any] = []
    monkeypatch.setattr(saving, "write_outer", lambda draft, outer: None)
    for module in (saving, trainer_files):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=_now))

    async def story() -> None:
        keeper = keeper_at(tmp_path, events)
        keeper.conductor, keeper._began = cast(Conductor, Writes()), _now()
        with suppress(TimeoutError):
            async with asyncio.timeout(4000):
                await keeper.by_time(600.0)

    virtual_time.run(story())
    assert [round(after - begun[0]) for after in begun] == [0, 1000, 2000, 3000]
    said = [one.text for one in events if isinstance(one, Notice)]
    assert len(said) == 2, "each is said once"
    assert "260 s" in said[0]  # two of them, and a minute
    assert "16m between two of them" in said[1]


def _now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("evaluated", "loss", "said"),
    [(None, 1.5, None), (2, 1.5, None), (3, 1.5, 1.5), (3, float("nan"), None)],
)
async def test_a_checkpoint_has_the_loss_of_the_parameters_that_are_in_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    evaluated: int | None,
    loss: float,
    said: float | None,
) -> None:
    """Not that of an earlier round."""
    events: list[Any] = []
    keeper = keeper_at(tmp_path, events)
    if evaluated is not None:
        keeper.note_loss(evaluated, loss)
    monkeypatch.setattr(saving.Keeper, "_write", lambda self, draft, outer: None)
    assert await keeper.save()
    (found,) = keeper.store.paths()
    index = said_by(found)
    assert index is not None
    assert index.validation == said
    assert [event.best for event in events] == ["" if said is None else found.name]


async def test_a_checkpoint_has_no_loss_of_other_parameters_of_its_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of the side of a split that has lost: its place was taken by the other side's state."""
    events: list[Any] = []
    keeper = keeper_at(tmp_path, events)
    keeper.note_loss(3, 1.5)
    place: Any = keeper.replicas[0].place
    monkeypatch.setattr(saving.Keeper, "_write", lambda self, draft, outer: None)
    losses = []
    for place.state in (b"lost", b"state"):
        assert await keeper.save()
        index = said_by(keeper.store.paths()[0])
        assert index is not None
        losses.append(index.validation)
    assert losses == [None, 1.5]
