"""An asyncio event loop whose clock jumps instead of waiting.

A simulation of hours of network traffic takes as long as its Python code takes to run. The
loop's selector never sleeps: where an ordinary loop would wait for the next timer, this one
sets its clock to that timer. Nothing outside the process can wake it, so the order of events
depends on the program alone and a run can be repeated exactly.

>>> async def nap() -> float:
...     await asyncio.sleep(3600)
...     return asyncio.get_running_loop().time()
>>> run(nap())
3600.0

Sockets, pipes and child processes do not work here. Threads would make the order of events
depend on the machine, so :meth:`VirtualLoop.run_in_executor` (and with it
:func:`asyncio.to_thread`) calls the function at once, in the loop's own thread.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_TASKS_SHOWN = 20


class DeadlockError(RuntimeError):
    """Nothing is ready and no timer is set: the program would wait for ever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock that starts at ``start`` seconds."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def jump(self, seconds: float | None) -> None:
        """Let ``seconds`` pass; None, "until something happens", raises :class:`DeadlockError`."""
        if seconds is None:
            raise DeadlockError(self._waiting())
        self._now += seconds
        # asyncio fires timers before time() + _clock_resolution, which must be a later number
        # than time() also when the clock shows seconds since 1970
        self._clock_resolution = max(1e-9, math.ulp(self._now))

    def run_in_executor(
        self, executor: Any, func: Callable[[*_Ts], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        """Call ``func`` now, in this thread; the future returned is done."""
        future: asyncio.Future[_T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  # a future carries whatever the function raised
            future.set_exception(error)
        return future

    def _waiting(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        lines = [f"deadlock at {self._now:.6f} s: nothing scheduled, {len(tasks)} tasks wait"]
        for task in tasks[:_TASKS_SHOWN]:
            frames = task.get_stack(limit=1)
            where = f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else "?"
            lines.append(f"  {task.get_name()} at {where}")
        if len(tasks) > _TASKS_SHOWN:
            lines.append(f"  and {len(tasks) - _TASKS_SHOWN} more")
        return "\n".join(lines)


class _JumpingSelector(selectors.SelectSelector):
    """Reports no file as ready, ever; what would be a sleep moves the loop's clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout != 0:
            self._loop.jump(timeout)
        return []


async def inline(work: Callable[[], _T]) -> _T:
    """Do ``work`` here and now, where a node would offload it to a thread."""
    await asyncio.sleep(0)  # as with a thread, others may come first
    return work()


def run(main: Coroutine[Any, Any, _T], *, start: float = 0.0) -> _T:
    """Run ``main`` to its end on a fresh :class:`VirtualLoop`, like :func:`asyncio.run`.

    Raises :class:`DeadlockError`, naming the tasks that wait, when nothing can happen any more.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(start)) as runner:
        return runner.run(main)
