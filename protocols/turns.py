"""Whose turn it is under a limit: each peer in turn, and of a peer each of its lanes. Sans-IO.

Were it one line of all lanes, whoever opens many would get nearly everything.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """Those who wait, by peer."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Item]] = {}  # the peer whose turn is next first

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, peer: str, item: Item) -> None:
        """``item`` of ``peer`` waits, behind others of the same."""
        self._lines.setdefault(peer, deque()).append(item)

    def next(self) -> Item:
        """Whose turn it is; it waits no longer."""
        peer = next(iter(self._lines))
        line = self._lines.pop(peer)
        item = line.popleft()
        if line:
            self._lines[peer] = line
        return item
