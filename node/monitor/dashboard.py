"""The dashboard: its page, what it is drawn from, and a stream of what changes.

=============================  =================================================================
``GET /``, ``/static/NAME``    the page, its script and style; nothing in it is secret
``GET /api/v1/dashboard``      all that the page needs to draw itself once
``GET /api/v1/history``        ``?points=N&last=ROUNDS``: the run's rows, see node.monitor.history
``GET /api/v1/links``          who reaches whom how fast, as all islands tell it
``GET /api/v1/stream``         server-sent events, at most one a second
=============================  =================================================================

The stream's events are ``update`` (the state of now, and the rounds and events since the
last one) and ``restart`` (too much was missed: ask ``/api/v1/dashboard`` again). Each ``update``
has an id; a reader that comes back with it as ``Last-Event-ID``, or ``?since=ID`` the first time,
misses nothing. (Server-sent events: HTML Living Standard, section 9.2.)
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from aiohttp import web

from node.monitor.answers import STUCK_S, Answer, encoded, json_response
from node.monitor.event_log import KEPT_IN_MEMORY, EventLog
from node.monitor.events import RoundDone, Step
from node.monitor.history import History
from node.monitor.state import NodeState
from protocols.addresses import is_loopback

INTERVAL_S = 1.0  # between two updates
LINKS_S = 2.0  # between two looks at all links
RETRY_MS = 2000  # what a reader is told to wait before it comes back
MAX_READERS = 64  # of one listener
SHOWN_ROUNDS = 16
SHOWN_EVENTS = 80
POINTS = 360
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
STATIC = {
    "app.js": "text/javascript",
    "charts.js": "text/javascript",
    "links.js": "text/javascript",
    "panels.js": "text/javascript",
    "peers.js": "text/javascript",
    "rounds.js": "text/javascript",
    "stream.js": "text/javascript",
    "text.js": "text/javascript",
    "uplot.js": "text/javascript",
    "uplot.css": "text/css",
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
}

_CURSOR = re.compile(r"([0-9a-f]{1,32})\.(\d{1,15})\.(\d{1,15})")


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a reader has come: numbers of the event log and the history of one process."""

    instance: str
    seq: int
    added: int

    def __str__(self) -> str:
        return f"{self.instance}.{self.seq}.{self.added}"

    @classmethod
    def parse(cls, text: str) -> Cursor | None:
        """The cursor in an id; None if it is none."""
        found = _CURSOR.fullmatch(text)
        return cls(found[1], int(found[2]), int(found[3])) if found else None


