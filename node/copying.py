"""Checkpoints on their way to a second place, beside the node: that may be slow, or hang."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

from node.checkpoint import CheckpointStore
from node.checkpoint_copy import CheckpointCopy
from node.monitor.event_log import EventLog
from node.monitor.events import Problem
from protocols.errors import OperatorError
from protocols.tasks import Background, Offload


class Copying:
    """One copy at a time; of the checkpoints that are made meanwhile the newest comes next."""

    def __init__(
        self,
        copy: CheckpointCopy,
        store: CheckpointStore,
        events: EventLog,
        offload: Offload,
    ) -> None:
        self._copy, self._store, self._events, self._offload = copy, store, events, offload
        self._next: Path | None = None  # the newest, while an older one is on its way
        self._running: asyncio.Task[None] | None = None
        self._background = Background()

    async def done(self) -> None:
        """Wait until what was given is copied, or could not be."""
        if self._running is not None:
            await self._running

    async def soon(self, path: Path) -> None:
        """To the second place: it may be slow, or hang, and the next checkpoint does not wait.

        Of those that are made meanwhile the newest is copied.
        """
        aside, passed_over = await self._offload(lambda: self._store.aside(path)), self._next
        self._next = aside
        if passed_over is not None:
            await self._offload(partial(self._store.drop, passed_over))
        if self._running is None or self._running.done():
            self._running = self._background.spawn(self._run())

    async def _run(self) -> None:
        while (aside := self._next) is not None:
            self._next = None
            if error := await self._put(aside):
                self._events.emit(Problem.of(error))
            await self._offload(partial(self._store.drop, aside))

    async def _put(self, aside: Path) -> OperatorError | None:
        """In none of the few threads that rounds need, nor in one that asyncio waits for at its
        end: a node that fails is not to stay because a link hangs.
        """
        loop, put = asyncio.get_running_loop(), self._copy.put
        done: asyncio.Future[OperatorError | None] = loop.create_future()

        def end(failed: OperatorError | None) -> None:
            if not done.done():
                done.set_result(failed)

        def work() -> None:
            failed: OperatorError | None = None
            try:
                put(aside)
            except OperatorError as error:
                failed = error
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(end, failed)

        threading.Thread(target=work, name="checkpoint-copy", daemon=True).start()
        return await done
