"""Checkpoints that two processes write: what one does where the other has failed."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bootstrap.signed_manifest import SignedManifest
from node import saving
from node.checkpoint import CheckpointStore
from node.conductor import Conductor
from node.monitor.event_log import EventLog
from node.monitor.events import CheckpointSkipped
from node.outer_files import OuterFiles
from node.participation import Participation
from node.replica import OuterReplica
from node.saving import Keeper
from node.trainer.channel import Applied, Checkpoint, Saved, Staged
from node.trainer_files import TrainerFiles


class SlowTrainer:
    """Has copied its files at once; writes them when told to."""

    training, pace = True, None

    def __init__(self) -> None:
        self.writing: asyncio.Future[Saved] | None = None
        self.draft = Path()

    async def save(self, draft: Path) -> asyncio.Future[Saved]:
        assert self.writing is None or self.writing.done(), "it writes another one"
        self.draft, self.writing = draft, asyncio.get_running_loop().create_future()
        return self.writing

    def write(self) -> None:
        folder = self.draft / "trainer"
        folder.mkdir(parents=True)
        (folder / "state").write_bytes(b"x")
        assert self.writing is not None
        self.writing.set_result(Saved(directory=str(self.draft), problem="", full=False))


async def inline(work: Callable[[], Any]) -> Any:
    return work()


async def test_a_draft_that_failed_is_gone_only_when_nobody_writes_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(draft: Path, outer: OuterFiles) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saving, "write_outer", full)
    events: list[Any] = []
    place = SimpleNamespace(round=3, previous=b"", state=b"")
    replica = SimpleNamespace(place=place, residual=None, vectors={}, certificate=None)
    trainer = SlowTrainer()
    keeper = Keeper(
        CheckpointStore(tmp_path),
        cast(SignedManifest, SimpleNamespace(run_id=b"run")),
        cast("list[OuterReplica]", [replica]),
        torch.zeros(2),
        cast(Conductor, trainer),
        cast(EventLog, SimpleNamespace(emit=events.append)),
        nullcontext,
        inline,
        lambda: [cast(Any, None)],
    )
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
        config=SimpleNamespace(checkpoint_every=2),
        reporter=SimpleNamespace(on_applied=lambda applied: True),
        _save=lambda: "saves",
        _check_end=lambda: stopped.set_result("over") if last else None,
    )
    applied = Applied(round=4, step=40, tokens=1, validation_loss=None)
    await Participation._on_applied(part, applied)
    assert spawned == ([] if last else ["saves"])


async def test_a_checkpoint_that_was_given_up_says_nothing_of_the_next_one() -> None:
    """A trainer in a long step answers both, one after the other: the first one's draft is gone."""

    class Island:
        async def send(self, command: Checkpoint) -> None:
            pass

    files = TrainerFiles(cast(Any, Island()))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await files.save(Path("first"))
    staged = asyncio.create_task(files.save(Path("second")))
    await asyncio.sleep(0)
    files.told(Staged("first"))
    files.told(Saved("first", "No such file or directory", full=False))
    await asyncio.sleep(0)
    assert not staged.done(), "the trainer has not copied anything yet"
    files.told(Staged("second"))
    saved = await staged
    assert not saved.done()
    files.told(Saved("second", "", full=False))
    assert (await saved).directory == "second"
