"""Opening connections to peers for the HTTP transport.

A connector's host is a peer's TLS server name. The address book tells where that peer
lives (:mod:`protocols.dialling`), and TLS proves that it is that peer.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.client_proto import ResponseHandler

from protocols.address_book import AddressBook
from protocols.addresses import hostport, ip_of, is_relayed
from protocols.connections import tls
from protocols.connections.names import Names
from protocols.connections.sockets import prefer_small_queue
from protocols.dialling import reach, unreached
from protocols.identity import PeerId
from protocols.limits import Limits
from protocols.relay.client import Relays, told_by

if TYPE_CHECKING:
    from aiohttp.client import ClientTimeout
    from aiohttp.client_reqrep import ClientRequest, ConnectionKey
    from aiohttp.tracing import Trace


@dataclass(slots=True)
class Dial:
    """A connection to an address, not to a peer: it finds out which peer answers there."""

    address: str
    expected: PeerId | None
    peer: PeerId | None = None


class PeerConnector(aiohttp.BaseConnector):
    """Opens connections to peers by their server name, trying the addresses of the book."""

    def __init__(
        self,
        book: AddressBook,
        names: Names,
        context: ssl.SSLContext | None,
        limits: Limits,
        relays: Relays,
    ) -> None:
        super().__init__(
            limit=0, limit_per_host=limits.per_peer, keepalive_timeout=limits.idle_client
        )
        self.dials: dict[str, Dial] = {}
        self._book = book
        self._names = names
        self._context = context
        self._limits = limits
        self._relays = relays
        self._links: weakref.WeakKeyDictionary[asyncio.Transport, PeerId]
        self._links = weakref.WeakKeyDictionary()
        self._direct: weakref.WeakKeyDictionary[asyncio.Transport, str]  # by no relay: dialled at
        self._direct = weakref.WeakKeyDictionary()

    def links(self) -> list[asyncio.Transport]:
        """The open connections to peers."""
        return [link for link in self._links if not link.is_closing()]

    def own_end(self, peer: PeerId) -> str:
        """``HOST:PORT`` of this machine on the newest connection to ``peer``; empty without one."""
        ends = [link for link in self.links() if self._links[link] == peer]
        return hostport(*ends[-1].get_extra_info("sockname")[:2]) if ends else ""

    def reached(self, peer: PeerId) -> str:
        """``HOST:PORT`` where a connection to ``peer`` leads; empty without one past any relay.

        One to an address by hearsay does not count: whoever named it may have put itself between.
        """
        for link, at in self._direct.items():
            if self._links.get(link) != peer or link.is_closing():
                continue
            end = link.get_extra_info("peername")
            if end and not self._book.is_hearsay(peer, at):
                return hostport(str(ip_of(end[0])), end[1])
        return ""

    def drop_idle(self, peer: PeerId, before: float = math.inf) -> None:
        """Close the connections to ``peer`` that serve nothing now, nor have since ``before``."""
        host = tls.server_name(peer)
        for key, idle in self._conns.items():
            for protocol, since in idle if key.host == host else ():
                if since <= before and protocol.transport is not None:
                    protocol.transport.abort()  # a closed one is not taken again

    def _release(
        self, key: ConnectionKey, protocol: ResponseHandler, *, should_close: bool = False
    ) -> None:
        """Put it back as the first to be taken, and not as the last: of all it is known to work."""
        super()._release(key, protocol, should_close=should_close)
        idle = self._conns.get(key)
        if idle and idle[-1][0] is protocol:
            idle.rotate()

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout
    ) -> ResponseHandler:
        host = req.url.raw_host or ""
        dial = self.dials.get(host)
        if dial is not None:
            protocol, dial.peer = await self._open(dial.address, dial.expected)
            return protocol
        peer, tried = tls.peer_of_name(host), ""

        async def open_(address: str) -> ResponseHandler:
            nonlocal tried
            tried = address
            return (await self._open(address, peer))[0]

        protocol = await reach(self._book, peer, open_)
        assert protocol.transport is not None
        self._links[protocol.transport] = peer
        if not is_relayed(tried):
            self._direct[protocol.transport] = tried
        return protocol

    async def _open(
        self, address: str, expected: PeerId | None
    ) -> tuple[ResponseHandler, PeerId | None]:
        """One connection to one address. The peer is None where there is no TLS."""
        name = tls.ANYONE if expected is None else tls.server_name(expected)
        within = self._limits.connect
        try:
            if expected is not None and is_relayed(address):
                async with asyncio.timeout(2 * within):
                    sock = await self._relays.connect(address, expected)
                    transport, protocol = await self._secured(sock, name)
            else:
                whose = address if expected is None else told_by(expected)
                transport, protocol = await self._names.met(
                    address, whose, within, lambda sock: self._secured(sock, name)
                )
        except OSError as error:  # TimeoutError, gaierror and SSLError among them
            raise unreached(address, expected, error) from error
        prefer_small_queue(transport)
        proven = transport.get_extra_info("ssl_object")
        return protocol, proven.peer_id if proven is not None else None

    async def _secured(
        self, sock: socket.socket, name: str
    ) -> tuple[asyncio.Transport, ResponseHandler]:
        """The connection on a socket, with whom the TLS server name ``name`` asks for."""
        secure = self._context is not None
        return await self._loop.create_connection(
            self._factory,
            ssl=self._context,
            server_hostname=name if secure else None,
            ssl_shutdown_timeout=self._limits.grace if secure else None,
            sock=sock,
        )
