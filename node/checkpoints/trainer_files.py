"""What the trainer writes into files, as the daemon asks for it and hears of it.

That is its share of a checkpoint, and its optimizer's moments for newcomers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from node.checkpoints.index import bytes_in
from node.island.island import Island
from node.trainer.channel import ChannelClosedError, Donate, Donated, Save, Saved, Staged

LOOK_S = 1.0  # between two looks at what was written


@dataclass(frozen=True)
class Taken:
    """A file of a donor's moments, and the inner steps that they have seen.

    Or a checkpoint that holds moments of an earlier one, with ``steps`` 0: its files tell them.
    """

    path: Path
    steps: int


@dataclass(frozen=True)
class Asked:
    """A checkpoint that the trainer was asked for: done when it has copied and written its files.

    Commands that the trainer gets afterwards do not affect them, however late it copies.
    """

    copied: asyncio.Future[None]
    written: asyncio.Future[Saved]

    async def all_written(self, draft: Path, patience_s: Callable[[], float]) -> None:
        """Wait for the files in ``draft``: long where a disk is slow, but not where nothing moves.

        They are flushed to the disk while they grow (:mod:`node.checkpoints.tensor_files`): no
        flush at the end stands still for long. Raises TimeoutError, after ``patience_s`` seconds in
        which nothing has moved.
        """
        moved = time.monotonic()
        size = 0
        while not self.written.done():
            with suppress(OSError):  # something was renamed meanwhile
                if size != (size := bytes_in(draft)):
                    moved = time.monotonic()
            still = time.monotonic() - moved
            if still > patience_s():
                self.written.cancel()
                raise TimeoutError(f"the trainer has written nothing for {still:.0f} s")
            await asyncio.wait([self.written], timeout=LOOK_S)


class TrainerFiles:
    """At most one checkpoint, and one copy of moments, at a time."""

    def __init__(self, island: Island) -> None:
        self.island = island
        self._staged: asyncio.Future[None] | None = None
        self._saved: asyncio.Future[Saved] | None = None
        self._directory = ""  # of the checkpoint that these two are about
        self._donated: asyncio.Future[Donated] | None = None

    @property
    def writing(self) -> bool:
        """Whether the trainer has yet to write a checkpoint."""
        return self._saved is not None and not self._saved.done()

    async def save(self, directory: Path) -> Asked:
        """Ask the trainer for its files; raises :class:`ChannelClosedError` where it has ended."""
        loop = asyncio.get_running_loop()
        asked = Asked(loop.create_future(), loop.create_future())
        self._staged, self._saved = asked.copied, asked.written
        self._directory = str(directory)
        await self.island.send(Save(self._directory))
        return asked

    async def donate(self, path: Path) -> Donated:
        """Have the moments written into an empty file. Who waits no longer is to remove it.

        Raises :class:`ChannelClosedError` where the trainer is no more.
        """
        self._donated = asyncio.get_running_loop().create_future()
        await self.island.send(Donate(str(path)))
        return await self._donated

    def told(self, report: Staged | Saved | Donated) -> None:
        """The trainer has copied its files for a checkpoint, or has written something.

        A copy of moments that nobody waits for any more is removed. Reports on a checkpoint that
        was given up are ignored: they may come while the next one is waited for.
        """
        if isinstance(report, Staged | Saved) and report.directory != self._directory:
            return
        match report:
            case Staged() if self._staged is not None and not self._staged.done():
                self._staged.set_result(None)
            case Saved() if self._saved is not None and not self._saved.done():
                self._saved.set_result(report)
            case Donated() if self._donated is not None and not self._donated.done():
                self._donated.set_result(report)
            case Donated():
                Path(report.path).unlink(missing_ok=True)

    def lost(self) -> None:
        """The trainer has ended, and writes nothing any more."""
        for waiting in (self._staged, self._saved, self._donated):
            if waiting is not None and not waiting.done():
                waiting.set_exception(ChannelClosedError("the trainer has ended"))
                waiting.exception()  # nobody may be waiting: that is no error of its own
