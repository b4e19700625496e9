"""What a trainer adds to a checkpoint: whose answer it is, and how long it may take."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.checkpoints import trainer_files
from node.checkpoints.trainer_files import Asked, TrainerFiles
from node.trainer.channel import Save, Saved, Staged


async def test_a_checkpoint_that_was_given_up_says_nothing_of_the_next_one() -> None:
    """A trainer in a long step answers both, one after the other: the first one's draft is gone."""

    class Island:
        async def send(self, command: Save) -> None:
            pass

    files = TrainerFiles(cast(Any, Island()))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await (await files.save(Path("first"))).copied
    asked = await files.save(Path("second"))
    files.told(Staged("first"))
    files.told(Saved("first", "No such file or directory", full=False))
    assert not asked.copied.done(), "the trainer has not copied anything yet"
    files.told(Staged("second"))
    await asked.copied
    assert not asked.written.done()
    files.told(Saved("second", "", full=False))
    assert (await asked.written).directory == "second"


async def test_what_grows_is_waited_for_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = itertools.count(0.0, 30.0)  # each look at the clock is half a minute later
    monkeypatch.setattr(trainer_files, "time", SimpleNamespace(monotonic=lambda: next(moment)))
    monkeypatch.setattr(trainer_files, "LOOK_S", 0.0)
    sizes = itertools.chain(range(400), itertools.repeat(400))
    monkeypatch.setattr(trainer_files, "bytes_in", lambda draft: next(sizes))
    loop = asyncio.get_running_loop()
    asked = Asked(loop.create_future(), loop.create_future())
    with pytest.raises(TimeoutError, match="written nothing"):
        await asked.all_written(tmp_path, lambda: 100.0)
    assert next(sizes) == 400
    assert next(moment) > 2 * 3600
