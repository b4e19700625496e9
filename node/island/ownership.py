"""Whose the shared vectors are, fragment by fragment: the daemon's to write, the trainer's to read.

A fragment is taken before the daemon changes it, and free again once the trainer has read what it
was given. What reads all of them at once, a beginning or an evaluation, waits until nobody writes
and keeps others from starting to. How long the trainer takes to read is noted here, too: it does so
between two inner steps, and where an evaluation comes first not before that is made.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class VectorOwnership:
    """By fragment, of one trainer's vectors; ``free``: at first, as it has nothing to read."""

    def __init__(self, fragments: int, *, free: bool) -> None:
        self._free = [free] * fragments
        self._writing: set[int] = set()
        self._reading_all = False
        self._given: dict[int, float] = {}  # when the trainer could begin to read each
        self._longest = [0.0, math.inf]  # seconds it ever took to, without and with an evaluation
        self._changed = asyncio.Event()

    def is_free(self, fragment: int) -> bool:
        """Whether the daemon may take a fragment now."""
        return self._free[fragment] and not self._reading_all

    def is_taken(self, fragment: int) -> bool:
        """Whether the daemon writes a fragment, or the trainer has yet to read it."""
        return not self._free[fragment]

    async def take(self, fragment: int) -> None:
        """Wait until a fragment is free; it is the daemon's to write then."""
        await self._until(lambda: self.is_free(fragment))
        self._free[fragment] = False
        self._given.pop(fragment, None)
        self._writing.add(fragment)

    def written(self, fragment: int) -> None:
        """The daemon writes no more; the trainer is to read it, or nobody is (:meth:`free`)."""
        self._writing.discard(fragment)
        self._given[fragment] = _now()
        self._changed.set()

    async def all_to_read(self) -> None:
        """Wait until nobody writes: the trainer reads all fragments, until one is freed."""
        self._reading_all = True
        await self._until(lambda: not self._writing)

    def free(self, fragment: int | None = None) -> None:
        """The trainer has read a fragment, None: all of them, or is no more."""
        if fragment is None:
            self._given.clear()
        elif fragment in self._given:
            seconds = _now() - self._given.pop(fragment)
            if not (fragment and self._reading_all):  # it may be from before the evaluation
                self._note(seconds)
        for one in range(len(self._free)) if fragment is None else (fragment,):
            self._free[one] = True
        if not fragment:  # what reads all of them is a beginning, or answered by fragment 0's
            self._reading_all = False
        self._changed.set()

    def begin(self) -> None:
        """The trainer is to read all of them."""
        self._free = [False] * len(self._free)
        self._given.clear()

    def late_s(self, fragment: int) -> float:
        """Seconds that the trainer has had a fragment to read for, beyond the longest it ever took.

        0 where there is nothing to read, or nobody has timed an evaluation yet.
        """
        given = self._given.get(fragment)
        longest = self._longest[self._reading_all]
        return 0.0 if given is None else max(0.0, _now() - given - longest)

    def _note(self, seconds: float) -> None:
        known = self._longest[self._reading_all]
        self._longest[self._reading_all] = seconds if known == math.inf else max(known, seconds)

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._changed.clear()
            await self._changed.wait()


def _now() -> float:
    return asyncio.get_running_loop().time()
