"""A way past the relay: two nodes behind translators that open a connection at the same time.

A translator lets in what answers what it let out. Two ends that know from which address and port
the other is seen, and dial each other there at the same time, each take the other's first packet
for an answer, and have one connection: the simultaneous open of TCP (RFC 9293, section 3.5; in use
as a way through translators: Ford, Srisuresh, Kegel 2005, section 4). It takes a translator that
gives a port of the inside the same port outside whoever is dialled (RFC 5382, REQ-1), as most do.

So each end dials from the very port from which it has dialled the relay. One of the two listens
there as well: where the way is so short that a first packet finds nobody dialling yet, as between
machines of one network, it is let in all the same.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Sequence
from typing import Any

from protocols.addresses import hostport, ip_of, parse_address
from protocols.errors import OperatorError
from protocols.seen import shared

PUNCH_S = 2.5  # two first packets and their repetition, on the longest ways
_PAUSES_S = 0.002, 0.1  # least and most that a pause before dialling again may be at most
MOST_TRIES = 64  # of one address: a relay that lies makes nobody flood another
_QUEUE = 4  # of those who dial the port that listens

Endpoint = tuple[str, int]  # IP address and port


def reusable(info: Sequence[Any]) -> socket.socket:
    """A socket for an entry of ``getaddrinfo`` whose port others of this process may share."""
    family, kind, protocol = info[:3]
    return shared(family, kind, protocol, ("::" if family == socket.AF_INET6 else "", 0))


def inside(sock: socket.socket) -> str:
    """The ``HOST:PORT`` of this end of a connection."""
    host, port = sock.getsockname()[:2]
    return hostport(str(ip_of(host)), port)


def meeting_places(other: socket.socket, said: str, towards: socket.socket) -> tuple[str, ...]:
    """Where the end of ``towards`` may meet that of ``other``, as the relay of both sees them.

    ``said`` is what the other calls its address inside: of use where both come from one place, and
    only if it is one of a network of its own. Raises OSError where either has left.
    """
    theirs, ours = _seen(other), _seen(towards)
    if ip_of(theirs[0]).version != ip_of(ours[0]).version:
        return ()
    places = [hostport(*theirs)]
    if theirs[0] == ours[0] and _is_inside(said):
        places.append(said)
    return tuple(dict.fromkeys(places))


async def punched(
    sock: socket.socket, addresses: Sequence[str], *, listens: bool, seconds: float
) -> socket.socket | None:
    """A connection with an end that does the same, from the port of ``sock``, within ``seconds``.

    ``addresses``: where the other end may come from. None where no connection opens. Two ends that
    both call this have one connection at most, as both its ports are given. One ``listens``.
    """
    local: Endpoint = sock.getsockname()[:2]
    targets = [place for address in addresses if (place := _target(address, local)) is not None]
    if not targets:
        return None
    ways: list[Awaitable[socket.socket]] = [_dialled(sock.family, local, one) for one in targets]
    if listens:
        ways.append(_accepted(sock.family, local, {host for host, _ in targets}))
    found: list[socket.socket] = []
    tries: list[asyncio.Task[None]] = []

    async def follow(way: Awaitable[socket.socket]) -> None:
        try:
            found.append(await way)
        except OSError:
            return  # refused too often, or the port cannot be shared here: other ways are left
        for one in tries:
            if one is not asyncio.current_task():
                one.cancel()

    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            tries += [group.create_task(follow(way)) for way in ways]
    except TimeoutError:
        pass
    except BaseException:  # also cancellation: nothing is left half-open
        for one in found:
            one.close()
        raise
    for one in found[1:]:
        one.close()
    return found[0] if found else None


async def _dialled(family: int, local: Endpoint, target: Endpoint) -> socket.socket:
    """Dial until the other end takes it; what is refused is dialled again.

    A translator that refuses strangers, rather than to be silent, ends a try one round trip after
    it began, unless both ends' first packets are under way at once. So pauses are about as long as
    tries, and random: the two ends must not keep out of step. Raises OSError after
    :data:`MOST_TRIES`.
    """
    loop = asyncio.get_running_loop()
    least, most = _PAUSES_S
    for _ in range(MOST_TRIES):
        began = loop.time()
        sock = shared(family, socket.SOCK_STREAM, 0, local)
        try:
            await loop.sock_connect(sock, target)
        except OSError:  # nobody is there yet, or the other way has the connection
            sock.close()
        except BaseException:  # also cancellation
            sock.close()
            raise
        else:
            return sock
        await asyncio.sleep(random.uniform(0, min(max(2 * (loop.time() - began), least), most)))
    raise ConnectionRefusedError("refused again and again")


async def _accepted(family: int, local: Endpoint, hosts: set[str]) -> socket.socket:
    """Wait for a connection from one of ``hosts``; raises OSError."""
    loop = asyncio.get_running_loop()
    with shared(family, socket.SOCK_STREAM, 0, local) as listener:
        listener.listen(_QUEUE)
        while True:
            sock, where = await loop.sock_accept(listener)
            if where[0] in hosts:
                return sock
            sock.close()


def _seen(sock: socket.socket) -> Endpoint:
    host, port = sock.getpeername()[:2]
    return str(ip_of(host)), port


def _is_inside(address: str) -> bool:
    """Whether it is an IP address of a private network, and not of one machine's own."""
    try:
        ip = ip_of(parse_address(address).host)
    except (OperatorError, ValueError):
        return False
    return ip.is_private and not (ip.is_loopback or ip.is_unspecified or ip.is_link_local)


def _target(address: str, local: Endpoint) -> Endpoint | None:
    """An IP address and port to dial from ``local``; None for what no relay should say.

    This machine's own services are not dialled on a relay's word.
    """
    try:
        place = parse_address(address)
        ip = ip_of(place.host)
    except (OperatorError, ValueError):
        return None
    here = ip_of(local[0])
    if ip.version != here.version or ip.is_multicast or ip.is_unspecified:
        return None
    if ip.is_loopback and not here.is_loopback:
        return None
    return str(ip), place.port
