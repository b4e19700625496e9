"""The trainer's share of a checkpoint, as the daemon asks for it and hears of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from node.island import Island
from node.trainer.channel import ChannelClosedError, Checkpoint, Saved


class TrainerFiles:
    """At most one checkpoint of the trainer's files at a time."""

    def __init__(self, island: Island) -> None:
        self.island = island
        self._staged: asyncio.Future[None] | None = None
        self._saved: asyncio.Future[Saved] | None = None

    @property
    def writing(self) -> bool:
        """Whether the trainer is at it."""
        return self._saved is not None and not self._saved.done()

    async def save(self, directory: Path) -> asyncio.Future[Saved]:
        """Returns when the trainer has copied its files; the future is done when they are written.

        Raises :class:`ChannelClosedError` where it is no more.
        """
        loop = asyncio.get_running_loop()
        self._staged, self._saved = loop.create_future(), loop.create_future()
        await self.island.send(Checkpoint(str(directory)))
        await self._staged
        return self._saved

    def staged(self) -> None:
        """It has copied them."""
        if self._staged is not None and not self._staged.done():
            self._staged.set_result(None)

    def saved(self, saved: Saved) -> None:
        """It has written them."""
        if self._saved is not None and not self._saved.done():
            self._saved.set_result(saved)

    def lost(self) -> None:
        """The trainer is started anew, and writes nothing any more."""
        for waiting in (self._staged, self._saved):
            if waiting is not None and not waiting.done():
                waiting.set_exception(ChannelClosedError("the trainer was started again"))
                waiting.exception()  # nobody may be waiting: that is no error of its own
