"""Which batches an island reads where rounds begin as soon as one island is ready. Sans-IO.

There a round has no windows of its own: most bring one island's work, some that of many. So the
run's batches are numbered, and number n has windows n B to (n + 1) B - 1 of the corpus' order, B
sequences being a batch (:mod:`node.trainer.sampler`, as steps of one round). When work is merged,
its island gets as many new numbers as that work has steps. They begin where the tokens merged
before it end, which its certificate says (:mod:`node.island.allotment`). Hence

- no number is given twice, and none is left out, whoever is fast, slow or late,
- who has which can be read off the certificates,
- an island has at any time as many numbers as it has had steps on their way to a merge.

Before its first merge an island reads numbers that follow from its place in the roster. An island
that has none left, as after work was lost, reads on behind its last one, as others may, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Annotated

from protocols.wire import Max

MOST = 64  # stretches that are kept; beyond, the oldest is not read in this epoch
Stretches = Annotated[tuple[int, ...], Max(2 * MOST)]  # first number and end of each, in a row


def following(stretches: Sequence[int], number: int) -> int | None:
    """The first number to read that is ``number`` or beyond; None: it is not known yet."""
    for first, end in zip(stretches[::2], stretches[1::2], strict=True):
        if number < end:
            return max(first, number)
    return None


class Numbers:
    """Those of one island that it has yet to read, in their order: at least one."""

    def __init__(self, stretches: Sequence[int]) -> None:
        """As of :attr:`stretches`; raises ValueError for what can be none."""
        if not stretches or len(stretches) % 2 or min(stretches) < 0:
            raise ValueError(f"no numbers of batches: {stretches}")
        self._left: deque[list[int]] = deque(maxlen=MOST)
        self.give(stretches)

    @property
    def stretches(self) -> tuple[int, ...]:
        """The first number and the end of each stretch, in a row."""
        return tuple(end for stretch in self._left for end in stretch)

    @property
    def next(self) -> int:
        """The batch of the next inner step."""
        return self._left[0][0]

    def take(self) -> None:
        """The inner step with :attr:`next` was taken."""
        self._left[0][0] += 1
        self._pass_over()

    def give(self, stretches: Sequence[int], *, anew: bool = False) -> None:
        """These come next; ``anew``: in place of those left, which may have been read."""
        if anew:
            self._left.clear()
        pairs = zip(stretches[::2], stretches[1::2], strict=True)
        self._left.extend([first, end] for first, end in pairs)
        self._pass_over()

    def _pass_over(self) -> None:
        while len(self._left) > 1 and self._left[0][0] >= self._left[0][1]:
            self._left.popleft()
