"""The listening side of the HTTP transport: one port, proven peers, bounded everything.

Names are looked up in dictionaries of what was registered (:mod:`protocols.handlers`); nothing of
a request is ever a path. HTTP carries calls only; long bodies have :mod:`protocols.lanes.server`.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

from protocols.connections.accepted import Connection
from protocols.errors import (
    LocalProtocolError,
    Malformed,
    RemoteRefused,
    TransportError,
)
from protocols.handlers import Handlers, refusal
from protocols.http.body import (
    ERROR_HEADER,
    MAX_ERROR_BYTES,
    PEER_HEADER,
    PROTOCOL,
    TOOK_HEADER,
    VERSION_HEADER,
    read_body,
)
from protocols.http.listener import Listener, connection_of, proven_peer
from protocols.identity import PeerId, public_key
from protocols.lanes.server import LaneServer
from protocols.limits import Limits
from protocols.stats import TransportStats
from protocols.tasks import Background

_PIECE = 16 * 1024  # of an answer: a record of TLS
_STATUS = {"unknown": 404, "too_large": 413, "protocol": 400, "stalled": 408, "internal": 500}


class HttpServer:
    """Serves calls, and lets lanes in; :class:`protocols.http.transport.HttpTransport` owns it."""

    def __init__(
        self,
        peer_id: PeerId,
        *,
        handlers: Handlers,
        lanes: LaneServer,
        context: ssl.SSLContext | None,
        stats: TransportStats,
        limits: Limits,
        on_sent: Callable[[int], None],
        expected: Callable[[socket.socket, bytes, Callable[[], None]], Awaitable[bool]],
    ) -> None:
        self._peer_id = peer_id
        self._context = context
        self._stats = stats
        self._limits = limits
        self._handlers = handlers
        self._lanes = lanes
        self._on_sent = on_sent
        self._listener = Listener(
            lanes, context, stats, limits, expected, lambda peer: handlers.admits(peer, "")
        )
        self._serving: set[asyncio.Task[Any]] = set()
        self._accepting = Background()
        self._web: web.Server | None = None

    # --- connections --------------------------------------------------------------------------

    def start(self, listeners: Sequence[socket.socket]) -> None:
        """Accept on bound and listening sockets, which from now on are ours to close."""
        self._web = web.Server(self._handle, handler_cancellation=True)
        self._accepting.spawn(self._listener.run(listeners, self._web))

    def adopt(self, sock: socket.socket, caller: str) -> None:
        """Serve a connection that this node has dialled because ``caller`` called it."""
        self._listener.adopt(sock, caller)

    async def aclose(self) -> None:
        """Stop accepting, give handlers a moment, cancel them, close every connection."""
        if self._web is None:
            return
        self._web.pre_shutdown()
        await self._wait_for_handlers()
        for task in self._serving | self._lanes.serving:
            task.cancel()
        await self._wait_for_handlers()
        self._listener.drop_all()
        await self._accepting.aclose()
        await self._web.shutdown(0.1)
        self._web = None

    async def _wait_for_handlers(self) -> None:
        serving = self._serving | self._lanes.serving
        if serving:
            await asyncio.wait(serving, timeout=self._limits.grace)

    def observed(self, peer: PeerId) -> str:
        """``HOST:PORT`` from which ``peer`` is connected, as seen here; empty where it is not."""
        return self._listener.observed(peer)

    # --- requests -----------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            with connection_of(request).serving():
                return await self._answer(request)
        except Exception as error:  # a handler may raise anything; the caller gets a code
            left = request.transport is None or request.transport.is_closing()
            if left and isinstance(error, ConnectionError | TransportError):
                raise ConnectionResetError("the caller left") from error
            refused = refusal(error, request.rel_url.raw_path)
            self._stats.stalled_bodies += refused.code == "stalled"
            return self._refuse(request, refused.code, refused.detail)
        finally:
            self._serving.discard(task)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        peer = self._peer(request)
        verb, _, name = request.rel_url.raw_path.removeprefix("/").partition("/")
        if request.method == "GET" and verb == "hello" and not name:
            return self._reply(request, b"", 0.0)
        if request.method != "POST":
            raise RemoteRefused("unknown", "not a name of ours")
        if request.headers.get("Content-Encoding"):
            raise RemoteRefused("protocol", "bodies travel as they are, without content coding")
        if request.content_length is None or "Transfer-Encoding" in request.headers:
            raise RemoteRefused("protocol", "the length of the body must be announced")
        if verb != "call":
            raise RemoteRefused("unknown", "not a name of ours")
        handler, max_body = self._handlers.call(peer, name)
        if request.content_length > max_body:
            raise RemoteRefused("too_large", f"at most {max_body} bytes")
        body = await read_body(
            request.content,
            request.content_length,
            peer,
            stall=self._limits.stall,
            min_rate=self._limits.min_rate,
            on_bytes=partial(self._came, connection_of(request), peer, name),
        )
        started = time.perf_counter()
        reply = await handler(peer, body)
        self._stats.requests_by_name[name] += 1
        self._stats.sent(peer, name, len(reply))
        self._on_sent(len(reply))
        return self._reply(request, reply, time.perf_counter() - started)

    def _came(self, connection: Connection, peer: PeerId, name: str, count: int) -> None:
        self._stats.received(peer, name, count)
        connection.holds(count)

    def _peer(self, request: web.BaseRequest) -> PeerId:
        if request.transport is None:
            raise ConnectionResetError("the caller left")
        if self._context is not None:
            proven = proven_peer(request.transport)
            if proven is None:
                raise LocalProtocolError("a request came in without a proven identity")
            return proven
        claimed = PeerId(request.headers.get(PEER_HEADER, ""))
        connection = connection_of(request)
        if connection.peer is None:
            public_key(claimed)  # raises Malformed
            connection.proven(claimed)
        elif connection.peer != claimed:
            raise Malformed("the identity changed within a connection")
        return claimed

    def _headers(self) -> dict[str, str]:
        headers = {VERSION_HEADER: PROTOCOL}
        if self._context is None:
            headers[PEER_HEADER] = self._peer_id
        return headers

    def _reply(self, request: web.BaseRequest, body: bytes, took: float) -> web.Response:
        headers = self._headers() | {TOOK_HEADER: str(int(took * 1e6))}
        return self._response(request, 200, body, headers)

    def _refuse(self, request: web.BaseRequest, code: str, detail: str) -> web.Response:
        self._stats.refused_requests += 1
        headers = self._headers() | {ERROR_HEADER: _word(code)}
        text = detail.encode(errors="replace")[:MAX_ERROR_BYTES]
        response = self._response(request, _STATUS.get(code, 409), text, headers)
        if not request.content.is_eof():  # the rest of the body is not wanted
            response.force_close()
        return response

    def _response(
        self, request: web.BaseRequest, status: int, body: bytes, headers: dict[str, str]
    ) -> web.Response:
        seconds = max(self._limits.stall, len(body) / self._limits.min_rate)
        give_up = partial(self._give_up, request.transport)
        connection = connection_of(request)
        return _Response(body, seconds, give_up, connection, status=status, headers=headers)

    def _give_up(self, transport: asyncio.Transport | None) -> None:
        self._stats.stalled_bodies += 1
        if transport is not None:
            transport.abort()


class _Pieces(Payload):
    """The body of an answer. aiohttp would hand it to TLS at once, which takes a copy of all."""

    def __init__(self, body: bytes, taken: Callable[[], None]) -> None:
        super().__init__(body)
        self._size = len(body)
        self._taken = taken

    async def write(self, writer: AbstractStreamWriter) -> None:
        body = memoryview(self._value)
        for begin in range(0, len(body), _PIECE):
            await writer.write(body[begin : begin + _PIECE])
            await writer.drain()
            self._taken()

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        text: str = self._value.decode(encoding, errors)
        return text


class _Response(web.Response):
    """An answer that the caller has to take within ``seconds``: aiohttp would wait for ever."""

    def __init__(
        self,
        body: bytes,
        seconds: float,
        give_up: Callable[[], None],
        connection: Connection,
        **parts: Any,
    ) -> None:
        super().__init__(body=_Pieces(body, connection.taken), **parts)
        self._length = len(body)
        self._seconds = seconds
        self._give_up = give_up
        self._connection = connection

    async def write_eof(self, data: bytes = b"") -> None:
        try:
            with self._connection.serving():
                self._connection.answer(self._length)
                async with asyncio.timeout(self._seconds):
                    await super().write_eof(data)
        except TimeoutError as error:
            self._give_up()
            raise ConnectionResetError("the caller does not take its answer") from error


def _word(code: str) -> str:
    return "".join(c for c in code if c.isascii() and (c.isalnum() or c in "_-."))[:64] or "refused"
