"""An island whose ranks are processes, and what tests look at in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from trainer_kit import TARGET, apply, begin, merge, tiny_settings, tiny_vectors

from node.island.island import Event, Island
from node.island.rank_ends import TrainerDied
from node.trainer.channel import (
    Applied,
    Begin,
    Evaluated,
    Ready,
    Save,
    Saved,
    Snapshot,
    StepDone,
)

WAIT_S = 60.0  # for anything; a loaded machine imports torch slowly
LONG = 500  # steps of a round that is not over while a test looks at it
PROMPT_S = 5.0  # for the news of a rank's death
Losses = dict[int, float | None]  # by inner step


@asynccontextmanager
async def island(directory: Path, **changes: Any) -> AsyncIterator[Island]:
    settings = tiny_settings(directory, **changes)
    vectors = tiny_vectors(settings.manifest)
    async with Island(settings, vectors, directory / "run") as running:
        yield running
    vectors.close()


async def until(running: Island, kind: type[Any], seen: list[Event] | None = None) -> Any:
    """The next event of a kind; anything unexpected in between fails with its own words."""
    async with asyncio.timeout(WAIT_S):
        while True:
            event = await running.next_event()
            if seen is not None:
                seen.append(event)
            if isinstance(event, kind):
                return event
            assert not isinstance(event, TrainerDied), f"{event.text}\n{event.log_tail}"


class Watch:
    """Sees all losses of an island, over restarts."""

    def __init__(self, running: Island) -> None:
        self.running = running
        self.losses: Losses = {}

    async def until(self, kind: type[Any]) -> Any:
        seen: list[Event] = []
        event = await until(self.running, kind, seen)
        self.losses |= {e.step: e.loss for e in seen if isinstance(e, StepDone)}
        return event

    async def begin(self, **beginning: Any) -> None:
        await self.until(Ready)
        await self.running.send(begin(**beginning))
        await self.until(Applied)

    async def two_rounds(self) -> None:
        """Two short rounds that commit, then a long one is begun."""
        await self.until(Ready)
        await self.running.send(begin(evaluate=True))  # must not leave copies of θ in any rank
        await self.until(Evaluated)
        await self.until(Applied)
        for target in (TARGET, LONG):
            snapshot = await self.until(Snapshot)
            await self.running.claim()
            merge(self.running.vectors)
            await self.running.send(apply(snapshot.round + 1, target_steps=target, evaluate=True))
            await self.until(Applied)

    async def save(self, directory: Path) -> Begin:
        """Write a checkpoint somewhere in the long round; the command that resumes from it."""
        directory.mkdir()  # noqa: ASYNC240 - nothing else runs in this loop
        await self.running.send(Save(str(directory)))
        assert (await self.until(Saved)).problem == ""
        return begin(round=2, target_steps=LONG, resume=str(directory))

    async def resume(self, command: Begin, steps: int) -> None:
        """Begin from a checkpoint and take some steps."""
        await self.until(Ready)
        await self.running.send(command)
        await self.until(Applied)
        for _ in range(steps):
            await self.until(StepDone)


def pids(running: Island) -> list[int]:
    return [rank.process.pid for rank in running._ranks]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # an orphan that nobody has reaped yet is gone as well
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def holds(condition: Callable[[], bool], within: float) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + within
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110 - of other processes
        await asyncio.sleep(0.02)
    return condition()


async def all_gone(processes: list[int], within: float) -> bool:
    return await holds(lambda: all(map(gone, processes)), within)
