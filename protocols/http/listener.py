"""Accepting connections on the one port: counted, bounded, and proven or refused.

The first byte says what a connection is for: HTTP, a lane (:mod:`protocols.lanes.wire`), a relayed
call (:mod:`protocols.relay.wire`) or a question for the caller's own address
(:mod:`protocols.seen`). One that sends none in time is cut.

``loop.create_server`` hides what happens before a connection is ready. So connections are
accepted here: they are counted per address before TLS begins, failed handshakes are told apart,
and each has a task of its own from its first byte to its last. Where there are too many in all,
:mod:`protocols.connections.accepted` says which one makes way. A handshake costs this node more
than who begins it, so an address may begin only so many a second, and as many for lanes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from protocols.addresses import hostport, ip_of, source_of
from protocols.connections.accepted import Connection, Connections
from protocols.connections.same_machine import is_near
from protocols.connections.sockets import first_byte, prefer_small_queue
from protocols.errors import Malformed
from protocols.http.body import PROTOCOL, VERSION_HEADER
from protocols.identity import PeerId
from protocols.lanes.server import LaneServer
from protocols.lanes.wire import MARK
from protocols.limits import Limits
from protocols.rate_limit import RateLimit
from protocols.relay.wire import MARK as CALL_MARK
from protocols.relay.wire import introduced
from protocols.seen import MARK as SEEN_MARK
from protocols.seen import tell
from protocols.stats import TransportStats

logger = logging.getLogger(__name__)

_MAX_LINE = 512  # of a request line and of a header field; ours are below 200
_MAX_FIELDS = 24
_HANDSHAKES = (50.0, 1000.0)  # of one address a second, and at once: each is 1 ms of a core
_TLS_BUFFER = 32 * 1024  # two records; calls are short, and long bodies have lanes
_THIS_MACHINE = "this machine"  # the source that connections past TCP are counted under
_REFUSED_REASONS = frozenset(
    {
        "PEER_DID_NOT_RETURN_A_CERTIFICATE",
        "CERTIFICATE_VERIFY_FAILED",
        "UNSUPPORTED_PROTOCOL",
        "NO_SHARED_CIPHER",
        "BAD_SIGNATURE",
    }
)


class _Http(web.RequestHandler):
    """HTTP on one connection. Bytes that are not HTTP are counted and answered with 400."""

    def __init__(
        self, manager: web.Server, connection: Connection, stats: TransportStats, **kwargs: Any
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(manager, loop=loop, **kwargs)
        self.connection = connection
        self._stats = stats
        self.lost: asyncio.Future[None] = loop.create_future()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if not self.lost.done():
            self.lost.set_result(None)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        self._stats.garbage_connections += 1
        response = web.Response(status=400, headers={VERSION_HEADER: PROTOCOL})
        response.force_close()
        return response


class Listener:
    """Accepts on the sockets of :meth:`run`; ``links`` has the open connections that speak HTTP."""

    def __init__(
        self,
        lanes: LaneServer,
        context: ssl.SSLContext | None,
        stats: TransportStats,
        limits: Limits,
        expected: Callable[[socket.socket, bytes, Callable[[], None]], Awaitable[bool]],
        admitted: Callable[[PeerId], bool],
    ) -> None:
        self._expected = expected
        self._group: asyncio.TaskGroup | None = None
        self.links: dict[asyncio.Transport, Connection] = {}
        self._lanes = lanes
        self._context = context
        self._stats = stats
        self._limits = limits
        self._connections = Connections(limits, stats, admitted)
        self._handshakes = RateLimit(*_HANDSHAKES)
        self._of_lanes = RateLimit(*_HANDSHAKES)  # their own: calls must not wait for lanes
        _keep_tls_small()
        self._server: web.Server | None = None

    def observed(self, peer: PeerId) -> str:
        """The address from which ``peer`` holds its newest connection; empty where it has none.

        One that this node has dialled for it does not count: it may lead to a relay.
        """
        for link, connection in reversed(self.links.items()):
            if connection.peer != peer or link.is_closing():  # a closed one tells nothing any more
                continue
            if connection.dialled:
                continue
            if address := link.get_extra_info("peername"):
                return hostport(str(ip_of(address[0])), address[1])
        return ""

    def drop_all(self) -> None:
        """Cut every connection."""
        for link in list(self.links):
            link.abort()

    async def run(self, listeners: Sequence[socket.socket], server: web.Server) -> None:
        """Accept until cancelled; then close the sockets and every connection."""
        with contextlib.ExitStack() as open_sockets:
            for listener in listeners:
                open_sockets.enter_context(listener)
            async with asyncio.TaskGroup() as group:
                self._group, self._server = group, server
                try:
                    for listener in listeners:
                        group.create_task(self._accept(listener, group, server))
                    await asyncio.get_running_loop().create_future()  # until cancelled
                finally:
                    self._group = None

    async def _accept(
        self, listener: socket.socket, group: asyncio.TaskGroup, server: web.Server
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or the stranger left already
                logger.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            source = _THIS_MACHINE if is_near(sock) else source_of(address[0])
            self._take(group, sock, source, server)
            await asyncio.sleep(0)  # a flood of connections must not hold the loop

    def adopt(self, sock: socket.socket, caller: str) -> None:
        """Serve a connection that this node has dialled because ``caller`` called it."""
        if self._group is None or self._server is None:
            sock.close()
            return
        self._take(self._group, sock, caller, self._server, dialled=True)

    def _take(
        self,
        group: asyncio.TaskGroup,
        sock: socket.socket,
        source: str,
        server: web.Server,
        *,
        dialled: bool = False,
    ) -> None:
        """Serve a connection, unless there are too many, of all or of its source."""
        connection = self._connections.open(source)
        if connection is None:
            sock.close()
        else:
            connection.dialled = dialled
            connection.cut = sock.close  # a task cancelled before it begins closes nothing
            group.create_task(self._serve(sock, connection, server))

    async def _serve(self, sock: socket.socket, connection: Connection, server: web.Server) -> None:
        """One connection from accept to end."""
        source, task = connection.source, asyncio.current_task()
        assert task is not None
        connection.cut = task.cancel
        try:
            mark = await self._mark(sock)
            if mark == MARK:
                if is_near(sock) or self._may_begin(self._of_lanes, sock, source):
                    await self._lanes.serve(sock, connection)
            elif not mark or is_near(sock):  # only lanes come past TCP
                sock.close()
                self._stats.garbage_connections += 1
            elif mark == CALL_MARK:
                await self._bring(sock, connection)
            elif mark == SEEN_MARK:
                await tell(sock)
            else:
                await self._serve_http(sock, connection, server)
        except ssl.SSLError as error:
            if isinstance(error, ssl.SSLCertVerificationError) or error.reason in _REFUSED_REASONS:
                self._stats.refused_handshakes += 1
            else:
                self._stats.garbage_connections += 1
            logger.debug("handshake of %s: %s", source, error)
        except (OSError, Malformed) as error:  # left or stalled in the middle of the handshake
            self._stats.garbage_connections += 1
            logger.debug("handshake of %s: %s", source, error)
        except Exception:  # whatever one stranger's connection does must not end the server
            logger.exception("the connection of %s failed", source)
        finally:
            connection.ended()

    async def _bring(self, sock: socket.socket, connection: Connection) -> None:
        """Hand the connection of a relayed call to whoever waits, here or beyond the relay."""
        handed_on = False
        try:
            async with asyncio.timeout(self._limits.handshake):
                said = await introduced(sock)
            handed_on = await self._expected(sock, said, connection.expected)
            if not handed_on:
                raise Malformed("nobody waits for this call")
        finally:
            if not handed_on:
                sock.close()

    async def _mark(self, sock: socket.socket) -> bytes:
        """The first byte, within the time for a handshake; the socket is closed if none comes."""
        mark = b""
        try:
            async with asyncio.timeout(self._limits.handshake):
                mark = await first_byte(sock)
        finally:
            if not mark:
                sock.close()
        return mark

    def _may_begin(self, handshakes: RateLimit, sock: socket.socket, source: str) -> bool:
        """Whether an address may begin one more; the socket is closed if not."""
        if self._context is None or handshakes.take(source):
            return True
        self._stats.capped_connections += 1
        sock.close()
        return False

    async def _serve_http(
        self, sock: socket.socket, connection: Connection, server: web.Server
    ) -> None:
        loop = asyncio.get_running_loop()
        if not self._may_begin(self._handshakes, sock, connection.source):
            return
        transport, protocol = await loop.connect_accepted_socket(
            lambda: self._http(server, connection),
            sock,
            ssl=self._context,
            ssl_handshake_timeout=self._limits.handshake if self._context else None,
            ssl_shutdown_timeout=self._limits.grace if self._context else None,
        )
        self._stats.connections += 1
        self.links[transport] = connection
        if (peer := proven_peer(transport)) is not None:
            connection.proven(peer)
        prefer_small_queue(transport)
        transport.set_write_buffer_limits(1)  # else TLS takes half a megabyte that is not sent
        try:
            await asyncio.shield(protocol.lost)
        finally:
            transport.abort()
            del self.links[transport]

    def _http(self, server: web.Server, connection: Connection) -> _Http:
        return _Http(
            server,
            connection,
            self._stats,
            keepalive_timeout=self._limits.idle_server,
            max_line_size=_MAX_LINE,
            max_field_size=_MAX_LINE,
            max_headers=_MAX_FIELDS,
            auto_decompress=False,
            lingering_time=self._limits.linger,
            access_log=None,
        )


def _keep_tls_small() -> None:
    """Have asyncio take less for each TLS connection of this process than a quarter of a MB.

    It takes that before the other end has proven anything. The attribute is none of its API: where
    it is missing all works as well, with more memory.
    """
    if getattr(SSLProtocol, "max_size", 0) > _TLS_BUFFER:
        SSLProtocol.max_size = _TLS_BUFFER


def connection_of(request: web.BaseRequest) -> Connection:
    """The connection that a request has come on."""
    assert isinstance(request.protocol, _Http)
    return request.protocol.connection


def proven_peer(transport: asyncio.BaseTransport) -> PeerId | None:
    """Who proved itself on a connection; None where there is no TLS."""
    peer: PeerId | None = getattr(transport.get_extra_info("ssl_object"), "peer_id", None)
    return peer
