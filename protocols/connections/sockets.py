"""Sockets of an event loop: listening, first bytes, and how much the kernel holds unsent."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from protocols.connections.listening import listen_on
from protocols.connections.same_machine import is_near
from protocols.tasks import resolve

_UNSENT_BYTES = 256 * 1024  # of messages
_UNSENT_LANE_BYTES = 1024 * 1024  # with a quarter of it speed falls by a quarter


async def open_listener(
    listen: str, option: str = "--listen", *, for_others: bool = False
) -> socket.socket:
    """As :func:`~protocols.connections.listening.listen_on`, from an event loop."""
    return await asyncio.to_thread(listen_on, listen, option, for_others=for_others)


def prefer_small_queue(transport: asyncio.BaseTransport) -> None:
    """Keep what the kernel holds unsent short, so that progress of a body is seen in time."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        _small_queue(sock, _UNSENT_BYTES)


def prepare_lane(sock: socket.socket) -> None:
    """The options of a connection that carries long bodies and short replies."""
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # the connection may have ended already
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if is_near(sock):  # by default a sealed frame does not fit
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT_LANE_BYTES)
    _small_queue(sock, _UNSENT_LANE_BYTES)


async def first_byte(sock: socket.socket) -> bytes:
    """The first byte, left where it is; empty if the connection ends without one."""
    loop = asyncio.get_running_loop()
    while True:
        with contextlib.suppress(BlockingIOError):
            return sock.recv(1, socket.MSG_PEEK)
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(sock, resolve, readable)
        try:
            await readable
        finally:
            loop.remove_reader(sock)


def _small_queue(sock: socket.socket, size: int) -> None:
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None:
        with contextlib.suppress(OSError):  # the connection may have ended already
            sock.setsockopt(socket.IPPROTO_TCP, option, size)
