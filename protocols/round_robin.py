"""Whose turn it is under a limit: the peers in turn, and the lanes of a peer in turn. Sans-IO.

In one common line a peer that opens many lanes would get nearly everything. On a relay it is the
pairs of peers, and the connections of a pair.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class RoundRobin(Generic[Item]):
    """Items that wait, by peer, or by pair of peers."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Item]] = {}  # by peer, the next one first

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, peer: str, item: Item) -> None:
        """``item`` of ``peer`` waits, behind others of the same."""
        self._lines.setdefault(peer, deque()).append(item)

    def next(self) -> Item:
        """The item whose turn it is; it is taken out of the line."""
        peer = next(iter(self._lines))
        line = self._lines.pop(peer)
        item = line.popleft()
        if line:
            self._lines[peer] = line
        return item
