"""From which address others see a connection: how ``node doctor`` tells kinds of NAT apart.

A connection that begins with :data:`MARK` is answered with the address it comes from, in the
clear, and closed: as STUN does over UDP (RFC 8489). A caller learns only about itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from protocols.addresses import hostport, parse_address

MARK = b"\xa9"  # no letter, no TLS record, no lane and no call
TIMEOUT_S = 5.0
_MAX_ANSWER = 128


async def tell(sock: socket.socket) -> None:
    """Answer one connection and close it; raises OSError."""
    with contextlib.closing(sock):
        await asyncio.get_running_loop().sock_recv(sock, len(MARK))  # else closing is a reset
        host, port = sock.getpeername()[:2]
        await asyncio.get_running_loop().sock_sendall(sock, hostport(host, port).encode())


def share_port(sock: socket.socket) -> None:
    """Let further sockets of this process have the port that ``sock`` is about to be bound to."""
    for option in ("SO_REUSEADDR", "SO_REUSEPORT"):
        if hasattr(socket, option):
            sock.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)


async def seen_from(address: str, local_port: int) -> tuple[str, int]:
    """The address and port that ``address`` sees this machine at, and the local port used.

    ``local_port`` 0: any. Connections to several peers can have the same. Raises OSError, and
    ``ValueError`` where the other end answers otherwise.
    """
    place = parse_address(address)
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, target = infos[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.setblocking(False)
        share_port(sock)
        sock.bind(("", local_port))
        async with asyncio.timeout(TIMEOUT_S):
            await loop.sock_connect(sock, target)
            await loop.sock_sendall(sock, MARK)
            answer = b""
            while len(answer) < _MAX_ANSWER and (piece := await loop.sock_recv(sock, _MAX_ANSWER)):
                answer += piece
        text = answer.decode("ascii")  # UnicodeDecodeError is a ValueError
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdigit():
            raise ValueError("it does not say from where it sees this machine")
        return f"{host}:{port}", sock.getsockname()[1]
