"""Long bodies made of views, and read into them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from protocols.errors import Malformed
from protocols.transport import CHUNK_BYTES, Incoming, Outgoing


def outgoing(views: Sequence[memoryview]) -> Outgoing:
    """A body of these bytes; they are read while it is sent."""

    async def pieces() -> AsyncIterator[memoryview]:
        for view in views:
            for start in range(0, len(view), CHUNK_BYTES):
                yield view[start : start + CHUNK_BYTES]

    return Outgoing(sum(map(len, views)), pieces())


async def read_into(incoming: Incoming, target: memoryview) -> None:
    """Fill ``target`` with a body of exactly its length; raises :class:`Malformed` for another."""
    if incoming.length != len(target):
        raise Malformed(f"a body of {incoming.length} bytes, expected {len(target)}")
    at = 0
    async for piece in incoming:
        target[at : at + len(piece)] = piece
        at += len(piece)
