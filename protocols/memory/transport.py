"""The transport for tests and simulation: peers of one process on a simulated internet.

:class:`MemoryTransport` behaves as :mod:`protocols.http.transport` does, over the links, speeds and
faults of a :class:`MemoryNetwork` (:mod:`protocols.memory.network` explains the model). On the loop
of :mod:`protocols.memory.virtual_time` hours pass in seconds, and one seed gives one history.

>>> network = MemoryNetwork(seed=7, link=Link(latency=0.03), upload=12.5e6, download=12.5e6)
>>> a, b = network.join(alice.peer_id), network.join(bob.peer_id)
>>> b.on_call("greet", greet)
>>> await a.call(b.peer_id, "greet", b"hello", timeout=5)

Identities are taken on trust, nothing is encrypted. Every peer that ever joined the network can
be dialled by its id. Chunks are valid until the next one, as the interface says: a view that is
used later raises ``ValueError`` or holds garbage.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from protocols.bodies import outgoing
from protocols.errors import (
    IdentityMismatch,
    LocalProtocolError,
    RemoteRefused,
    Unreachable,
    Why,
)
from protocols.handlers import Handlers
from protocols.identity import PeerId
from protocols.memory.exchange import MemoryExchange
from protocols.memory.network import Link, MemoryNetwork, MemoryNode, TraceEvent
from protocols.stats import TransportStats
from protocols.tasks import Background
from protocols.transport import (
    MAX_CALL_BYTES,
    MAX_HEADER_BYTES,
    NOT_TAKEN,
    CallHandler,
    Feed,
    Incoming,
    Outgoing,
    PullHandler,
    PushHandler,
)

__all__ = ["Link", "MemoryNetwork", "MemoryTransport", "TraceEvent"]

DIAL_TIMEOUT = 5.0  # seconds


class MemoryTransport:
    """One peer's end, made by :meth:`MemoryNetwork.join`; see
    :class:`~protocols.transport.Transport`."""

    def __init__(self, network: MemoryNetwork, node: MemoryNode) -> None:
        self.network = network
        self.node = node
        self.stats = TransportStats()
        self._handlers = Handlers()
        self._linked: dict[
            PeerId, MemoryNode
        ] = {}  # open connections; a restart makes another Node
        # dicts, not sets: their order is the same in every run
        self.exchanges: dict[MemoryExchange, None] = {}
        self._tasks = Background()

    @property
    def peer_id(self) -> PeerId:
        """Who we are."""
        return self.node.peer

    @property
    def address(self) -> str:
        """``HOST:PORT`` for :meth:`dial`; kept over a restart."""
        return self.node.address

    def on_call(self, name: str, handler: CallHandler, *, max_body: int = MAX_CALL_BYTES) -> None:
        """Answer calls of ``name``."""
        self._handlers.calls[name] = (handler, max_body)

    def on_push(self, name: str, handler: PushHandler, *, max_length: int) -> None:
        """Take bodies of ``name``."""
        self._handlers.pushes[name] = (handler, max_length)

    def on_pull(self, name: str, handler: PullHandler, *, slow: bool = False) -> None:
        """Serve bodies of ``name``."""
        self._handlers.pulls[name] = (handler, slow)

    # --- asking ---------------------------------------------------------------------------------

    async def call(
        self,
        peer: PeerId,
        name: str,
        body: bytes,
        *,
        timeout: float,
        max_reply: int = MAX_CALL_BYTES,
    ) -> bytes:
        """Send ``body`` and return the reply."""
        with self._exchange(peer, name, timeout, patient=False) as exchange:
            exchange.connect(
                lambda: exchange.request(
                    "call", body, partial(exchange.callee._serve_call, exchange)
                )
            )
            reply = await exchange.result
            self.stats.measured_call(peer, exchange.elapsed - exchange.took)
        if len(reply) > max_reply:
            raise RemoteRefused("too_large", f"an answer of {len(reply)} bytes")
        return reply

    async def push(
        self, peer: PeerId, name: str, header: bytes, body: Outgoing | Feed, *, timeout: float
    ) -> bytes:
        """Send a long body."""
        _check_header(header)
        with self._exchange(peer, name, timeout) as exchange:

            def connected() -> None:
                exchange.expect(body.length)
                exchange.request("push", header, partial(exchange.callee._serve_push, exchange))
                exchange.pump = self._tasks.spawn(exchange.push_body(outgoing(body)))

            exchange.connect(connected)
            try:
                reply = await exchange.result
            finally:
                await exchange.end_pump()
            if exchange.sent < body.length:
                raise Unreachable(peer, Why.NOT_ATOLL, NOT_TAKEN)
            self.stats.measured_upload(peer, body.length, exchange.elapsed)
            return reply

    @asynccontextmanager
    async def pull(
        self, peer: PeerId, name: str, header: bytes, *, max_length: int, timeout: float
    ) -> AsyncIterator[Incoming]:
        """Receive a long body."""
        _check_header(header)
        with self._exchange(peer, name, timeout) as exchange:
            exchange.connect(
                lambda: exchange.request(
                    "pull", header, partial(exchange.callee._serve_pull, exchange, max_length)
                )
            )
            await exchange.result
            exchange.stop_watching()
            assert exchange.body is not None
            yield exchange.body
            if exchange.body.complete:
                elapsed = exchange.elapsed
                self.stats.measured_download(peer, exchange.body.length, elapsed, elapsed)

    async def dial(self, address: str, expected: PeerId | None = None) -> PeerId:
        """Connect to an address and learn who answers."""
        node = self.network.at(address)
        if node is None:
            raise Unreachable(address, Why.REFUSED)
        with self._exchange(node.peer, "dial", DIAL_TIMEOUT, patient=False) as exchange:
            exchange.connect(exchange.finish)
            await exchange.result
        if expected is not None and expected != node.peer:
            raise IdentityMismatch(address, expected, node.peer)
        return node.peer

    def post(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` soon on the event loop, where feeds and drains are called too."""
        self.network.loop.call_soon_threadsafe(callback)

    def _exchange(
        self, peer: PeerId, name: str, timeout: float, *, patient: bool = True
    ) -> MemoryExchange:
        if not self.node.alive:
            raise Unreachable(peer, Why.RESET, "this transport is closed")
        if peer == self.peer_id:
            raise Unreachable(peer, Why.SELF)
        node = self.network.node(peer)
        if node is None:
            raise Unreachable(peer, Why.NO_ADDRESS)
        return MemoryExchange(self, node.transport, name, timeout, patient=patient)

    def connected(self, other: MemoryTransport) -> bool:
        """Whether a connection to that very node, not one before its restart, is open."""
        return other.node.alive and self._linked.get(other.peer_id) is other.node

    def remember(self, other: MemoryTransport) -> None:
        """A connection was made."""
        self._linked[other.peer_id] = other.node

    def forget(self, other: MemoryTransport) -> None:
        """A connection broke."""
        self._linked.pop(other.peer_id, None)

    # --- answering ------------------------------------------------------------------------------

    async def _serve_call(self, exchange: MemoryExchange, body: bytes) -> None:
        async def serve() -> bytes:
            handler, max_body = self._handlers.call(exchange.caller.peer_id, exchange.name)
            if len(body) > max_body:
                raise RemoteRefused("too_large", f"at most {max_body} bytes")
            return await handler(exchange.caller.peer_id, body)

        await exchange.answer(serve())

    async def _serve_push(self, exchange: MemoryExchange, header: bytes) -> None:
        async def serve() -> bytes:
            handler, max_length = self._handlers.push(exchange.caller.peer_id, exchange.name)
            assert exchange.body is not None
            if exchange.body.length > max_length:
                raise RemoteRefused("too_large", f"at most {max_length} bytes")
            return await handler(exchange.caller.peer_id, header, exchange.body)

        await exchange.answer(serve())

    async def _serve_pull(self, exchange: MemoryExchange, max_length: int, header: bytes) -> None:
        async def serve() -> Outgoing:
            handler, _ = self._handlers.pull(exchange.caller.peer_id, exchange.name)
            return outgoing(await handler(exchange.caller.peer_id, header))

        await exchange.answer_pull(serve(), max_length)

    def spawn(
        self, exchange: MemoryExchange, serving: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        """Start the task that answers an exchange; it ends with this transport at the latest."""
        self.exchanges[exchange] = None
        task = self._tasks.spawn(serving)
        task.add_done_callback(lambda _: self.exchanges.pop(exchange, None))
        return task

    def shut(self) -> None:
        """Break everything at once, as the end of the process would."""
        self.node.alive = False
        for exchange in list(self.exchanges):
            exchange.end_of(self)
        self._handlers = Handlers()  # others know this end as long as they live, and no more of it

    async def aclose(self) -> None:
        """Refuse connections, break the open ones, wait for cancelled handlers to end."""
        self.shut()
        await self._tasks.join()


def _check_header(header: bytes) -> None:
    if len(header) > MAX_HEADER_BYTES:
        raise LocalProtocolError(f"header of {len(header)} bytes exceeds {MAX_HEADER_BYTES}")
