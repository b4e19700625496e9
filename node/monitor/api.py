"""The node's web API: read-only, on a listener of its own, by default on loopback.

========================  ==================================================================
``GET /api/v1/state``     the whole state (:meth:`~node.monitor.state.NodeState.snapshot`)
``GET /api/v1/events``    ``?since=SEQ&limit=N``: the events after that number
``GET /healthz``          200 when healthy, else 503; the reasons only with the key
``GET /metrics``          for Prometheus
``GET /`` and others      the dashboard, see :mod:`node.monitor.dashboard`
========================  ==================================================================

A request must name an IP address or ``localhost`` as its host, so that a web page cannot reach
the API through a host name of its own (DNS rebinding); there are no CORS headers. On any
other address than loopback there is a key, as ``Authorization: Bearer KEY``; without it one gets
the dashboard's page, which holds nothing, and whether the node is healthy. Where connections are
too many, the oldest of those makes way on which nobody has shown the key, closed or not: what
nobody takes keeps a closed one open.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakSet

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from node.monitor.answers import Answer, json_response
from node.monitor.dashboard import STATE, add_dashboard, is_open
from node.monitor.event_log import EventLog
from node.monitor.history import History
from node.monitor.metrics import CONTENT_TYPE, exposition, registry
from node.monitor.state import NodeState
from node.setting_values import host_port
from protocols.addresses import hostport
from protocols.connections.sockets import open_listener
from protocols.errors import OperatorError

MAX_EVENTS = 500  # of one answer
MAX_CONNECTIONS = 256  # of one listener: strangers must not use up the process's descriptors
IDLE_S = 60.0  # without a whole request a connection is closed
_MAX_SEQ = 2**53
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_LOG = logging.getLogger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LOG: web.AppKey[EventLog] = web.AppKey("log", EventLog)
KNOWN: web.AppKey[WeakSet[asyncio.Transport]] = web.AppKey("known")
"""The connections with a request that was let in: with the key, where one is asked for."""


def make_app(
    state: NodeState,
    log: EventLog,
    history: History,
    *,
    key: str = "",
    host: str = "",
) -> web.Application:
    """The application; ``host`` is an own name of the listener, ``key`` empty asks for none."""
    app = web.Application(middlewares=[_guard(key, host)], client_max_size=1024)
    app[KNOWN] = WeakSet()
    app.on_response_prepare.append(_add_headers)
    app[LOG] = log
    metrics = registry(state)

    async def scrape(request: web.Request) -> web.Response:
        return Answer(body=exposition(metrics), headers={"Content-Type": CONTENT_TYPE})

    async def healthz(request: web.Request) -> web.Response:
        reasons = state.unhealthy()
        answer: dict[str, Any] = {"healthy": not reasons}
        if not key or _has_key(request, key):  # they hold texts of errors, and paths
            answer["reasons"] = reasons
        return json_response(answer, 503 if reasons else 200)

    app.router.add_get("/api/v1/state", _state)
    app.router.add_get("/api/v1/events", _events)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/metrics", scrape)
    add_dashboard(app, state, log, history)
    return app


def _is_ours(record: logging.LogRecord) -> bool:
    """No traceback of ours is in what a stranger sends that is no HTTP; it is answered by 400."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_LOG.addFilter(_is_ours)


