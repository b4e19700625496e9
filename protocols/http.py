"""The real transport: HTTP/1.1 over mutual TLS 1.3, one port, proven peers.

>>> async with HttpTransport(identity, listen="0.0.0.0:4390") as transport:
...     peer = await transport.dial("203.0.113.7:4390")
...     await transport.call(peer, "greet", b"hello", timeout=5)

Three routes carry the three verbs of :mod:`protocols.transport`: ``POST /call/NAME``,
``POST /push/NAME`` and ``POST /pull/NAME``. Identity is TLS's (:mod:`protocols.tls`).
``tls=False`` sends everything in the clear and believes the identity the other end claims: for
benchmarks on one's own machines only. The two kinds cannot talk to each other.

aiohttp takes a third of a second to import, so command-line code imports this module late.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

from protocols import tls as tls_links
from protocols.addresses import AddressBook, parse_address
from protocols.bodies import outgoing
from protocols.errors import LocalProtocolError, Unreachable, Why
from protocols.http_body import Limits
from protocols.http_client import HttpClient
from protocols.http_server import HttpServer
from protocols.http_stats import TransportStats
from protocols.identity import Identity, PeerId
from protocols.sockets import open_listener
from protocols.transport import (
    MAX_CALL_BYTES,
    CallHandler,
    Feed,
    Incoming,
    Outgoing,
    PullHandler,
    PushHandler,
)

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class HttpTransport:
    """:class:`~protocols.transport.Transport` over aiohttp.

    ``listen`` is ``HOST:PORT`` (port 0: any), or None for a node that only dials. A handler is
    cancelled when its caller goes away. The bytes an :class:`Outgoing` yields must not be changed
    before the transfer has ended.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        listen: str | None = None,
        book: AddressBook | None = None,
        tls: bool = True,
        limits: Limits | None = None,
    ) -> None:
        self.identity = identity
        self.book = book if book is not None else AddressBook()
        self.stats = TransportStats()
        self.limits = limits or Limits()
        self._listen = listen
        self._listening: tuple[str, int] | None = None
        self._client_context = tls_links.client_context(identity) if tls else None
        self._server = HttpServer(
            identity.peer_id,
            context=tls_links.server_context(identity) if tls else None,
            stats=self.stats,
            limits=self.limits,
        )
        self._client: HttpClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def listening(self) -> tuple[str, int] | None:
        """The address really bound, or None if this node only dials or has not started."""
        return self._listening

    async def start(self) -> None:
        """Open the port; raises :class:`~protocols.errors.OperatorError` E303 if it is taken."""
        if self._client is not None:
            raise LocalProtocolError("the transport was started twice")
        self._loop = asyncio.get_running_loop()
        if self._listen is not None:
            listener = await open_listener(self._listen)
            host, port = listener.getsockname()[:2]
            self._listening = host, port
            self._server.start(listener)
        self._client = HttpClient(
            self.peer_id,
            book=self.book,
            context=self._client_context,
            stats=self.stats,
            limits=self.limits,
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop listening, cut all links, wait for handlers to end; within two seconds."""
        if self._client is not None:
            await self._client.aclose()
        await self._server.aclose()
        self._listening = None

    def admit(self, rule: Callable[[PeerId, str], bool]) -> None:
        """Let only those in of whom ``rule(peer, name)`` says yes; others get code ``stranger``.

        ``name`` is what they ask for: greeting must stay possible for strangers.
        """
        self._server.admits = rule

    def drop(self, peer: PeerId) -> int:
        """Cut every link with ``peer``, either way; returns how many there were."""
        dialled = self._client.drop(peer) if self._client else 0
        return dialled + self._server.drop(peer)

    # --- answering ----------------------------------------------------------------------------

    def on_call(self, name: str, handler: CallHandler, *, max_body: int = MAX_CALL_BYTES) -> None:
        self._server.on_call(_checked(name), handler, max_body)

    def on_push(self, name: str, handler: PushHandler, *, max_length: int) -> None:
        self._server.on_push(_checked(name), handler, max_length)

    def on_pull(self, name: str, handler: PullHandler) -> None:
        self._server.on_pull(_checked(name), handler)

    # --- asking -------------------------------------------------------------------------------

    async def call(
        self,
        peer: PeerId,
        name: str,
        body: bytes,
        *,
        timeout: float,
        max_reply: int = MAX_CALL_BYTES,
    ) -> bytes:
        return await self._started(peer).call(peer, _checked(name), body, timeout, max_reply)

    async def push(
        self, peer: PeerId, name: str, header: bytes, body: Outgoing | Feed, *, timeout: float
    ) -> bytes:
        client = self._started(peer)
        return await client.push(peer, _checked(name), header, outgoing(body), timeout)

    def pull(
        self, peer: PeerId, name: str, header: bytes, *, max_length: int, timeout: float
    ) -> AbstractAsyncContextManager[Incoming]:
        return self._started(peer).pull(peer, _checked(name), header, max_length, timeout)

    async def dial(self, address: str, expected: PeerId | None = None) -> PeerId:
        """Connect to ``HOST:PORT[/PEERID]``, learn who answers, and remember the address.

        Raises as the three verbs do; :class:`~protocols.errors.OperatorError` E102 for an address
        that does not parse.
        """
        place = parse_address(address)
        wanted = expected or place.peer
        peer = await self._started(None).dial(place.hostport, wanted, 2 * self.limits.connect)
        if peer == self.peer_id:
            raise Unreachable(place.hostport, Why.SELF)
        self.book.succeeded(peer, place.hostport)
        return peer

    def post(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` soon where feeds and drains are called."""
        if self._loop is None:
            raise LocalProtocolError("the transport was not started")
        self._loop.call_soon_threadsafe(callback)

    def _started(self, peer: PeerId | None) -> HttpClient:
        if self._client is None:
            raise LocalProtocolError("the transport was not started")
        if peer == self.peer_id:
            raise Unreachable(self.peer_id, Why.SELF)
        return self._client


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise LocalProtocolError(f"{name!r} cannot be a name: letters, digits and _ . : - only")
    return name
