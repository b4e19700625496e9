"""Checkpoints on their way to a second place, beside the node: that may be slow, or hang."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.checkpoint_copy import CheckpointCopy
from node.checkpoints.index import bytes_in
from node.checkpoints.under_way import touch
from node.errors import operator_error, without_credentials
from node.monitor.event_log import EventLog
from node.monitor.events import Notice, Problem
from node.monitor.wording import duration
from protocols.errors import OperatorError
from protocols.tasks import Background, Offload

LOOK_S = 1.0
STILL_S = 30.0  # without progress, and a node that leaves waits no longer; added to that are
TIMES = 3.0  # times the longest pause in progress so far; before there was one, what the files
SLOWEST = 4e6  # take at this many bytes a second, as not all file systems report parts

Put = Callable[[Path, Callable[[], None]], None]
_Ended = asyncio.Future[OperatorError | None]


class _GivenUpError(Exception):
    """For the thread of a copy that nobody waits for any more."""


class Copying:
    """One copy at a time; of the checkpoints that are made meanwhile the newest comes next, and the
    best after it. For a node that leaves the newest does not wait for the best.
    """

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
        self._current: Path | None = None  # only the copy of this one may go on
        self._best: _Ended | None = None  # of the copy of the best, if that is under way
        self._background = Background()
        self._tried = asyncio.Event()  # the newest is copied, or could not be
        self._tried.set()
        self._leaves = False
        self._moved, self._longest, self._until = 0.0, 0.0, 0.0  # monotonic, seconds, monotonic

    @property
    def still(self) -> float | None:
        """Seconds in which a copy that is on its way has not moved, if it hangs by now; or None."""
        now = time.monotonic()
        under_way = self._running is not None and not self._running.done()
        return now - self._moved if under_way and now >= self._until else None

    async def done(self) -> None:
        """Wait until the newest is copied, or could not be, or nothing moves any more.

        For a node that leaves: it does not wait for the best, nor is that begun any more, and one
        that has been begun ends as it moves. A copy that failed or stopped moving is an event.
        """
        self._leaves = True
        if self._tried.is_set():
            return
        text = (
            f"waits until the newest checkpoint is copied to {self._url} "
            "(Ctrl-C again ends it at once)"
        )
        self._events.emit(Notice(text=text))
        if self._best is not None and not self._best.done():
            self._best.set_result(None)
            self._begin(0)  # what the best had left to move in is no matter of the newest
        while not self._tried.is_set() and time.monotonic() < self._until:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._tried.wait(), LOOK_S)
        if not self._tried.is_set():
            self._tell_still(
                "the newest checkpoint",
                time.monotonic() - self._moved,
                "it is in the state directory: look at that place, and start the node "
                "with --resume, or copy it there",
            )

    @property
    def _url(self) -> str:
        return without_credentials(self._copy.url)

    def _tell_still(self, what: str, still: float, fix: str) -> None:
        what = f"{what} is not copied to {self._url}"
        why = f"nothing has moved for {duration(still)}"
        self._events.emit(Problem.of(operator_error("E407", what, why=why, fix=fix)))

    async def soon(self, path: Path) -> None:
        """Copy to the second place, in the background: the copy may be slow, or hang.

        Of the checkpoints that are made meanwhile only the newest is copied, and the best.
        """
        aside, passed_over = await self._offload(lambda: self._store.aside(path)), self._next
        self._next = aside
        self._tried.clear()
        if passed_over is not None:
            await self._offload(partial(self._store.drop, passed_over))
        if self._running is None or self._running.done():
            self._begin(0)
            self._running = self._background.spawn(self._run())

    async def _run(self) -> None:
        try:
            while (aside := self._next) is not None:
                self._next = None
                copied = await self._copied(aside, self._copy.put, _ended())
                if self._next is None:
                    self._tried.set()
                    if copied and not self._leaves:
                        await self._copy_best(but=aside.name)
        finally:
            self._tried.set()

    async def _copy_best(self, but: str) -> None:
        """It may be there already; one that was passed over is not."""
        self._best = ended = _ended()
        best: Path | None = await self._offload(self._store.best)
        if best is not None and best.name != but:
            aside = await self._offload(partial(self._store.aside, best))
            await self._copied(aside, self._copy.put_best, ended)
        self._best = None

    async def _copied(self, aside: Path, put: Put, ended: _Ended) -> bool:
        """Copy it, until it has ``ended``, and give it up. A failure is an event."""
        if error := await self._put(aside, put, ended):
            self._events.emit(Problem.of(error))
        await self._offload(partial(self._store.drop, aside))
        return error is None

    async def _put(self, aside: Path, put: Put, ended: _Ended) -> OperatorError | None:
        """Copy in a thread of its own: neither one of the few that rounds need, nor one that
        asyncio waits for at its end, since a node that fails must not stay for a link that hangs.
        """
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # it has been pruned meanwhile, which the copy will find
            self._begin(await self._offload(partial(bytes_in, aside)))

        def end(failed: OperatorError | None) -> None:
            if not ended.done():
                ended.set_result(failed)

        def work() -> None:
            failed: OperatorError | None = None
            try:
                put(aside, partial(self._on_moved, aside))
            except OperatorError as error:
                failed = error
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(end, failed)

        if not ended.done():
            self._current = aside
            threading.Thread(target=work, name="checkpoint-copy", daemon=True).start()
        return await self._end_of(ended, aside)

    async def _end_of(self, ended: _Ended, aside: Path) -> OperatorError | None:
        """Wait for it, and say once that nothing moves: its thread cannot be ended."""
        told = False
        while not ended.done():
            await asyncio.wait([ended], timeout=LOOK_S)
            still = self.still if not (told or self._leaves or ended.done()) else None
            if still is not None:
                told = True
                self._tell_still(
                    f"checkpoint {aside.name}",
                    still,
                    "look at that place: the copy goes on once it answers. Newer ones are copied "
                    "after it; if it never ends, start the node again with --resume",
                )
        return ended.result()

    def _begin(self, size: int) -> None:
        """A copy of ``size`` bytes begins."""
        self._moved = time.monotonic()
        self._until = self._moved + STILL_S + (TIMES * self._longest or size / SLOWEST)

    def _on_moved(self, aside: Path) -> None:
        """The copy has come further; called in its thread. Raises where another has taken its turn:
        what each removes there would be the other's.
        """
        if aside is not self._current:
            raise _GivenUpError(f"a newer one is copied in place of {aside.name}")
        touch(aside)
        now = time.monotonic()
        self._longest = max(self._longest, now - self._moved)
        self._moved, self._until = now, now + STILL_S + TIMES * self._longest


def _ended() -> _Ended:
    return asyncio.get_running_loop().create_future()
