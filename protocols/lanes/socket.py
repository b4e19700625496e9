"""What a lane asks of its socket: a handshake, bytes, what the kernel still holds, who has left.

The socket does not block. Its errors are raised as :class:`SocketError`, to tell them apart
from what feeds and drains raise.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import selectors
import socket
import ssl
import struct
import sys
import termios
from typing import NamedTuple

from protocols.connections.same_machine import is_near
from protocols.connections.tls import PeerSSLSocket, is_refusal, tls_reason
from protocols.errors import LocalProtocolError, Unreachable, Why
from protocols.identity import PeerId

WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

FRAMES = 8  # in one read: a peer that sends a byte in each must not hold up other lanes

_OUTQ_NOT_SENT = 0x894B  # Linux's number of SIOCOUTQNSD
# where these stand in Linux's struct tcp_info: bytes, segments, microseconds
_SND_MSS, _UNACKED, _SACKED, _RTT, _SND_CWND = 16, 24, 28, 68, 80
_TOTAL_RETRANS, _NOTSENT_BYTES, _MIN_RTT = 100, 144, 148
_NEARLY = 2  # segments that a full window may still have room for
_FREE = 1.25  # times the shortest round trip: with less there is no queue on the way
_NO_RTT = 2**32 - 1  # nothing has been acknowledged yet
_MAX_PACING_RATE = 47  # Linux's number of SO_MAX_PACING_RATE, which switches pacing on
_ANY_RATE = 1_250_000_000  # bytes a second
_FAR_UNSENT_BYTES = 32 * 1024
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: throw away what was not sent, and say so


class SocketError(Exception):
    """The socket failed: told from what a feed or drain raises."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def wrapped(sock: socket.socket, context: ssl.SSLContext, server_name: str | None) -> ssl.SSLSocket:
    """The socket with TLS, before its handshake; as the server where ``server_name`` is None."""
    return context.wrap_socket(
        sock,
        server_side=server_name is None,
        server_hostname=server_name,
        do_handshake_on_connect=False,
    )


def shake(sock: socket.socket) -> PeerId | int:
    """Go on with the handshake; returns the proven peer, or selector events to wait for.

    Raises OSError, or ValueError where the peer was gone before.
    """
    assert isinstance(sock, PeerSSLSocket)
    try:
        sock.do_handshake()
    except ssl.SSLWantReadError:
        return selectors.EVENT_READ
    except ssl.SSLWantWriteError:
        return selectors.EVENT_WRITE
    return sock.peer_id


def silent(sock: socket.socket) -> bool:
    """Whether neither bytes nor the end have come; takes a byte. Raises :class:`SocketError`."""
    try:
        sock.recv(1)
    except WOULD_BLOCK:
        return True
    except OSError as error:
        raise SocketError(error) from error
    return False


class Filled(NamedTuple):
    """What one look at a socket brought."""

    put: int  # bytes that are in the room
    came: int  # bytes read from the network, incomplete sealed frames included
    dry: bool  # the socket has no more


def fill(sock: socket.socket, room: memoryview, *, secure: bool) -> Filled:
    """Read what has come into ``room``, at most :data:`FRAMES` sealed frames of it.

    Raises :class:`SocketError` where the other end has closed or broken; bytes that came before
    are returned first, and the next call raises.
    """
    if not room:
        raise LocalProtocolError("a drain gave room of no bytes")
    at, heard, frames = 0, _heard(sock), FRAMES
    try:
        while at < len(room) and frames:
            frames -= 1
            count = sock.recv_into(room[at:] if at else room)
            if count == 0:
                if at:
                    break
                raise SocketError(ConnectionResetError("closed by the other end"))
            at += count
            if not secure and at < len(room):
                return Filled(at, at, dry=True)
    except WOULD_BLOCK:
        return Filled(at, _heard(sock) - heard if secure else at, dry=True)
    except OSError as error:
        if not at:
            raise SocketError(error) from error
    return Filled(at, _heard(sock) - heard if secure else at, dry=False)


