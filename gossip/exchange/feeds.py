"""Streaming a merged part on while it grows: from its owner to all, from a relay to its group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from gossip.exchange.bodies import as_bytes
from protocols.transport import Buffer


class Growing(Protocol):
    """A part of which ever more is final; the last of it is a trailer, empty until it is known."""

    trailer: bytes
    wakes: list[Callable[[], None]]  # called whenever there is more

    @property
    def ready_bytes(self) -> int:
        """How many bytes from its beginning may be sent. Raises Malformed where none may."""
        ...

    def offset(self, chunk: int) -> int:
        """Where a chunk begins, in bytes; behind the last one, where the part ends."""
        ...


class MergedFeed:
    """A part (``data``, uint8) on its way to a member, from the ``first`` chunk on; then its
    trailer (:mod:`gossip.exchange.bodies`), ``trailer`` bytes long."""

    def __init__(self, part: Growing, data: torch.Tensor, first: int, trailer: int) -> None:
        self._part = part
        self._view = as_bytes(data)
        self._at = part.offset(first)
        self.length = len(self._view) - self._at + trailer
        self.given = 0  # bytes handed out

    def attach(self, wake: Callable[[], None]) -> None:
        """To be woken when there is more."""
        if not self._part.trailer:
            self._part.wakes.append(wake)

    def next(self) -> Buffer | None:
        """All that is final and not sent yet; None while there is nothing.

        Raises Malformed once what was sent has turned out to be unsound.
        """
        begin, self._at = self._at, max(self._at, self._part.ready_bytes)
        found: Buffer = self._view[begin : self._at]
        if not found and self._at == len(self._view) and self.given < self.length:
            found = self._part.trailer
        self.given += len(found)
        return found or None
