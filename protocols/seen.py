"""From which address others see a connection: how ``node doctor`` tells kinds of NAT apart.

A connection that begins with :data:`MARK` is answered with the address it comes from, in the
clear, and closed: as STUN does over UDP (RFC 8489). A caller learns only about itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from protocols.addresses import host_of, hostport, ip_of
from protocols.connections.names import Names

MARK = b"\xa9"  # no letter, no TLS record, no lane and no call
TIMEOUT_S = 5.0
_MAX_ANSWER = 128


async def tell(sock: socket.socket) -> None:
    """Answer one connection and close it; raises OSError."""
    with contextlib.closing(sock):
        await asyncio.get_running_loop().sock_recv(sock, len(MARK))  # else closing is a reset
        host, port = sock.getpeername()[:2]
        # one who listens for both families sees IPv4 mapped
        seen = hostport(str(ip_of(host)), port)
        await asyncio.get_running_loop().sock_sendall(sock, seen.encode())


def shared(family: int, kind: int, protocol: int, local: tuple[str, int]) -> socket.socket:
    """A socket bound to ``local``, whose port others of this process may have too."""
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        for option in ("SO_REUSEADDR", "SO_REUSEPORT"):
            if hasattr(socket, option):
                sock.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
        sock.bind(local)
    except OSError:
        sock.close()
        raise
    return sock


async def seen_from(address: str, local_port: int) -> tuple[str, int]:
    """The address and port that ``address`` sees this machine at, and the local port used.

    ``local_port`` 0: any. Connections to several peers can have the same. Raises OSError, and
    ``ValueError`` where the other end answers otherwise.
    """

    def make(info: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol = info[:3]
        return shared(family, kind, protocol, ("", local_port))

    loop = asyncio.get_running_loop()
    async with asyncio.timeout(TIMEOUT_S):
        with contextlib.closing(await Names().connected(address, "", make=make)) as sock:
            await loop.sock_sendall(sock, MARK)
            answer = b""
            while len(answer) < _MAX_ANSWER and (piece := await loop.sock_recv(sock, _MAX_ANSWER)):
                answer += piece
            port_used = sock.getsockname()[1]
    text = answer.decode("ascii")  # UnicodeDecodeError is a ValueError
    host, port = host_of(text), text.rpartition(":")[2]
    if not port.isdigit():
        raise ValueError("it does not say from where it sees this machine")
    return hostport(str(ip_of(host)), int(port)), port_used
