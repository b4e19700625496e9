"""Passing bytes between two connections, unread, as fast as is granted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

_PIECE = 64 * 1024

Take = Callable[[int], Awaitable[int]]  # waits until so many bytes or fewer may go: how many


async def splice(
    one: socket.socket,
    other: socket.socket,
    take: Take,
    *,
    idle: float,
    moved: Callable[[int], None],
) -> None:
    """Pass on what comes from either to the other, until both have ended or one has broken.

    Ends as well when nothing moves for ``idle`` seconds. TCP holds a sender back whose receiver is
    slow: no more than one piece of either direction is here. The sockets stay the caller's.
    """
    loop = asyncio.get_running_loop()
    with contextlib.suppress(TimeoutError, OSError):  # however it ends, the caller closes both
        async with asyncio.timeout(idle) as limit, asyncio.TaskGroup() as group:

            def note(count: int) -> None:
                moved(count)
                if not limit.expired():  # it may be, in this very turn of the loop
                    limit.reschedule(loop.time() + idle)

            pumps = [
                group.create_task(_pump(source, target, take, note))
                for source, target in ((one, other), (other, one))
            ]
            for pump in pumps:
                pump.add_done_callback(lambda done: _stop(done, pumps))


def _stop(done: asyncio.Task[bool], pumps: list[asyncio.Task[bool]]) -> None:
    """If one direction has broken, end the other: nobody is left at its far end."""
    if not done.cancelled() and not done.result():
        for pump in pumps:
            pump.cancel()


async def _pump(
    source: socket.socket, target: socket.socket, take: Take, note: Callable[[int], None]
) -> bool:
    """Pass on one direction to its end; returns whether it ended well."""
    loop = asyncio.get_running_loop()
    room = memoryview(bytearray(_PIECE))
    try:
        while count := await loop.sock_recv_into(source, room):
            at = 0
            while at < count:
                granted = await take(count - at)
                await loop.sock_sendall(target, room[at : at + granted])
                at += granted
                note(granted)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return False
    return True
