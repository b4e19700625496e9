"""The real transport: one port, proven peers, HTTP for messages and lanes for long bodies.

>>> async with HttpTransport(identity, listen="0.0.0.0:4390") as transport:
...     peer = await transport.dial("203.0.113.7:4390")
...     await transport.call(peer, "greet", b"hello", timeout=5)

``call`` is ``POST /call/NAME`` over HTTP/1.1, on the event loop; ``push`` and ``pull`` have TCP
connections of their own (:mod:`protocols.lanes.wire` says how they look), served by one thread
(:mod:`protocols.lanes.reactor`). Both are mutual TLS 1.3, which is the identity
(:mod:`protocols.connections.tls`). ``tls=False`` sends everything in the clear and believes the
identity the other end claims: for benchmarks on one's own machines only. The two kinds cannot talk
to each other.

aiohttp takes a third of a second to import, so command-line code imports this module late.
"""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Self

from protocols.address_book import AddressBook
from protocols.addresses import (
    host_of,
    hostport,
    is_relayed,
    normal,
    parse_address,
    source_of,
    zoned,
)
from protocols.connections import same_machine
from protocols.connections import tls as tls_links
from protocols.connections.names import Names
from protocols.connections.sockets import open_listener
from protocols.errors import LocalProtocolError, Unreachable, Why
from protocols.handlers import Handlers
from protocols.http.client import HttpClient
from protocols.http.server import HttpServer
from protocols.identity import Identity, PeerId
from protocols.lanes.client import LaneClient
from protocols.lanes.pacing import Pacer
from protocols.lanes.reactor import Reactor
from protocols.lanes.server import LaneServer
from protocols.limits import Limits
from protocols.relay.client import Relays
from protocols.relay.server import DIAL, WAIT, RelayServer
from protocols.relay.wire import RelayDial, RelayWait
from protocols.stats import TransportStats
from protocols.transport import (
    MAX_CALL_BYTES,
    CallHandler,
    Feed,
    Incoming,
    Outgoing,
    PullHandler,
    PushHandler,
)

