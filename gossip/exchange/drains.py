"""Slices, and sums of groups, on their way into a merge (:mod:`gossip.exchange.merging`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gossip.exchange.bodies import as_bytes
from protocols.codecs import Chunk


def _nothing(index: int) -> int:
    """Chunks follow each other."""
    return 0


class MergeDrain:
    """The chunks of a part from the ``first`` on, as one contributor or relay brings them.

    ``moved`` is told how many bytes have come. ``whole`` gets each chunk (uint8 [bytes]) when its
    last byte is in, with the ``behind(index)`` bytes that follow it; what it raises, :meth:`took`
    raises. Memory: one encoded chunk.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        first: int,
        moved: Callable[[int], None],
        whole: Callable[[int, torch.Tensor, bytes], None],
        behind: Callable[[int], int] = _nothing,
    ) -> None:
        self._moved, self._whole, self._index, self._at = moved, whole, first, 0
        self._sizes = [chunk.size for chunk in chunks]
        self._ends = [size + behind(index) for index, size in enumerate(self._sizes)]
        self._buffer = torch.empty(max(self._ends), dtype=torch.uint8)
        self._view = as_bytes(self._buffer)
        self.length = sum(self._ends[first:])

    def attach(self, wake: Callable[[], None]) -> None:
        """There is always room."""

    def room(self) -> memoryview:
        """The rest of the chunk that is on its way, and of what comes behind it."""
        return self._view[self._at : self._ends[self._index]]

    def took(self, count: int) -> None:
        """``count`` more bytes are in."""
        self._at += count
        self._moved(count)
        if self._at == self._ends[self._index]:
            size = self._sizes[self._index]
            self._whole(self._index, self._buffer[:size], bytes(self._view[size : self._at]))
            self._index, self._at = self._index + 1, 0
