"""The bytes of letters between islands in pairs: handed out piece by piece, and filled in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from protocols.bodies import BufferFeed
from protocols.errors import RemoteRefused
from protocols.messages import TransferHeader
from protocols.transport import CHUNK_BYTES


class LetterFeed(BufferFeed):
    """A letter in pieces, counted as they are handed out (:class:`~gossip.exchange.transfers`).

    ``last`` is called before the last one is.
    """

    def __init__(self, *buffers: memoryview, last: Callable[[], None]) -> None:
        pieces = [b[at : at + CHUNK_BYTES] for b in buffers for at in range(0, len(b), CHUNK_BYTES)]
        super().__init__(*pieces)
        self.given, self._last = 0, last

    def next(self) -> memoryview:
        """The next piece."""
        piece = memoryview(super().next())
        self.given += len(piece)
        if self.given == self.length:
            self._last()
        return piece


@dataclass
class Receipt:
    """A letter that is arriving; another try goes on in the same memory."""

    header: TransferHeader
    data: bytearray
    until: float  # from then on it makes way for another one
    filled: int = 0  # bytes from the first one on
    at_work: int = 0  # transfers that fill it now
    left: float = math.inf  # when the last of these ended; inf: one is at work
    newest: object = None  # of these: only the newest may go on
    ended: bool = False  # it is not to come any more
    refused: RemoteRefused | None = None  # why it is not taken, though it is whole

    @property
    def whole(self) -> bool:
        """Whether all of it is here, and nothing more may be written."""
        return self.filled == len(self.data)

    def enter(self) -> None:
        """A transfer begins to fill it."""
        self.at_work, self.left = self.at_work + 1, math.inf

    def leave(self, now: float) -> None:
        """A transfer of it has ended."""
        self.at_work -= 1
        if not self.at_work:
            self.left = now

    def cut(self) -> None:
        """Stop what fills it, or is about to: a sender that asks is told that it has not come."""
        self.ended = True


class ReceiptDrain:
    """Fills a receipt from byte ``at`` on, until a newer transfer does, or all of it is filled.

    Nothing is written into a whole letter, so what it was checked for stays true.
    """

    def __init__(self, receipt: Receipt, at: int) -> None:
        self._receipt, self._at = receipt, at
        self.length = len(receipt.data) - at
        self._begun = False
        self._mark = object()  # not self: both would live until the garbage collector comes

    def attach(self, wake: Callable[[], None]) -> None:
        """There is room for all of it from the start."""

    def room(self) -> memoryview:
        """What is not filled yet; raises RemoteRefused ``again`` or ``late`` where nothing is."""
        receipt = self._receipt
        if receipt.whole:
            raise RemoteRefused("again", "all of it came with another try")
        if receipt.ended:
            raise RemoteRefused("late", "it made way, or its receiver leaves")
        if not self._begun:
            self._begun, receipt.newest = True, self._mark
        elif receipt.newest is not self._mark:
            raise RemoteRefused("late", "another transfer of it has begun")
        return memoryview(receipt.data)[self._at :]

    def took(self, count: int) -> None:
        """``count`` bytes more are in place."""
        self._at += count
        self._receipt.filled = max(self._receipt.filled, self._at)
