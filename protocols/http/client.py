"""The dialling side of the HTTP transport: calls over pooled connections.

The pool is aiohttp's, keyed by host; the host of every URL here is the peer's TLS server name, so
a pooled connection can only ever serve the peer it was proven for. Long bodies travel on
connections of their own (:mod:`protocols.lanes.client`): no message waits behind a tensor.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import lru_cache, partial

import aiohttp
from aiohttp import payload
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from protocols.address_book import AddressBook
from protocols.connections import tls
from protocols.connections.names import Names
from protocols.dialling import SHORT
from protocols.errors import (
    IdentityMismatch,
    Malformed,
    RemoteRefused,
    TransferStalled,
    TransportError,
    Unreachable,
    Why,
)
from protocols.http.body import (
    ERROR_HEADER,
    MAX_ERROR_BYTES,
    PEER_HEADER,
    PROTOCOL,
    TOOK_HEADER,
    VERSION_HEADER,
    read_body,
)
from protocols.http.connector import Dial, PeerConnector
from protocols.identity import PeerId, public_key
from protocols.limits import Limits
from protocols.relay.client import Relays
from protocols.stats import TransportStats


class _Body(payload.Payload):
    """A request body that remembers on which connection it went, when, and whether that led on."""

    _default_content_type = "application/octet-stream"

    def __init__(self, data: bytes, on_sent: Callable[[int], None]) -> None:
        super().__init__(data)
        self._size = len(data)
        self._data = data
        self._on_sent = on_sent
        self.transport: asyncio.WriteTransport | None = None
        self.began = 0.0
        self.ended = asyncio.Event()
        self.answered = False  # at least the head of an answer has come

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._data.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self.write_with_length(writer, None)

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        self.began = asyncio.get_running_loop().time()
        self.transport = writer.transport
        try:
            if self._data:
                await writer.write(self._data)
                self._on_sent(len(self._data))
        finally:
            self.ended.set()

    async def finish(self, *, abort: bool) -> None:
        """Leave nothing behind: cut the connection if told to, and wait for the writer."""
        if self.transport is not None:
            if abort:
                self.transport.abort()
            await self.ended.wait()


class HttpClient:
    """Calls; :class:`protocols.http.transport.HttpTransport` owns it."""

    def __init__(
        self,
        peer_id: PeerId,
        *,
        book: AddressBook,
        names: Names,
        context: ssl.SSLContext | None,
        stats: TransportStats,
        limits: Limits,
        on_sent: Callable[[int], None],
        relays: Relays,
    ) -> None:
        self._secure = context is not None
        self._stats = stats
        self._limits = limits
        self._on_sent = on_sent
        self.on_silent: Callable[[PeerId, float], None] = lambda peer, since: None
        self._proven: weakref.WeakSet[asyncio.WriteTransport] = weakref.WeakSet()
        self._dial_numbers = itertools.count()
        self._connector = PeerConnector(book, names, context, limits, relays)
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={} if self._secure else {PEER_HEADER: peer_id},
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None),
            auto_decompress=False,
            max_line_size=512,
            max_field_size=512,
        )

    async def call(
        self, peer: PeerId, name: str, body: bytes, timeout: float, max_reply: int
    ) -> bytes:
        """See :class:`~protocols.transport.Transport`.

        A call on a pooled connection that turns out to be closed, before a byte of the reply, is
        made once more on a new one: the peer may then see it twice. Others of the pool have most
        likely died with it, as when a machine was suspended or a router has forgotten them. Where
        nobody says that they have, one of them has no answer in time, and the others are dropped.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout
        for last in (False, True):
            sent = _Body(body, partial(self._count, peer, name))
            try:
                async with (
                    asyncio.timeout_at(deadline),
                    self._exchange(peer, f"call/{name}", sent) as response,
                ):
                    reply = await self._read(response, peer, name, max_reply, timeout)
                    self._stats.measured_call(peer, clock() - sent.began - _took(response))
                    return reply
            except TimeoutError as error:
                self._unanswered(peer, sent, 0.0)
                raise _timed_out(peer, sent, timeout) from error
            except asyncio.CancelledError:
                self._unanswered(peer, sent, SHORT)
                raise
            except Unreachable as error:
                stale = error.why is Why.RESET and self._reused(sent) and not self._session.closed
                if last or not stale:
                    raise
                self._connector.drop_idle(peer)
        raise AssertionError("unreachable")

    async def dial(self, address: str, expected: PeerId | None, timeout: float) -> PeerId:
        """Learn who answers at ``HOST:PORT``; the connection is used for nothing else."""
        host = f"dial-{next(self._dial_numbers)}.peer"
        dial = self._connector.dials[host] = Dial(address, expected)
        try:
            async with asyncio.timeout(timeout):
                response = await self._session.get(
                    _url(host, "hello"), headers={"Connection": "close"}, allow_redirects=False
                )
            async with response:
                self._check_answer(response, address)
                peer = dial.peer
                if peer is None:
                    peer = PeerId(response.headers.get(PEER_HEADER, ""))
                    public_key(peer)
        except Malformed as error:
            raise Unreachable(address, Why.NOT_ATOLL, "it gives no identity") from error
        except TransportError:
            raise
        except Exception as error:  # aiohttp has many kinds; _translate raises any other
            raise _translate(error, address, self._session.closed) from error
        finally:
            del self._connector.dials[host]
        if expected is not None and peer != expected:
            raise IdentityMismatch(address, expected, peer)
        return peer

    def _reused(self, sent: _Body) -> bool:
        return sent.transport is not None and sent.transport in self._proven

    def _unanswered(self, peer: PeerId, sent: _Body, least: float) -> None:
        """A call was given up; if it had ``least`` seconds, its connection may have died."""
        waited = asyncio.get_running_loop().time() - sent.began
        if self._reused(sent) and not sent.answered and waited >= least:
            self.on_silent(peer, sent.began)

    def drop_idle(self, peer: PeerId, before: float) -> None:
        """See :meth:`PeerConnector.drop_idle`."""
        self._connector.drop_idle(peer, before)

    def own_end(self, peer: PeerId) -> str:
        """See :meth:`PeerConnector.own_end`."""
        return self._connector.own_end(peer)

    def reached(self, peer: PeerId) -> str:
        """See :meth:`PeerConnector.reached`."""
        return self._connector.reached(peer)

    async def aclose(self) -> None:
        """Cut everything."""
        links = self._connector.links()
        await self._session.close()
        for link in links:
            link.abort()

    @asynccontextmanager
    async def _exchange(
        self, peer: PeerId, path: str, body: _Body
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request up to the head of its answer; ends with the connection reusable or cut."""
        host = tls.server_name(peer)
        response: aiohttp.ClientResponse | None = None
        try:
            try:
                response = await self._session.post(
                    _url(host, path), data=body, allow_redirects=False
                )
                body.answered = True
                self._check_answer(response, peer)
                if not self._secure and response.headers.get(PEER_HEADER) != peer:
                    raise IdentityMismatch(peer, peer, response.headers.get(PEER_HEADER, ""))
                if ERROR_HEADER in response.headers:
                    raise await self._refusal(response, peer)
            except TransportError:
                raise
            except Exception as error:  # as in dial
                raise _translate(error, peer, self._session.closed) from error
            yield response
        finally:
            # by the state, however we came here: a connection whose answer is complete is back in
            # the pool, and may serve another request by now
            complete = response is not None and response.content.is_eof() and body.ended.is_set()
            if complete and body.transport is not None:
                self._proven.add(body.transport)
            if response is not None and not complete:
                response.close()
            await body.finish(abort=not complete)

    def _check_answer(self, response: aiohttp.ClientResponse, target: str) -> None:
        if response.headers.get(VERSION_HEADER) != PROTOCOL:
            raise Unreachable(target, Why.NOT_ATOLL, f"it answers HTTP {response.status}")
        if response.content_length is None or response.headers.get("Content-Encoding"):
            raise Unreachable(target, Why.NOT_ATOLL, "its answer has no plain length")

    async def _refusal(self, response: aiohttp.ClientResponse, peer: PeerId) -> RemoteRefused:
        code = response.headers[ERROR_HEADER][:64]
        if (response.content_length or 0) > MAX_ERROR_BYTES:
            return RemoteRefused(code)
        text = await self._read(response, peer, "", MAX_ERROR_BYTES, 5.0)
        return RemoteRefused(code, text.decode(errors="replace"))

    async def _read(
        self, response: aiohttp.ClientResponse, peer: PeerId, name: str, limit: int, stall: float
    ) -> bytes:
        length = response.content_length or 0
        if length > limit:
            raise RemoteRefused("too_large", f"an answer of {length} bytes exceeds {limit}")
        return await read_body(
            response.content,
            length,
            peer,
            stall=stall,
            min_rate=self._limits.min_rate,
            on_bytes=partial(self._stats.received, peer, name),
        )

    def _count(self, peer: PeerId, name: str, count: int) -> None:
        self._stats.sent(peer, name, count)
        self._on_sent(count)


@lru_cache(maxsize=4096)
def _url(host: str, path: str) -> URL:
    return URL.build(scheme="http", host=host, path=f"/{path}")


def _took(response: aiohttp.ClientResponse) -> float:
    """Seconds the peer says its handler took; 0 if it says nothing sensible."""
    text = response.headers.get(TOOK_HEADER, "")
    return int(text) / 1e6 if text.isascii() and text.isdigit() and len(text) < 12 else 0.0


def _timed_out(peer: PeerId, body: _Body, timeout: float) -> TransportError:
    if body.transport is None:
        return Unreachable(peer, Why.TIMEOUT, f"{timeout:g} s")
    return TransferStalled(f"{peer}: no progress for {timeout:g} s")


def _translate(error: Exception, target: str, closed: bool) -> TransportError:
    """An error below HTTP as one of our own; any other is a bug, and is raised as it is."""
    if closed:
        return Unreachable(target, Why.RESET, "this transport is closed")
    cause = error.__cause__ or error
    if isinstance(cause, ssl.SSLError) and tls.is_refusal(cause):
        return Unreachable(target, Why.TLS, tls.tls_reason(cause))
    if isinstance(error, aiohttp.ClientResponseError):
        return Unreachable(target, Why.NOT_ATOLL, "its answer is not HTTP")
    if isinstance(error, TimeoutError):
        return Unreachable(target, Why.TIMEOUT)
    if isinstance(error, aiohttp.ClientConnectionError | OSError):
        return Unreachable(target, Why.RESET)
    raise error
