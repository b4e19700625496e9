"""The checkpoint of who leaves: it waits for a slow disk, and for no trainer that is stuck."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from checkpoint_kit import make
from saving_kit import SlowTrainer, keeper_at

from node.checkpoints import patience, saving
from node.checkpoints.index import Facts, verify
from node.conductor import Conductor
from node.multiples import Multiples
from node.participation import Participation
from node.trainer.channel import Applied, ChannelClosedError
from protocols.memory import virtual_time


async def test_a_round_that_waits_for_a_stuck_trainer_does_not_hold_up_who_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is applied once the trainer has taken in the one before, which may be never."""
    monkeypatch.setattr(patience, "HURRIED_S", 0.1)
    events: list[Any] = []
    rounds, keeper = asyncio.Lock(), keeper_at(tmp_path, events)
    keeper.conductor = cast(Conductor, SlowTrainer())
    keeper.still = lambda: cast(Any, rounds)
    async with rounds, asyncio.timeout(10), AsyncExitStack() as stack:
        assert not await keeper.save(wait=True, last=stack)
    assert "one inner step" in events[0].reason
    assert not rounds.locked()


def test_who_leaves_waits_for_a_slow_disk_and_for_no_trainer_that_is_stuck_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "write_outer", lambda draft, outer: None)
    events: list[Any] = []

    async def story() -> None:
        clock = SimpleNamespace(monotonic=asyncio.get_running_loop().time)
        monkeypatch.setattr("node.checkpoints.trainer_files.time", clock)
        trainer, keeper = SlowTrainer(), keeper_at(tmp_path, events)
        keeper.conductor = cast(Conductor, trainer)
        async with asyncio.TaskGroup() as tasks:
            saving_ = tasks.create_task(keeper.save(wait=True))
            while not trainer.draft.name:  # noqa: ASYNC110 - a field of a fake
                await asyncio.sleep(0)
            for part in range(6):
                await asyncio.sleep(0.9 * patience.HURRIED_S)
                (trainer.draft / f"part-{part}").write_bytes(b"x")
            assert not saving_.done()
        assert saving_.result(), "without it"

    virtual_time.run(story())
    assert "written nothing" in events[0].reason
    (made,) = os.listdir(tmp_path)
    assert not (tmp_path / made / "trainer").exists()


@pytest.mark.parametrize("leaving", [False, True])
async def test_what_a_script_s_end_breaks_off_is_no_alarm_where_the_last_one_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaving: bool
) -> None:
    monkeypatch.setattr(saving, "write_outer", lambda draft, outer: None)
    events: list[Any] = []
    trainer, keeper = SlowTrainer(), keeper_at(tmp_path, events)
    keeper.conductor, keeper.leaving = cast(Conductor, trainer), lambda: leaving
    for wait in (False, True):  # the last one is told of: none follows it
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            saving_ = tasks.create_task(keeper.save(wait=wait))
            while trainer.writing is None or trainer.writing.done():  # noqa: ASYNC110 - a fake
                await asyncio.sleep(0)
            trainer.writing.set_exception(ChannelClosedError("the trainer has ended"))
        assert saving_.result() is wait, "the last one is made without it"
        skipped = [one for one in events if one.kind == "checkpoint_skipped"]
        assert len(skipped) == wait + (not leaving)
    found = keeper.store.latest().checkpoint
    assert found is not None
    assert not (found.path / "trainer").exists()


async def test_who_leaves_before_its_trainer_has_resumed_keeps_what_it_has(tmp_path: Path) -> None:
    """A checkpoint of the same round, without the trainer's files, would take its place."""
    keeper = keeper_at(tmp_path, [])
    path = make(keeper.store, 3).path
    waits = SimpleNamespace(training=False, pace=None, beginning=SimpleNamespace(checkpoint=path))
    keeper.conductor = cast(Conductor, waits)
    before = verify(path)
    assert not await keeper.save(wait=True)
    assert verify(path) == before


async def test_after_the_last_checkpoint_no_round_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    still = asyncio.Lock()
    keeper = keeper_at(tmp_path, [])
    keeper.still = lambda: still
    facts = Facts(run="r", round=3, step=0, tokens=0)
    monkeypatch.setattr(keeper, "_write", lambda draft, outer: None)
    monkeypatch.setattr(keeper, "_facts", lambda place: facts)
    assert await keeper.save()
    assert not still.locked()
    async with AsyncExitStack() as stack:
        assert await keeper.save(wait=True, last=stack)
        assert still.locked()
        assert isinstance(keeper.still(), nullcontext), "who reads the state waits for nothing"
    assert not still.locked()


@pytest.mark.parametrize("last", [False, True])
async def test_who_leaves_after_a_round_saves_it_once(last: bool) -> None:
    """On the way out, and not beside that at the end of the round too."""
    spawned: list[Any] = []
    stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    node = SimpleNamespace(
        daemon=SimpleNamespace(stop_reason=stopped), tasks=SimpleNamespace(spawn=spawned.append)
    )
    part: Any = SimpleNamespace(
        node=node,
        reporter=SimpleNamespace(on_applied=lambda applied: True),
        _saves=Multiples(2, 3),
        _save=lambda: "saves",
        _check_end=lambda: stopped.set_result("over") if last else None,
    )
    applied = Applied(round=4, step=40, tokens=1, validation_loss=None)
    await Participation._on_applied(part, applied)
    assert spawned == ([] if last else ["saves"])