CARRIED = 0.5  # at most, of an upload limit or of the link's speed, for relayed calls
CARRIED_LEAST = 12.5e3  # bytes a second, also where the link seems slower: calls must get through

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class HttpTransport:
    """:class:`~protocols.transport.Transport` over aiohttp.

    ``listen`` is ``HOST:PORT`` (port 0: any; a name that is loopback here alone: all addresses), or
    None for a node that only dials. A handler is cancelled when its caller goes away. The bytes an
    :class:`Outgoing` yields must not be changed before the transfer has ended. ``max_upload`` in
    bytes a second bounds what all bodies together send. Messages do not wait for it, but are taken
    off what bodies may send, and so are relayed calls, which may take half of it at most, and half
    of what the link carries. The more ``cores`` the process has, the more often bodies are packed.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        listen: str | None = None,
        tls: bool = True,
        limits: Limits | None = None,
        max_upload: float | None = None,
        cores: int = 1,
    ) -> None:
        self.identity = identity
        self.book = AddressBook()
        self.stats = TransportStats()
        self.limits = limits or Limits()
        self._names = Names()
        self._listen = listen
        self._listening: tuple[str, int] | None = None
        self._handlers = Handlers()
        self._reactor = Reactor(max_upload, cores)
        sent, come = self._reactor.pacer, self._reactor.incoming
        self.stats.upload.link = lambda: (sent.speed, sent.windows)
        self.stats.download.link = lambda: (come.speed, come.windows)
        self._client_context = tls_links.client_context(identity) if tls else None
        server_context = tls_links.server_context(identity) if tls else None
        self.relay = RelayServer(
            self.stats,
            on_sent=self._reactor.carried,
            most=partial(_carried, sent, max_upload or math.inf),
        )
        self.relay.place_of = self._place_of
        self.relays = Relays(
            identity.peer_id,
            self.call,
            self.relay,
            book=self.book,
            names=self._names,
            limits=self.limits,
            serve=self._adopt,
            mine=self._dialled_at,
        )
        self.on_call(WAIT, self.relay.wait, max_body=RelayWait.MAX_BYTES)
        self.on_call(DIAL, self.relay.dial, max_body=RelayDial.MAX_BYTES)
        self._server = HttpServer(
            identity.peer_id,
            handlers=self._handlers,
            lanes=LaneServer(
                identity.peer_id,
                self._reactor,
                self._handlers,
                context=server_context,
                stats=self.stats,
                limits=self.limits,
            ),
            context=server_context,
            stats=self.stats,
            limits=self.limits,
            on_sent=self._reactor.bucket.spend,
            expected=self._expected,
        )
        self._client: HttpClient | None = None
        self._lanes: LaneClient | None = None

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
        if self._listen is not None:
            listener = await open_listener(self._listen, for_others=True)
            bound = listener.getsockname()
            port = bound[1]
            self._listening = zoned(bound), port
            near = same_machine.listener(port, self.peer_id)
            self._server.start([listener] if near is None else [listener, near])
        self._reactor.start()
        self._client = HttpClient(
            self.peer_id,
            book=self.book,
            names=self._names,
            context=self._client_context,
            stats=self.stats,
            limits=self.limits,
            on_sent=self._reactor.bucket.spend,
            relays=self.relays,
        )
        self._lanes = LaneClient(
            self.peer_id,
            self._reactor,
            book=self.book,
            names=self._names,
            context=self._client_context,
            stats=self.stats,
            limits=self.limits,
            relays=self.relays,
        )
        self._client.on_silent = self._lanes.on_silent = self._silent

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
        if self._lanes is not None:
            self._lanes.close()
        await self._server.aclose()
        await self._reactor.aclose()
        self._listening = None

    def admit(self, rule: Callable[[PeerId, str], bool]) -> None:
        """Let only those in of whom ``rule(peer, name)`` says yes; others get code ``stranger``.

        ``name`` is what they ask for: greeting must stay possible for strangers.
        """
        self._handlers.admits = rule

    def observed(self, peer: PeerId) -> str:
        """``HOST:PORT`` from which ``peer`` is connected, as seen here; empty where it is not."""
        return self._server.observed(peer)

    def own_end(self, peer: PeerId) -> str:
        """``HOST:PORT`` from which this machine is connected to ``peer``; empty where it is not.

        By its own word, not the peer's: what ``peer`` observes, unless addresses are translated.
        """
        return self._client.own_end(peer) if self._client is not None else ""

    def reached(self, peer: PeerId) -> str:
        """``HOST:PORT`` where this node has reached ``peer``, which has proven itself there; empty
        where it is not connected to it, or by a relay."""
        return self._client.reached(peer) if self._client is not None else ""

    def _place_of(self, peer: PeerId) -> str:
        host = host_of(self.observed(peer))
        return source_of(host) if host else ""

    # --- answering ----------------------------------------------------------------------------

    def on_call(self, name: str, handler: CallHandler, *, max_body: int = MAX_CALL_BYTES) -> None:
        self._handlers.calls[_checked(name)] = (handler, max_body)

    def on_push(self, name: str, handler: PushHandler, *, max_length: int) -> None:
        self._handlers.pushes[_checked(name)] = (handler, max_length)

    def on_pull(self, name: str, handler: PullHandler, *, slow: bool = False) -> None:
        self._handlers.pulls[_checked(name)] = (handler, slow)

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
        lanes = self._laned(peer)
        return await lanes.push(peer, _checked(name), header, body, timeout)

    def pull(
        self, peer: PeerId, name: str, header: bytes, *, max_length: int, timeout: float
    ) -> AbstractAsyncContextManager[Incoming]:
        return self._laned(peer).pull(peer, _checked(name), header, max_length, timeout)

    async def dial(self, address: str, expected: PeerId | None = None) -> PeerId:
        """Connect to ``HOST:PORT[/PEERID]``, learn who answers, and remember the address.

        Where ``expected`` is given the address may be that of its relay.

        Raises as the three verbs do; :class:`~protocols.errors.OperatorError` E102 for an address
        that does not parse.
        """
        where, wanted = normal(address), expected
        if not is_relayed(where):
            wanted = expected or parse_address(address).peer
        peer = await self._started(None).dial(where, wanted, 2 * self.limits.connect)
        if peer == self.peer_id:
            raise Unreachable(where, Why.SELF)
        self.book.succeeded(peer, where)
        return peer

    def post(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` soon on the thread that calls feeds and drains; not after the end."""
        self._reactor.post(callback)

    # --- relayed calls ------------------------------------------------------------------------

    def _dialled_at(self) -> list[str]:
        """Where this node can be dialled, unless its owner has told the relays otherwise."""
        if self._listening is None or self._listening[0] in ("0.0.0.0", "::"):
            return []
        return [hostport(*self._listening)]

    def _adopt(self, sock: socket.socket, caller: str) -> None:
        self._server.adopt(sock, caller)

    async def _expected(
        self, sock: socket.socket, said: bytes, bounded: Callable[[], None]
    ) -> bool:
        """A connection said for which call it is; returns whether somebody waited for it."""
        return self.relays.arrived(sock, said) or await self.relay.join(sock, said, bounded)

    def _silent(self, peer: PeerId, since: float) -> None:
        """Nothing came since then on a connection with ``peer`` that had worked before.

        Whatever has died without a word took others with it, of either kind: what has been idle
        for as long is dropped, so that none of it costs another call its time.
        """
        if self._client is not None and self._lanes is not None:
            self._client.drop_idle(peer, since)
            self._lanes.drop_idle(peer, since)

    def _started(self, peer: PeerId | None) -> HttpClient:
        if self._client is None:
            raise LocalProtocolError("the transport was not started")
        if peer == self.peer_id:
            raise Unreachable(self.peer_id, Why.SELF)
        return self._client

    def _laned(self, peer: PeerId) -> LaneClient:
        self._started(peer)
        assert self._lanes is not None
        return self._lanes


def _carried(link: Pacer, max_upload: float) -> float:
    """Bytes a second that relayed calls may take, by the limit and the measured link."""
    measured = max(CARRIED * link.speed, CARRIED_LEAST) if link.speed else math.inf
    return min(CARRIED * max_upload, measured)


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise LocalProtocolError(f"{name!r} cannot be a name: letters, digits and _ . : - only")
    return name
