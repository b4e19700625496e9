"""Connecting to ``HOST:PORT``: IP addresses at once, names by threads of their own.

The system's resolver blocks, for half a minute where a name server does not answer, and cannot be
stopped. Peers choose the names, so in the event loop's own pool a few slow ones would hold up
whatever else runs there, and the end of the process. Here each lookup has a thread of its own, for
which the process does not wait at its end. Their number is bounded, in all and for the names of one
peer; further lookups wait their turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from aiohappyeyeballs import start_connection

from protocols.addresses import parse_address
from protocols.connections import tls

MOST = 16  # lookups at once
MOST_OF_ONE = 2  # of them, for names of one peer
NEXT_ADDRESS_S = 0.25  # until a name's next address is tried as well: RFC 8305, section 8

Places = list[tuple[Any, ...]]  # as socket.getaddrinfo returns them
SocketMaker = Callable[[tuple[Any, ...]], socket.socket]
_Place = tuple[str, int]
_T = TypeVar("_T")


class Names:
    """Lookups of one node; :class:`protocols.http.transport.HttpTransport` owns it."""

    def __init__(self) -> None:
        self._under_way: dict[_Place, asyncio.Future[Places]] = {}
        self._looking: Counter[str] = Counter()  # by the peer whose names they are

    async def connected(
        self, address: str, whose: str, *, make: SocketMaker | None = None
    ) -> socket.socket:
        """A connection to ``HOST:PORT``, an address of the peer ``whose``; raises OSError.

        ``make`` makes its socket for one of the places found.
        """
        place = parse_address(address)
        places = await self.places(place.host, place.port, whose)
        return await start_connection(
            places, happy_eyeballs_delay=NEXT_ADDRESS_S, socket_factory=make
        )

    async def met(
        self,
        address: str,
        whose: str,
        within: float,
        use: Callable[[socket.socket], Awaitable[_T]],
    ) -> _T:
        """What ``use`` makes of a connection to ``HOST:PORT`` where the peer that is meant answers.

        A name may be that of several machines, in an order that turns: where one proves to be
        another peer (:class:`tls.WrongPeer`), the others are tried, ``within`` so many seconds in
        all. Raises OSError, that of the wrong peer if there was one.
        """
        wrong: tls.WrongPeer | None = None
        try:
            async with asyncio.timeout(within):
                place = parse_address(address)
                left = await self.places(place.host, place.port, whose)
                while True:
                    sock = await start_connection(left, happy_eyeballs_delay=NEXT_ADDRESS_S)
                    left = _others(left, sock)
                    try:
                        return await use(sock)
                    except tls.WrongPeer as error:
                        wrong = wrong or error
                        if not left:
                            raise
        except OSError as error:  # TimeoutError among them
            raise wrong or error from None

    async def places(self, host: str, port: int, whose: str) -> Places:
        """Where a host of the peer ``whose`` is; raises OSError."""
        with contextlib.suppress(socket.gaierror):
            flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        while (found := self._under_way.get((host, port))) is None:
            if len(self._under_way) < MOST and self._looking[whose] < MOST_OF_ONE:
                found = self._look(host, port, whose)
                break
            ended = asyncio.FIRST_COMPLETED
            await asyncio.wait(list(self._under_way.values()), return_when=ended)
        return await asyncio.shield(found)  # others may wait for the same

    def _look(self, host: str, port: int, whose: str) -> asyncio.Future[Places]:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Places] = loop.create_future()

        def look() -> None:
            places, error = _looked_up(host, port)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(partial(self._ended, (host, port), whose, places, error))

        threading.Thread(target=look, name="atoll-name", daemon=True).start()
        self._under_way[host, port] = found
        self._looking[whose] += 1
        return found

    def _ended(self, place: _Place, whose: str, places: Places, error: OSError | None) -> None:
        self._looking[whose] -= 1
        if not self._looking[whose]:
            del self._looking[whose]
        found = self._under_way.pop(place)
        if error is None:
            found.set_result(places)
        else:
            found.set_exception(error)
            found.exception()  # those who wanted to know may have left


def _others(places: Places, sock: socket.socket) -> Places:
    """The places where ``sock`` does not lead; none where that cannot be told."""
    with contextlib.suppress(OSError):
        there = sock.getpeername()[:2]
        others = [place for place in places if place[4][:2] != there]
        if len(others) < len(places):
            return others
    return []


def _looked_up(host: str, port: int) -> tuple[Places, OSError | None]:
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)), None
    except OSError as error:
        return [], error