class ApiServer:
    """The listener of the API."""

    def __init__(
        self, app: web.Application, address: str, *, may_move: bool = False, option: str = "--api"
    ) -> None:
        """``may_move``: take any free port where the one in ``address`` is in use.

        ``option`` is where the operator has said ``address``.
        """
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        self._known = app[KNOWN]
        self._links: dict[asyncio.Transport, None] = {}  # all that are open, the oldest first
        self._listening: asyncio.Server | None = None
        self._wanted = address
        self._may_move = may_move
        self._option = option
        self.address = ""  # HOST:PORT once started

    async def start(self) -> str:
        """Listen; returns ``HOST:PORT``, raises E303 if the port is taken."""
        try:
            listener = await open_listener(self._wanted, self._option)
        except OperatorError as error:
            if error.code != "E303" or not self._may_move:
                raise
            host, _ = host_port(self._wanted)
            listener = await open_listener(hostport(host, 0), self._option)
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._protocol, sock=listener)
        self.address = hostport(host_port(self._wanted)[0], listener.getsockname()[1])
        return self.address

    async def aclose(self) -> None:
        """Stop listening and end open answers."""
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()

    def _protocol(self) -> asyncio.BaseProtocol:
        """What speaks to one more connection."""
        server = self._runner.server
        if server is None or not self._has_room():
            return _Refused()
        options = {"access_log": None, "logger": _LOG, "keepalive_timeout": IDLE_S}
        return _Http(server, self._links, **options)

    def _has_room(self) -> bool:
        """Whether there may be one more; the oldest strangers are cut for it.

        Else who has no key could keep out those who have it, by asking for the page now and then.
        """
        strangers = [link for link in self._links if link not in self._known]
        more = len(self._links) - MAX_CONNECTIONS + 1
        for link in strangers[: max(more, 0)]:
            del self._links[link]
            link.abort()
        return more <= len(strangers)


class _Http(web.RequestHandler):
    """HTTP on one connection, which is among ``links`` until the last byte for it is gone.

    aiohttp forgets one that it closes; where nobody takes what is left, it stays open.
    """

    def __init__(
        self, server: web.Server, links: dict[asyncio.Transport, None], **kwargs: Any
    ) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **kwargs)
        self._links = links

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._link = transport
        self._links[transport] = None
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._links.pop(self._link, None)
        super().connection_lost(exc)


class _Refused(asyncio.Protocol):
    """Closes a connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _guard(key: str, host: str) -> Any:
    own_names = {"localhost", host.lower()} - {""}

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        # not request.host: where a request names none, which no browser does, aiohttp may look
        # this machine's own name up, in the event loop
        if not _own_host(request.headers.get("Host", "localhost"), own_names):
            return _error(403, "ask by IP address or as localhost, not by another name")
        if request.method not in ("GET", "HEAD"):
            return _error(405, "this API is read-only", {"Allow": "GET, HEAD"})
        open_to_all = request.path == "/healthz" or is_open(request.path)
        if not key or _has_key(request, key):
            if request.transport is not None:
                request.app[KNOWN].add(request.transport)
        elif not open_to_all:
            return _error(401, "give the key as Authorization: Bearer KEY")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _error(error.status, error.reason)

    return guard


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)


def _own_host(header: str, own_names: set[str]) -> bool:
    name, _, port = header.rpartition(":")
    if not port.isdigit():
        name = header
    name = name.strip("[]").lower()
    if name in own_names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _has_key(request: web.Request, key: str) -> bool:
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return hmac.compare_digest(given.encode(errors="replace"), key.encode())


def _error(status: int, reason: str, headers: dict[str, str] | None = None) -> web.Response:
    response = json_response({"error": reason}, status)
    response.headers.update(headers or {})
    return response


async def _state(request: web.Request) -> web.Response:
    return json_response(request.app[STATE].snapshot())


async def _events(request: web.Request) -> web.Response:
    log = request.app[LOG]
    try:
        since = _natural(request.query.get("since", "0"))
        limit = _natural(request.query.get("limit", str(MAX_EVENTS)))
    except ValueError as error:
        return json_response({"error": str(error)}, 400)
    records = log.since(since, min(limit, MAX_EVENTS))
    return json_response(
        {
            "instance": log.instance,
            "next": records[-1].seq if records else since,
            "events": [record.plain() for record in records],
        }
    )


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 16 or int(text) > _MAX_SEQ:
        raise ValueError("since and limit are whole numbers")
    return int(text)
