"""Having one of several sources keep a copy of its state, and whom to ask meanwhile.

A copy costs its source memory and time, so the next one is asked only once nothing speaks for those
asked before: one that answers nothing, or makes its copy for longer than usual. These are waited
for all the same, and the first copy is taken, whosever it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

from bootstrap.state.offers import AGAIN_S, making_s, turn_s
from bootstrap.state.widening import QUIET_S
from protocols.errors import RemoteProtocolError, Stale, TransportError

S = TypeVar("S")
R = TypeVar("R")


@dataclass
class Hope:
    """How long nobody is asked beside one source, by what that has said. Sans-IO.

    It was asked for a state of ``size`` bytes at ``began``, in seconds of any clock. While it says
    that it makes its copy, one that is ``trusted`` is given all the time that this may take.
    """

    size: int
    trusted: bool
    began: float
    changed: Callable[[], object] = lambda: None  # called once it has said something
    making: bool = False  # as far as it has said
    silent: bool = True
    until: float = field(init=False)

    def __post_init__(self) -> None:
        self.until = self.began + QUIET_S

    @property
    def end(self) -> float:
        """When its copy has to be there."""
        return self.began + making_s(self.size)

    def makes(self, now: float) -> None:
        """It has answered that it makes its copy, and is asked again in a moment."""
        self.making, self.silent = True, False
        latest = self.end if self.trusted else self.began + turn_s(self.size)
        self.until = min(latest, now + AGAIN_S + QUIET_S)
        self.changed()

    def offers(self, now: float) -> None:
        """It has its copy, and is to show what belongs to it."""
        self.making = self.silent = False
        self.until = now + QUIET_S
        self.changed()


async def first_kept(
    sources: Sequence[S],
    ask: Callable[[S, Hope], Awaitable[R]],
    size: int,
    trusted: Callable[[S], bool],
    *,
    until: Callable[[], float],
    waited: Callable[[float], None],
) -> tuple[R, list[S]]:
    """What ``ask`` brings of the first of ``sources`` that keeps its state, and who is left.

    ``ask`` notes what its source says in the Hope. After ``until``, by the event loop's clock, no
    more are asked; ``waited`` is told of seconds in which copies were made, and may put that off.
    Raises the last failure, TransportError or RemoteProtocolError, where none keeps its state.
    """
    now = asyncio.get_running_loop().time
    left, asked = list(sources), dict[asyncio.Task[None], tuple[S, Hope]]()
    kept = list[tuple[S, R]]()
    failure: TransportError | RemoteProtocolError | None = None
    changed = asyncio.Event()

    async def one(source: S, hope: Hope) -> None:
        nonlocal failure
        try:
            kept.append((source, await ask(source, hope)))
        except (TransportError, RemoteProtocolError) as error:
            failure = error
        changed.set()

    async with asyncio.TaskGroup() as group:
        while not kept:
            asked = {task: asked[task] for task in asked if not task.done()}
            more = bool(left) and (now() <= until() or not (asked or failure))
            hopeful = max((hope.until for _, hope in asked.values()), default=-inf)
            if more and now() >= hopeful:
                source = left.pop(0)
                hope = Hope(size, trusted(source), now(), changed.set)
                asked[group.create_task(one(source, hope))] = source, hope
                continue
            if not asked:
                break
            changed.clear()
            began, making = now(), any(hope.making for _, hope in asked.values())
            with suppress(TimeoutError):
                async with asyncio.timeout_at(hopeful if more else None):
                    await changed.wait()
            waited(now() - began if making else 0.0)
        asked = {task: asked[task] for task in asked if not task.done()}
        for task in asked:
            task.cancel()
    if not kept:
        raise failure or Stale("nobody stands there")
    others = (source for source, _ in (*kept[1:], *asked.values()))
    return kept[0][1], [*others, *left]
