"""Moving the trainer to a guess of the next base, and back: mode ``eager``, at the daemon.

:mod:`node.replicas.eager_state` has the vectors. Here is who may touch them when: a guess is made
as soon as a snapshot is there, unless its round's outcome is on its way already, and is taken back
for a checkpoint: the trainer is asked for its files between the move back and the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from node.checkpoints.trainer_files import Asked
from node.island.island import Island
from node.island.ownership import VectorOwnership
from node.replicas.eager_state import EagerReplica
from node.trainer.channel import ChannelClosedError, Shift


class Guesses:
    """Of one trainer, whose model is merged whole."""

    def __init__(self, replica: EagerReplica, island: Island, ownership: VectorOwnership) -> None:
        self.replica, self.island, self._ownership = replica, island, ownership
        self._back = False
        self._moving = False  # a move is on its way
        self._moved: asyncio.Future[None] | None = None

    async def leave(self) -> None:
        """Drop the guess, as a trainer takes the base as it is; its last snapshot is still sent."""
        await self.replica.leave()

    async def make(self) -> None:
        """Have the trainer go on from a guess; its snapshot stays out."""
        if self._ownership.is_free(0):
            await self._ownership.take(0)
            await self._move(back=False)

    async def without(self, ask: Callable[[], Awaitable[Asked]]) -> Asked | None:
        """Ask for files, then guess again; None, and nothing is asked, while it is on a guess."""
        if self.replica.guessed or self._moving:
            return None
        asked = await ask()
        if self.replica.out and not (self.replica.guessed or self._moving):
            await self.make()  # the snapshot of the guess that was taken back is still out
        return asked

    async def take_back(self) -> None:
        """Have the trainer go back from its guess, where it stands on one.

        Raises ChannelClosedError where the trainer has ended.
        """
        await self._ownership.take(0)
        if not self.replica.guessed:
            self._ownership.written(0)
            self._ownership.free(0)
            return
        self._moved = asyncio.get_running_loop().create_future()
        await self._move(back=True)
        await self._moved

    async def moved(self) -> None:
        """The trainer has reported that it has moved."""
        await self.replica.arrived(back=self._back)
        self._moving = False
        self._ownership.free(0)
        if self._moved is not None and not self._moved.done():
            self._moved.set_result(None)

    def lost(self) -> None:
        """The trainer is started anew: it stands on no guess."""
        self._moving = False
        if self._moved is not None and not self._moved.done():
            self._moved.set_exception(ChannelClosedError("the trainer was started again"))
            self._moved.exception()  # nobody may be waiting: that is no error of its own

    async def _move(self, *, back: bool) -> None:
        self._back, self._moving = back, True
        starts = self.island.starts
        await self.replica.aim(back=back)
        self._ownership.written(0)
        if self.island.starts != starts:
            return  # other ranks by now, which have yet to begin and stand on no guess
        try:
            await self.island.send(Shift())
        except ChannelClosedError:
            self._ownership.free(0)  # its death is on its way as an event
            self.lost()