def _heard(sock: socket.socket) -> int:
    return sock.heard if isinstance(sock, PeerSSLSocket) else 0


def host_of(sock: socket.socket) -> str:
    """The address of the other end, without its port; empty where it has none."""
    try:
        return str(sock.getpeername()[0])
    except (OSError, IndexError):
        return ""


def same_machine(sock: socket.socket) -> bool:
    """Whether both ends are on one machine: no link is between them."""
    if is_near(sock):
        return True
    try:
        return bool(host_of(sock) == sock.getsockname()[0])
    except (OSError, IndexError):  # gone already, or no address at all
        return False


def unacknowledged(sock: socket.socket) -> int:
    """Bytes that the kernel holds because they were not sent or not acknowledged."""
    return _asked(sock, termios.TIOCOUTQ)


def unsent(sock: socket.socket) -> int:
    """Bytes that the kernel has not sent yet, where it tells (Linux)."""
    return _asked(sock, _OUTQ_NOT_SENT)


class Told(NamedTuple):
    """What the system tells of what a connection sends; zeros where it does not (Linux does)."""

    round_trip: float = 0.0  # seconds, the shortest of late
    beyond: int = 0  # bytes that are not acknowledged and stand in no queue of the link, see told
    smoothed: float = 0.0  # seconds, the present round trip
    again: int = 0  # segments retransmitted since the connection began


def told(sock: socket.socket) -> Told:
    """Ask the system.

    Two kinds of unacknowledged bytes stand in no queue of the link: those that arrived behind a
    lost one, and those that wait for the connection's own window while no queue is on the way.
    """
    if sys.platform != "linux":
        return Told()
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT + 4)
    except OSError:  # gone already, or no TCP
        return Told()
    if len(info) < _MIN_RTT + 4:  # an old kernel
        return Told()

    def at(offset: int) -> int:
        value: int = struct.unpack_from("I", info, offset)[0]
        return value

    sacked = at(_SACKED)
    full = at(_UNACKED) - sacked + _NEARLY >= at(_SND_CWND)
    waits = full and at(_RTT) < _FREE * at(_MIN_RTT)  # a queue on the way would be the limit
    beyond = at(_SND_MSS) * sacked + (at(_NOTSENT_BYTES) if waits else 0)
    shortest = at(_MIN_RTT) if at(_MIN_RTT) != _NO_RTT else 0
    return Told(shortest / 1e6, beyond, at(_RTT) / 1e6, at(_TOTAL_RETRANS))


def prefer_bbr(sock: socket.socket) -> bool:
    """Let BBR decide how fast it sends; returns whether the system has it and lets us (Linux)."""
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        return False
    try:
        sock.setsockopt(socket.IPPROTO_TCP, option, b"bbr")
    except OSError:  # not there, not allowed, or the connection has ended
        return False
    return True


def send_evenly(sock: socket.socket) -> None:
    """Have the kernel spread its packets over the round trip instead of sending bursts (Linux).

    Bytes that wait in the kernel for the connection's window would leave all at once when it
    opens, so only few may wait there from now on.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # the connection may have ended already
            sock.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, _ANY_RATE)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _FAR_UNSENT_BYTES)


def _asked(sock: socket.socket, what: int) -> int:
    try:
        raw = fcntl.ioctl(sock, what, b"\0\0\0\0")
    except OSError:
        return 0
    size: int = struct.unpack("i", raw)[0]
    return size


def other_end_left(sock: socket.socket) -> bool:
    """Whether the other end has closed, as far as that shows without reading (Linux)."""
    event = getattr(select, "POLLRDHUP", None)
    if event is None:
        return False
    poller = select.poll()
    poller.register(sock, event)
    return bool(poller.poll(0))


def throw_away_unsent(sock: socket.socket) -> None:
    """Let closing throw away what the kernel still has, and tell the other end."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def broken(error: OSError, who: str) -> Unreachable:
    """The error to raise for a failed socket."""
    if isinstance(error, ssl.SSLError) and is_refusal(error):
        return Unreachable(who, Why.TLS, tls_reason(error))
    return Unreachable(who, Why.RESET)
