"""How long a checkpoint waits for the trainer, which first comes to the end of an inner step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

# for the trainer's copy, plus STEPS of its inner steps: the present one may take far longer than
# those before. HURRIED_S takes the place of the first where somebody waits, as to leave
TRAINER_TIMEOUT_S, HURRIED_S, STEPS = 600.0, 120.0, 4.0
FIRST_STEP_S = 3600.0  # in its place while no inner step has been timed


class Patience:
    """With one island's trainer; ``step_s`` tells what an inner step takes it, 0: not known."""

    def __init__(self, step_s: Callable[[], float]) -> None:
        self._step_s = step_s
        self._hurries = 0  # of those who wait for the checkpoint, or are waited for
        self._limit: asyncio.Timeout | None = None  # of the present wait

    def seconds(self) -> float:
        """That the trainer has for what it is asked for now."""
        step_s = self._step_s()
        patience = TRAINER_TIMEOUT_S if step_s else FIRST_STEP_S
        return (HURRIED_S if self._hurries else patience) + STEPS * step_s

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Somebody waits for the checkpoint: there is less of it, in the present wait as well."""
        self._hurries += 1
        try:
            if self._limit is not None and not self._limit.expired():
                self._limit.reschedule(self._latest())
            yield
        finally:
            self._hurries -= 1

    @asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Raise TimeoutError where the trainer takes longer than it may be in one inner step."""
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(self._latest()) as self._limit:
                yield
        except TimeoutError:
            took = asyncio.get_running_loop().time() - began
            raise TimeoutError(f"the trainer was at one inner step for {took:.0f} s") from None
        finally:
            self._limit = None

    def _latest(self) -> float:
        """When the trainer's time is up, by the event loop's clock."""
        return asyncio.get_running_loop().time() + self.seconds()