class Feed:
    """Makes the first picture and the updates; the state is put into words once for all readers."""

    def __init__(
        self,
        state: NodeState,
        log: EventLog,
        history: History,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.readers = 0
        self.closing = asyncio.Event()
        self._state, self._log, self._history, self._clock = state, log, history, clock
        self._encoded = b""
        self._made_at = float("-inf")
        self._links: dict[str, Any] = {}
        self._looked_at = float("-inf")

    def cursor(self) -> Cursor:
        """Where a reader stands who has just got everything."""
        newest = self._log.recent[-1].seq if self._log.recent else 0
        return Cursor(self._log.instance, newest, self._history.added)

    def picture(self, points: int) -> dict[str, Any]:
        """All that the page needs to draw itself once."""
        state = self._brief()
        if self._state.run is not None:
            state["run"]["manifest"] = dict(self._state.run.manifest)
        shown = [r for r in self._log.recent if not isinstance(r.event, Step | RoundDone)]
        return {
            "cursor": str(self.cursor()),
            "state": state,
            "history": self._history.columns(points),
            "rounds": self._state.rounds.plain(SHOWN_ROUNDS),
            "events": [record.plain() for record in shown[-SHOWN_EVENTS:]],
        }

    def links(self) -> dict[str, Any]:
        """As :meth:`NodeState.links`, for all readers of :data:`LINKS_S`: there may be many."""
        if (now := self._clock()) - self._looked_at >= LINKS_S:
            self._looked_at, self._links = now, self._state.links()
        return self._links

    def update(self, cursor: Cursor) -> tuple[Cursor, bytes]:
        """The event for a reader who stands at ``cursor``, and where it stands then."""
        here = self.cursor()
        records = self._log.since(cursor.seq, KEPT_IN_MEMORY)
        rows = self._history.since(cursor.added)
        whole = here.seq - cursor.seq == len(records)
        if cursor.instance != here.instance or not whole or rows is None:
            return here, b"event: restart\ndata: {}\n\n"
        done = sum(isinstance(record.event, RoundDone) for record in records)  # of all fragments
        rounds = self._state.rounds.plain(min(done, SHOWN_ROUNDS)) if done else []
        shown = [r for r in records if not isinstance(r.event, Step | RoundDone)]
        news = encoded(
            {
                "rows": rows,
                "rounds": rounds,
                "events": [record.plain() for record in shown[-SHOWN_EVENTS:]],
            }
        )
        head = f"event: update\nid: {here}\ndata: ".encode()
        return here, head + b'{"state":' + self._encoded_state() + b"," + news[1:] + b"\n\n"

    def _encoded_state(self) -> bytes:
        if (now := self._clock()) - self._made_at >= INTERVAL_S:
            self._made_at, self._encoded = now, encoded(self._brief())
        return self._encoded

    def _brief(self) -> dict[str, Any]:
        state = self._state.brief()
        for peer in state["peers"]:
            peer["merged_tokens"] = self._history.totals.get(peer["peer"], 0)
        state["merged_tokens"] = sum(self._history.totals.values())  # of those who are gone as well
        return state


FEED: web.AppKey[Feed] = web.AppKey("feed", Feed)
HISTORY: web.AppKey[History] = web.AppKey("history", History)
STATE: web.AppKey[NodeState] = web.AppKey("state", NodeState)


def add_dashboard(app: web.Application, state: NodeState, log: EventLog, history: History) -> None:
    """Add the routes above to the application of the API."""
    app[FEED] = Feed(state, log, history)
    app[HISTORY] = history
    app[STATE] = state
    app.on_shutdown.append(_close)
    app.router.add_get("/", _static)
    app.router.add_get("/static/{name}", _static)
    app.router.add_get("/api/v1/dashboard", _picture)
    app.router.add_get("/api/v1/history", _history)
    app.router.add_get("/api/v1/links", _links)
    app.router.add_get("/api/v1/stream", _stream, allow_head=False)  # it would have no end


def is_open(path: str) -> bool:
    """Whether a path is served without a key: the page itself, which holds nothing secret."""
    return path == "/" or path.startswith("/static/")


async def _close(app: web.Application) -> None:
    app[FEED].closing.set()


async def _static(request: web.Request) -> web.StreamResponse:
    name = request.match_info.get("name", "index.html")
    if name != "index.html" and name not in STATIC:
        raise web.HTTPNotFound
    asset = load(name)
    headers = {"ETag": f'"{asset.tag}"', "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if name == "index.html":
        headers["Content-Security-Policy"] = POLICY
    if asset.tag in {tag.value for tag in request.if_none_match or ()}:
        return Answer(status=304, headers=headers)
    body = asset.body
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        body, headers["Content-Encoding"] = asset.packed, "gzip"
    kind = STATIC.get(name, "text/html")
    return Answer(body=body, headers=headers, content_type=kind, charset="utf-8")


@dataclass(frozen=True)
class Asset:
    """A file of the page, as it is and compressed."""

    body: bytes
    packed: bytes
    tag: str


@cache
def load(name: str) -> Asset:
    """One of the page's files."""
    body = files("node.monitor").joinpath("web", name).read_bytes()
    return Asset(body, gzip.compress(body, mtime=0), hashlib.sha256(body).hexdigest()[:16])


async def _picture(request: web.Request) -> web.Response:
    picture = request.app[FEED].picture(_natural(request, "points", POINTS))
    return _json(request, picture)


async def _history(request: web.Request) -> web.Response:
    points, last = _natural(request, "points", POINTS), _natural(request, "last", 0)
    return _json(request, request.app[HISTORY].columns(points, last=last))


async def _links(request: web.Request) -> web.Response:
    return _json(request, request.app[FEED].links())


async def _stream(request: web.Request) -> web.StreamResponse:
    feed = request.app[FEED]
    if feed.readers >= MAX_READERS:
        raise web.HTTPServiceUnavailable(reason="too many are watching this node")
    given = request.headers.get("Last-Event-ID") or request.query.get("since", "")
    cursor = Cursor.parse(given) or (feed.cursor() if not given else Cursor("", 0, 0))
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
    )
    feed.readers += 1
    try:
        await response.prepare(request)
        await response.write(f"retry: {RETRY_MS}\n\n".encode())
        while not feed.closing.is_set():
            cursor, event = feed.update(cursor)
            async with asyncio.timeout(STUCK_S):
                await response.write(event)  # waits for a slow reader, who then gets fewer
            try:
                await asyncio.wait_for(feed.closing.wait(), INTERVAL_S)
            except TimeoutError:
                continue
    except TimeoutError:  # it reads no more, and others may want its place
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:  # the reader has gone
        return response
    finally:
        feed.readers -= 1
    return response


def _natural(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise web.HTTPBadRequest(reason=f"{name} is a whole number")
    return int(text)


def _json(request: web.Request, value: Any) -> web.Response:
    response = json_response(value)
    if not is_loopback(request.remote or ""):  # there it would cost more time than it saves
        response.enable_compression()
    return response
