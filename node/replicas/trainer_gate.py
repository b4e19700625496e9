"""How the outer state gets the shared vectors to itself: it holds the trainer, and releases it.

A replica holds the trainer before it writes what the trainer reads, and releases it once the new
base is there. :class:`~node.conductor.Conductor` is what does so for all fragments of a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class TrainerGate(Protocol):
    """The trainer, as far as the outer state of one fragment is concerned."""

    async def hold(self) -> int | None:
        """Wait until the vectors may be written; returns an unanswered snapshot's round, if any."""
        ...

    async def release(self, *, contributed: bool, reset: bool) -> None:
        """The vectors are as they should be: apply them.

        ``contributed``: with the unanswered snapshot merged; ``reset``: without local work.
        """
        ...

    def late_s(self) -> float:
        """Seconds for which it has had the vectors to apply, beyond the longest it ever took."""
        ...


class FragmentsGate(Protocol):
    """As :class:`TrainerGate`, for all fragments of a model."""

    async def hold(self, fragment: int) -> int | None: ...

    async def release(self, fragment: int, *, contributed: bool, reset: bool) -> None: ...

    def late_s(self, fragment: int) -> float: ...


@dataclass(frozen=True)
class FragmentGate:
    """The :class:`TrainerGate` of one of several fragments."""

    all_fragments: FragmentsGate
    fragment: int

    async def hold(self) -> int | None:
        return await self.all_fragments.hold(self.fragment)

    async def release(self, *, contributed: bool, reset: bool) -> None:
        await self.all_fragments.release(self.fragment, contributed=contributed, reset=reset)

    def late_s(self) -> float:
        return self.all_fragments.late_s(self.fragment)
