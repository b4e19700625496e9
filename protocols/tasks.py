"""Who owns a task. This module alone calls ``asyncio.create_task``; ruff refuses it elsewhere.

What runs beside a block belongs to the block: to its :class:`asyncio.TaskGroup` (:class:`Tasks`
where callbacks start tasks in it), or to :func:`beside`, :func:`first` or :func:`every`, which
raise errors as they are rather than in groups. What an object runs from the call that opens it to
the call that closes it fits into no block; it belongs to the object, which holds a
:class:`Background`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Offload = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs heavy work beside the event loop, and gives what it returns."""

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a task that somebody else owns, and awaits."""

T = TypeVar("T")
S = TypeVar("S")
K = TypeVar("K", bound=Hashable)


def resolve(future: asyncio.Future[None]) -> None:
    """Let those go on who wait for ``future``; more than once does no harm."""
    if not future.done():
        future.set_result(None)


def offload_to(pool: Executor) -> Offload:
    """What runs heavy work in ``pool``, beside the event loop."""

    async def offload(work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    return offload


async def _nothing() -> None:
    """What never begins."""


@dataclass
class Tasks:
    """What is spawned in a group from anywhere, and can be cancelled together."""

    group: asyncio.TaskGroup
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task; its exception ends the group. In a group that ends it is cancelled unbegun.

        So a call or a letter that comes while its node is leaving meets what it would have met a
        moment earlier: work that was begun, and then cancelled with all the rest.
        """
        try:
            task = self.group.create_task(coroutine)
        except RuntimeError:  # the group is ending or has ended
            coroutine.close()  # from Python 3.13 on the group has
            task = asyncio.create_task(_nothing())
            task.cancel()
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel(self) -> None:
        """Cancel all that still run."""
        for task in self._running:
            task.cancel()


class Background:
    """The tasks of an object that is opened and closed: closing it ends them.

    An error belongs to whoever awaits the task; where nobody does, asyncio logs it.
    """

    def __init__(self) -> None:
        # a dict, not a set: the order is the same in every run
        self._running: dict[asyncio.Task[Any], None] = {}

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task."""
        task = asyncio.create_task(coroutine)
        self._running[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._running[task]

    async def join(self) -> None:
        """Wait until all have ended by themselves."""
        while self._running:
            await asyncio.wait(list(self._running))

    async def aclose(self) -> None:
        """Cancel all and wait for their ends."""
        for task in list(self._running):
            task.cancel()
        await self.join()


@asynccontextmanager
async def beside(coroutine: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run something while the block runs, at whose end it is cancelled and awaited.

    If it has failed, that is raised there, unless the block itself has failed.
    """
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def first(*coroutines: Coroutine[Any, Any, T]) -> T:
    """What the first of them to end returns or raises; the others are cancelled and awaited."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = next(task for task in tasks if task.done())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return ended.result()


async def in_turn(
    sources: Iterable[S],
    ask: Callable[[S], Coroutine[Any, Any, None]],
    *,
    apart: float,
    within: float,
    enough: Callable[[], bool],
) -> None:
    """Ask one source after another until it is ``enough``; those still asked are cancelled then.

    The next one is asked once one has ended, or after ``apart`` seconds, so that one that says
    nothing holds up the others no longer; after ``within`` seconds nobody more. An error is raised
    as it is.
    """
    now = asyncio.get_running_loop().time
    end = now() + within
    running = set[asyncio.Task[None]]()
    left = iter(sources)
    source = next(left, None)
    try:
        while not enough():
            if now() > end:
                source = None
            if source is not None:
                running.add(asyncio.create_task(ask(source)))
                source = next(left, None)
            elif not running:
                break
            ended, running = await asyncio.wait(
                running,
                timeout=None if source is None else apart,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in ended:
                task.result()
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


async def every(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all to their ends; the first error is raised as it is, and cancels the others.

    A cancellation from outside goes before any error. A :class:`asyncio.TaskGroup` forgets it, up
    to Python 3.12, where one of its tasks fails in the same moment, and what was to end goes on.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    errors: list[BaseException] = []
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        # also where nobody wants to know, else asyncio logs that
        errors += [e for task in tasks if not task.cancelled() and (e := task.exception())]
    if errors:
        raise errors[0]


class Together(Generic[K, T]):
    """Work that several want at the same time is done once for all of them.

    The first caller does it, in its own task. If that is cancelled, the next of the waiting
    callers does it again.
    """

    def __init__(self) -> None:
        self._under_way: dict[K, asyncio.Future[T]] = {}

    async def do(self, key: K, work: Callable[[], Awaitable[T]]) -> T:
        """What ``work()``, or somebody else's under the same key, returns or raises."""
        while (theirs := self._under_way.get(key)) is not None:
            await asyncio.wait([theirs])
            if not theirs.cancelled():
                return theirs.result()
        mine = self._under_way[key] = asyncio.get_running_loop().create_future()
        try:
            result = await work()
        except Exception as error:  # whatever it is, those who wait for the same get it too
            mine.set_exception(error)
            mine.exception()  # else asyncio says that nobody has seen it, where nobody waits
            raise
        else:
            mine.set_result(result)
            return result
        finally:
            del self._under_way[key]
            mine.cancel()  # has no effect once it is done
