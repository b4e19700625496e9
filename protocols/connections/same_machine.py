"""Lanes between processes of one machine, past TCP: by abstract Unix sockets, where there are any.

The kernel then copies bytes in half the processor time, which is what averaging on one machine is
short of. Nothing else differs: the same port, the same handshake, the same frames.

The name of a listening socket holds the TCP port and the peer id of the listener, so dialling an
address reaches the same peer as by TCP, and not what a forwarded port leads to.
Abstract names are those of a network namespace: containers and separate networks of one machine do
not see each other's and stay with TCP, shaped and firewalled as it is. A name can be taken by
another user of the machine before us; only sockets of one's own user are dialled.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys

from protocols.addresses import address_towards, parse_address
from protocols.errors import OperatorError
from protocols.identity import PeerId

_AVAILABLE = sys.platform == "linux"
_BACKLOG = 64
_CREDENTIALS = struct.Struct("3i")  # process, user, group: unix(7), SO_PEERCRED


def listener(port: int, peer: PeerId) -> socket.socket | None:
    """A listening, non-blocking socket beside the TCP port; None where there can be none."""
    if not _AVAILABLE:
        return None
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.setblocking(False)
        found.bind(_name(port, peer))
        found.listen(_BACKLOG)
    except OSError:  # the name is taken: TCP is always there
        found.close()
        return None
    return found


def connection(address: str, peer: PeerId) -> socket.socket | None:
    """A non-blocking connection to ``peer`` at ``HOST:PORT``; None: use TCP."""
    if not _AVAILABLE:
        return None
    try:
        place = parse_address(address)
    except OperatorError:
        return None
    with contextlib.suppress(OSError):  # a name, or no way leads there
        if address_towards(place.host) == place.host:
            return _connected(_name(place.port, peer))
    return None


def _connected(name: str) -> socket.socket | None:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.setblocking(False)
        found.connect(name)  # at once, or not at all
        raw = found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        found.close()
        return None
    if _CREDENTIALS.unpack(raw)[1] != os.geteuid():
        found.close()
        return None
    return found


def is_near(sock: socket.socket) -> bool:
    """Whether a connection came past TCP."""
    return _AVAILABLE and sock.family == socket.AF_UNIX


def _name(port: int, peer: PeerId) -> str:
    return f"\0atoll/{port}/{peer}"
