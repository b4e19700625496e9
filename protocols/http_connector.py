"""Opening connections to peers for the HTTP transport.

A connector's host is a peer's TLS server name. Where that peer lives is the address book's
business, and that it is that peer TLS's. Every failure says why, in the words of
:class:`~protocols.errors.Why`.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.client_proto import ResponseHandler

from protocols import tls
from protocols.addresses import AddressBook, parse_address
from protocols.errors import IdentityMismatch, TransportError, Unreachable, Why
from protocols.http_body import Limits
from protocols.identity import PeerId
from protocols.sockets import prefer_small_queue

if TYPE_CHECKING:
    from aiohttp.client import ClientTimeout
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.tracing import Trace

_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"})
_SHORT_FAILURE = 1.0  # seconds after which an interrupted attempt counts as failed


@dataclass(slots=True)
class Dial:
    """A connection to an address, not to a peer: who answers is what it finds out."""

    address: str
    expected: PeerId | None
    peer: PeerId | None = None


class PeerConnector(aiohttp.BaseConnector):
    """Opens connections to peers by their server name, trying the addresses of the book."""

    def __init__(self, book: AddressBook, context: ssl.SSLContext | None, limits: Limits) -> None:
        super().__init__(
            limit=0, limit_per_host=limits.per_peer, keepalive_timeout=limits.idle_client
        )
        self.dials: dict[str, Dial] = {}
        self._book = book
        self._context = context
        self._limits = limits
        self._links: dict[PeerId, weakref.WeakSet[asyncio.Transport]] = {}

    def links(self, peer: PeerId | None = None) -> list[asyncio.Transport]:
        """The open connections, of one peer or of all."""
        peers = list(self._links) if peer is None else [peer]
        sets = [self._links[p] for p in peers if p in self._links]
        return [link for links in sets for link in links if not link.is_closing()]

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout
    ) -> ResponseHandler:
        host = req.url.raw_host or ""
        dial = self.dials.get(host)
        if dial is not None:
            protocol, dial.peer = await self._open(dial.address, dial.expected)
            return protocol
        peer = tls.peer_of_name(host)
        protocol = await self._connect(peer)
        assert protocol.transport is not None
        if peer not in self._links:  # peers whose links have all gone are not kept
            self._links = {p: links for p, links in self._links.items() if links}
        self._links.setdefault(peer, weakref.WeakSet()).add(protocol.transport)
        return protocol

    async def _connect(self, peer: PeerId) -> ResponseHandler:
        """Try the known addresses, then those the resolver finds."""
        tried: dict[str, TransportError] = {}
        for resolved in (False, True):
            if resolved and not await self._book.resolve(peer):
                break
            for address in self._book.addresses(peer):
                if address in tried:
                    continue
                started = self._loop.time()
                try:
                    protocol, _ = await self._open(address, peer)
                except TransportError as error:
                    self._book.failed(peer, address)
                    tried[address] = error
                except asyncio.CancelledError:
                    if self._loop.time() - started > _SHORT_FAILURE:
                        self._book.failed(peer, address)
                    raise
                else:
                    self._book.succeeded(peer, address)
                    return protocol
        errors = list(tried.values())
        if not errors:
            raise Unreachable(peer, Why.NO_ADDRESS)
        first = next((e for e in errors if isinstance(e, Unreachable)), None)
        if len(errors) == 1 or first is None:
            raise errors[0]
        raise Unreachable(peer, first.why, "; ".join(map(str, errors)))

    async def _open(
        self, address: str, expected: PeerId | None
    ) -> tuple[ResponseHandler, PeerId | None]:
        """One connection to one address. The peer is None where there is no TLS."""
        place = parse_address(address)
        secure = self._context is not None
        name = tls.ANYONE if expected is None else tls.server_name(expected)
        try:
            async with asyncio.timeout(self._limits.connect):
                transport, protocol = await self._loop.create_connection(
                    self._factory,
                    place.host,
                    place.port,
                    ssl=self._context,
                    server_hostname=name if secure else None,
                    ssl_shutdown_timeout=self._limits.grace if secure else None,
                    happy_eyeballs_delay=0.25,
                )
        except tls.WrongPeer as error:
            raise IdentityMismatch(address, expected or "", error.got) from error
        except OSError as error:  # TimeoutError, gaierror and SSLError among them
            why, detail = _reason(error)
            raise Unreachable(address, why, detail) from error
        prefer_small_queue(transport)
        proven = transport.get_extra_info("ssl_object")
        return protocol, proven.peer_id if proven is not None else None


def _reason(error: OSError) -> tuple[Why, str]:
    """Why a connection could not be opened."""
    if isinstance(error, TimeoutError):
        return Why.TIMEOUT, ""
    if isinstance(error, socket.gaierror):
        return Why.DNS, error.strerror or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Why.NOT_ATOLL, "its certificate is of another kind"
    if isinstance(error, ssl.SSLError):
        if error.reason in _NOT_TLS:
            return Why.NOT_ATOLL, "it does not speak TLS"
        return Why.TLS, tls_reason(error)
    text = str(error)
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in text:
        return Why.REFUSED, ""
    if isinstance(error, ConnectionError):
        return Why.RESET, "in the handshake"
    return Why.TIMEOUT, error.strerror or text


def tls_reason(error: ssl.SSLError) -> str:
    """What OpenSSL says, in small letters."""
    return (getattr(error, "reason", None) or "").lower().replace("_", " ")
