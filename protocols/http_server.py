"""The listening side of the HTTP transport: one port, proven peers, bounded everything.

Names are looked up in dictionaries of what was registered; nothing of a request is ever a path.
What a handler raises reaches the caller as a code: no traceback and no text of an unexpected
exception leaves this machine.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from protocols.bodies import outgoing
from protocols.errors import (
    LocalProtocolError,
    Malformed,
    RemoteProtocolError,
    RemoteRefused,
    TransferStalled,
    TransportError,
)
from protocols.http_body import (
    ERROR_HEADER,
    MAX_ERROR_BYTES,
    PEER_HEADER,
    PROTOCOL,
    TOOK_HEADER,
    VERSION_HEADER,
    BodyReader,
    Limits,
    send_body,
)
from protocols.http_listener import Listener, proven_peer
from protocols.http_stats import TransportStats
from protocols.identity import PeerId, public_key
from protocols.transport import (
    MAX_HEADER_BYTES,
    CallHandler,
    PullHandler,
    PushHandler,
)

logger = logging.getLogger(__name__)

_STATUS = {"unknown": 404, "too_large": 413, "protocol": 400, "stalled": 408, "internal": 500}


@dataclass(frozen=True, slots=True)
class _Push:
    handler: PushHandler
    max_length: int


@dataclass(frozen=True, slots=True)
class _Call:
    handler: CallHandler
    max_body: int


class HttpServer:
    """Serves calls, pushes and pulls; :class:`protocols.http.HttpTransport` owns it."""

    def __init__(
        self,
        peer_id: PeerId,
        *,
        context: ssl.SSLContext | None,
        stats: TransportStats,
        limits: Limits,
    ) -> None:
        self._peer_id = peer_id
        self._context = context
        self._stats = stats
        self._limits = limits
        self.admits: Callable[[PeerId, str], bool] = lambda peer, name: True
        self._calls: dict[str, _Call] = {}
        self._pushes: dict[str, _Push] = {}
        self._pulls: dict[str, PullHandler] = {}
        self._listener = Listener(context, stats, limits)
        self._handlers: set[asyncio.Task[Any]] = set()
        self._running: asyncio.Task[None] | None = None
        self._web: web.Server | None = None

    # --- registration -------------------------------------------------------------------------

    def on_call(self, name: str, handler: CallHandler, max_body: int) -> None:
        self._calls[name] = _Call(handler, max_body)

    def on_push(self, name: str, handler: PushHandler, max_length: int) -> None:
        self._pushes[name] = _Push(handler, max_length)

    def on_pull(self, name: str, handler: PullHandler) -> None:
        self._pulls[name] = handler

    # --- connections --------------------------------------------------------------------------

    def start(self, listener: socket.socket) -> None:
        """Accept on a bound and listening socket, which from now on is ours to close."""
        self._web = web.Server(self._handle, handler_cancellation=True)
        self._running = asyncio.get_running_loop().create_task(
            self._listener.run(listener, self._web)
        )

    async def aclose(self) -> None:
        """Stop accepting, give handlers a moment, cancel them, close every connection."""
        if self._running is None or self._web is None:
            return
        self._web.pre_shutdown()
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=self._limits.grace)
        for task in self._handlers:
            task.cancel()
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=self._limits.grace)
        self._listener.drop_all()
        self._running.cancel()
        await asyncio.wait([self._running])
        await self._web.shutdown(0.1)
        self._running = None

    def drop(self, peer: PeerId) -> int:
        """Cut every connection of ``peer``; the number of them."""
        return self._listener.drop(peer)

    # --- requests -----------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            return await self._answer(request)
        except RemoteRefused as error:
            return self._refuse(request, error.code, error.detail)
        except RemoteProtocolError as error:
            return self._refuse(request, "protocol", str(error))
        except TransferStalled as error:
            self._stats.stalled_bodies += 1
            return self._refuse(request, "stalled", str(error))
        except (ConnectionError, TransportError) as error:
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError("the caller left") from error
            return self._refuse(request, "unreachable", "")
        except Exception:  # a bug in a handler: ours to log, none of the peer's business
            logger.exception("the handler of %s failed", request.rel_url.raw_path)
            return self._refuse(request, "internal", "")
        finally:
            self._handlers.discard(task)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        peer = self._peer(request)
        verb, _, name = request.rel_url.raw_path.removeprefix("/").partition("/")
        if request.method == "GET" and verb == "hello" and not name:
            return self._reply(b"", 0.0)
        if request.method != "POST":
            raise RemoteRefused("unknown", "not a name of ours")
        if request.headers.get("Content-Encoding"):
            raise RemoteRefused("protocol", "bodies travel as they are, without content coding")
        if request.content_length is None or "Transfer-Encoding" in request.headers:
            raise RemoteRefused("protocol", "the length of the body must be announced")
        if not self.admits(peer, name):
            raise RemoteRefused("stranger", "this node does not know you: greet it first")
        if verb == "call" and name in self._calls:
            return await self._serve_call(request, peer, name, self._calls[name])
        if verb == "push" and name in self._pushes:
            return await self._serve_push(request, peer, name, self._pushes[name])
        if verb == "pull" and name in self._pulls:
            return await self._serve_pull(request, peer, name, self._pulls[name])
        raise RemoteRefused("unknown", "nothing here answers to that name")

    async def _serve_call(
        self, request: web.BaseRequest, peer: PeerId, name: str, entry: _Call
    ) -> web.StreamResponse:
        body = await self._incoming(request, peer, name, entry.max_body).everything()
        started = time.perf_counter()
        reply = await entry.handler(peer, body)
        return self._count(peer, name, reply, started)

    async def _serve_push(
        self, request: web.BaseRequest, peer: PeerId, name: str, entry: _Push
    ) -> web.StreamResponse:
        limit = entry.max_length + MAX_HEADER_BYTES + 4
        body = self._incoming(request, peer, name, limit)
        header = await body.header()
        if body.length > entry.max_length:
            raise RemoteRefused("too_large", f"at most {entry.max_length} bytes")
        started = time.perf_counter()
        reply = await entry.handler(peer, header, body)
        response = self._count(peer, name, reply, started)
        if not body.complete:
            response.force_close()
        return response

    async def _serve_pull(
        self, request: web.BaseRequest, peer: PeerId, name: str, handler: PullHandler
    ) -> web.StreamResponse:
        header = await self._incoming(request, peer, name, MAX_HEADER_BYTES).everything()
        body = outgoing(await handler(peer, header))
        self._stats.requests_by_name[name] += 1
        response = web.StreamResponse(headers=self._headers())
        response.content_length = body.length
        response.content_type = "application/octet-stream"
        await response.prepare(request)

        async def write(piece: memoryview) -> None:
            try:
                async with asyncio.timeout(self._limits.stall):
                    await response.write(piece)
            except TimeoutError as error:
                raise TransferStalled(f"{peer}: does not take what it asked for") from error

        try:
            await send_body(body, write, lambda count: self._stats.sent(peer, name, count))
        except BaseException as error:
            # the length is announced, so the only way to say "broken" is to break the link
            if request.transport is not None:
                request.transport.abort()
            if isinstance(error, TransferStalled):
                self._stats.stalled_bodies += 1
            elif not isinstance(error, OSError | TransportError | asyncio.CancelledError):
                logger.exception("the body of %s failed", name)
            if isinstance(error, Exception):
                raise ConnectionResetError("the body was cut") from error
            raise
        return response

    def _incoming(
        self, request: web.BaseRequest, peer: PeerId, name: str, limit: int
    ) -> BodyReader:
        length = request.content_length or 0
        if length > limit:
            raise RemoteRefused("too_large", f"at most {limit} bytes")
        return BodyReader(
            request.content,
            length,
            peer,
            stall=self._limits.stall,
            min_rate=self._limits.min_rate,
            on_bytes=lambda count: self._stats.received(peer, name, count),
        )

    def _peer(self, request: web.BaseRequest) -> PeerId:
        if request.transport is None:
            raise ConnectionResetError("the caller left")
        if self._context is not None:
            proven = proven_peer(request.transport)
            if proven is None:
                raise LocalProtocolError("a request came in without a proven identity")
            return proven
        claimed = PeerId(request.headers.get(PEER_HEADER, ""))
        links = self._listener.links
        known = links.get(request.transport)
        if known is None:
            public_key(claimed)  # raises Malformed
            if request.transport in links:
                links[request.transport] = claimed
        elif known != claimed:
            raise Malformed("the identity changed within a connection")
        return claimed

    def _headers(self) -> dict[str, str]:
        headers = {VERSION_HEADER: PROTOCOL}
        if self._context is None:
            headers[PEER_HEADER] = self._peer_id
        return headers

    def _reply(self, body: bytes, took: float) -> web.Response:
        headers = self._headers() | {TOOK_HEADER: str(int(took * 1e6))}
        return web.Response(body=body, headers=headers)

    def _count(self, peer: PeerId, name: str, reply: bytes, started: float) -> web.Response:
        self._stats.requests_by_name[name] += 1
        self._stats.sent(peer, name, len(reply))
        return self._reply(reply, time.perf_counter() - started)

    def _refuse(self, request: web.BaseRequest, code: str, detail: str) -> web.Response:
        self._stats.refused_requests += 1
        headers = self._headers() | {ERROR_HEADER: _word(code)}
        text = detail.encode(errors="replace")[:MAX_ERROR_BYTES]
        response = web.Response(status=_STATUS.get(code, 409), body=text, headers=headers)
        if not request.content.is_eof():  # the rest of the body is not wanted
            response.force_close()
        return response


def _word(code: str) -> str:
    return "".join(c for c in code if c.isascii() and (c.isalnum() or c in "_-."))[:64] or "refused"
