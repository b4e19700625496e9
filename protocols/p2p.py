"""hivemind's DHT over our transport: a class with the surface of ``hivemind.p2p.P2P``.

An unmodified :class:`hivemind.dht.DHTNode` runs on :class:`P2P`, so no libp2p daemon is needed:
every call is one authenticated :meth:`~protocols.transport.Transport.call` named ``p2p`` whose
body is a :class:`~protocols.messages.RemoteCall`. Beside the protobuf it carries the caller's
signed address record, since ids hold no address (:mod:`protocols.whereabouts`).

hivemind is imported when the first :class:`P2P` is made and not before: it takes half a second
and pulls in torch.

>>> p2p = P2P(transport, Whereabouts(transport, identity))
>>> node = await DHTNode.create(p2p=p2p, initial_peers=[f"/p2p/{seed}"])
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import warnings
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol, TypeVar

import base58

from protocols.asking import ask
from protocols.errors import Malformed, RemoteProtocolError, RemoteRefused, Stale, TransportError
from protocols.identity import PeerId
from protocols.messages import RemoteCall, RemoteReply
from protocols.p2p_streams import Streams, asingle
from protocols.rate_limit import RateLimit
from protocols.transport import Transport
from protocols.whereabouts import Whereabouts

logger = logging.getLogger(__name__)
T = TypeVar("T")

CALL_TIMEOUT = 15.0  # seconds; hivemind's DHT gives up after 3 by itself
MAX_BODY = 1024 * 1024  # bytes of one protobuf
MAX_MENTIONS = 1024  # peers one reply may name
MAX_PEER_BYTES = 64


@functools.cache
def bindings() -> Any:
    """``hivemind.p2p``, imported with its log handler and its deprecation warnings put away.

    hivemind's own handler writes to stderr past the program's logging; here its messages go the
    way of all others, from WARNING up.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit and others, at import time, not ours to fix
        import hivemind.p2p
        from hivemind.utils.logging import use_hivemind_log_handler
    use_hivemind_log_handler("nowhere")
    logging.getLogger("hivemind").setLevel(logging.WARNING)
    return hivemind.p2p


class Inspector(Protocol):
    """Looks at every protobuf before it is acted on; raises ``RemoteProtocolError`` to refuse."""

    def request(self, peer: PeerId, handler: str, message: Any) -> int:
        """A call from ``peer``: how many calls its work counts as, 1 at least."""
        ...

    def reply(self, peer: PeerId, handler: str, message: Any) -> None:
        """The answer of ``peer``."""
        ...


class _Handler:
    """A registered protobuf handler."""

    def __init__(
        self, call: Callable[..., Any], input_type: Any, stream_input: bool, stream_output: bool
    ) -> None:
        self.call = call
        self.input_type = input_type
        self.stream_input = stream_input
        self.stream_output = stream_output

    async def run(self, bodies: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Serialized items in, serialized items out, whichever of the two sides streams."""
        messages = (self.input_type.FromString(body) async for body in bodies)
        output = self.call(messages if self.stream_input else await asingle(messages), context)
        if isinstance(output, AsyncIterable):
            async for item in output:
                yield item.SerializeToString()
        else:
            yield (await output).SerializeToString()


class P2P:
    """What ``hivemind.dht`` calls on a ``hivemind.p2p.P2P``, over a :class:`Transport`.

    ``inspector`` sees every request and reply; without one everything that decodes passes.
    The transport stays the caller's: :meth:`shutdown` does not close it.
    """

    def __init__(
        self,
        transport: Transport,
        whereabouts: Whereabouts,
        *,
        inspector: Inspector | None = None,
        limit: RateLimit | None = None,
    ) -> None:
        self.peer_id = bindings().PeerID.from_base58(transport.peer_id)
        self.whereabouts = whereabouts
        self._transport = transport
        self._inspector = inspector
        self._limit = limit or RateLimit()
        self._handlers: dict[str, _Handler] = {}
        self._streams = Streams(transport, self._open_stream)
        transport.on_call("p2p", self._serve, max_body=RemoteCall.MAX_BYTES)

    # --- what hivemind calls --------------------------------------------------------------------

    async def add_protobuf_handler(
        self,
        name: str,
        handler: Callable[..., Any],
        input_protobuf_type: Any,
        *,
        stream_input: bool = False,
        stream_output: bool = False,
        balanced: bool = False,
    ) -> None:
        """Answer calls of ``name``; a name that is taken raises ``P2PDaemonError``.

        ``balanced`` is hivemind's word for several processes behind one daemon; there is one here.
        """
        if name in self._handlers:
            raise bindings().P2PDaemonError(f"a handler for {name} is set already")
        self._handlers[name] = _Handler(handler, input_protobuf_type, stream_input, stream_output)

    async def remove_protobuf_handler(
        self, name: str, *, stream_input: bool = False, stream_output: bool = False
    ) -> None:
        """Stop answering calls of ``name``."""
        if self._handlers.pop(name, None) is None:
            raise bindings().P2PDaemonError(f"there is no handler for {name}")

    async def call_protobuf_handler(
        self, peer_id: Any, name: str, input: Any, output_protobuf_type: Any
    ) -> Any:
        """Call ``name`` at a peer; ``P2PDaemonError``: no link, ``P2PHandlerError``: it refused."""
        if isinstance(input, AsyncIterable):
            return await asingle(
                await self.iterate_protobuf_handler(peer_id, name, input, output_protobuf_type)
            )
        peer = self._callee(peer_id)
        own = self.whereabouts.own
        body = input.SerializeToString()
        if len(body) > MAX_BODY:
            raise bindings().P2PDaemonError(f"{name}: {len(body)} bytes exceed {MAX_BODY}")
        request = RemoteCall(
            handler=name,
            record=own.data if own else b"",
            known=self.whereabouts.sequence(peer),
            body=body,
        )
        with _upstream_errors(peer, name):
            reply = await ask(
                self._transport, peer, "p2p", request, RemoteReply, timeout=CALL_TIMEOUT
            )
            if reply.error:
                raise RemoteRefused("handler", reply.error)
            if len(reply.bodies) != 1:
                raise Malformed("a plain call has one reply")
            self._learn(peer, reply.record)
            message = _parse(output_protobuf_type, reply.bodies[0])
            if self._inspector is not None:
                self._inspector.reply(peer, name, message)
        for mentioned in _mentioned(message):
            self.whereabouts.mention(mentioned, by=peer)
        return message

    async def iterate_protobuf_handler(
        self, peer_id: Any, name: str, input: Any, output_protobuf_type: Any
    ) -> AsyncIterator[Any]:
        """Call ``name`` with one message or a stream of them; returns the stream of replies."""
        peer = self._callee(peer_id)
        inputs = input if isinstance(input, AsyncIterable) else _once(input)
        bodies = self._streams.call(peer, name, (item.SerializeToString() async for item in inputs))

        async def outputs() -> AsyncIterator[Any]:
            with _upstream_errors(peer, name):
                try:
                    async for body in bodies:
                        yield _parse(output_protobuf_type, body)
                finally:
                    await bodies.aclose()

        return outputs()

    async def get_visible_maddrs(self, latest: bool = False) -> list[Any]:
        """Our published addresses as multiaddrs that end in ``/p2p/<id>``."""
        from hivemind.utils.multiaddr import Multiaddr

        own = self.whereabouts.own
        suffix = f"/p2p/{self._transport.peer_id}"
        addresses = own.record.addresses if own else ()
        texts = [f"{_multiaddr(address)}{suffix}" for address in addresses]
        return [Multiaddr(text) for text in texts or [suffix]]

    async def shutdown(self) -> None:
        """Answer no more calls and end the streams."""
        self._handlers.clear()
        await self._streams.aclose()

    # --- the wire -------------------------------------------------------------------------------

    def _callee(self, peer_id: Any) -> PeerId:
        peer = PeerId(peer_id.to_base58())
        if peer == self._transport.peer_id:
            raise bindings().P2PDaemonError("a node does not call itself")
        return peer

    async def _serve(self, caller: PeerId, body: bytes) -> bytes:
        if not self._limit.take(caller):
            raise RemoteRefused("busy", "too many calls")
        call = RemoteCall.decode(body)
        self._learn(caller, call.record)
        handler = self._handler(call.handler)
        if handler.stream_input or handler.stream_output:
            raise RemoteRefused("unknown", "this handler takes streams")
        request = _parse(handler.input_type, call.body)
        if self._inspector is not None:
            count = self._inspector.request(caller, call.handler, request)
            if count > 1 and not self._limit.take(caller, count - 1):
                raise RemoteRefused("busy", "too much in one call")
        error, bodies = "", tuple[bytes, ...]()
        try:
            response = await handler.call(request, self._context(caller, call.handler))
            bodies = (_bounded(response.SerializeToString()),)
        except Exception as failure:  # whatever a handler raises is its answer
            logger.debug("handler %s failed for %s", call.handler, caller, exc_info=True)
            error = f"{type(failure).__name__}: {failure}"[:256]
        own = self.whereabouts.own
        record = own.data if own is not None and own.sequence > call.known else b""
        return RemoteReply(error=error, record=record, bodies=bodies, done=True).encode()

    def _learn(self, peer: PeerId, record: bytes) -> None:
        """Keep the record that came along; the peer is proven, and reached, without it."""
        if record:
            try:
                self.whereabouts.learn(record, expected=peer)
            except Stale as error:  # one of the two clocks is hours off
                logger.info("the address record of %s does not hold: %s", peer, error)

    def _handler(self, name: str) -> _Handler:
        handler = self._handlers.get(name)
        if handler is None:
            raise RemoteRefused("unknown", "no such handler")
        return handler

    def _context(self, caller: PeerId, name: str) -> Any:
        upstream = bindings()
        return upstream.P2PContext(
            handle_name=name,
            local_id=self.peer_id,
            remote_id=upstream.PeerID.from_base58(caller),
        )

    def _open_stream(
        self, caller: PeerId, name: str, bodies: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        if not self._limit.take(caller):
            raise RemoteRefused("busy", "too many calls")
        handler = self._handler(name)
        if not (handler.stream_input or handler.stream_output):
            raise RemoteRefused("unknown", "this handler takes no streams")  # nobody inspects them
        return handler.run(bodies, self._context(caller, name))


@contextmanager
def _upstream_errors(peer: PeerId, name: str) -> Iterator[None]:
    """Turn our errors into the two that hivemind knows."""
    try:
        yield
    except RemoteRefused as error:
        kind = "P2PDaemonError" if error.code == "unknown" else "P2PHandlerError"
        raise getattr(bindings(), kind)(f"{name} at {peer}: {error}") from error
    except RemoteProtocolError as error:
        raise bindings().P2PHandlerError(f"{name} at {peer}: {error}") from error
    except TransportError as error:
        raise bindings().P2PDaemonError(f"{name} at {peer}: {error}") from error


def _parse(protobuf: Any, data: bytes) -> Any:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        return protobuf.FromString(data)
    except DecodeError as error:
        raise Malformed(f"not a {protobuf.DESCRIPTOR.name}") from error


def _bounded(body: bytes) -> bytes:
    if len(body) > MAX_BODY:
        raise ValueError(f"the reply of {len(body)} bytes exceeds {MAX_BODY}")
    return body


def _mentioned(message: Any) -> Iterator[PeerId]:
    """The peers that a reply of the DHT names, without their addresses."""
    if message.DESCRIPTOR.name == "FindResponse":
        raw = (peer for result in message.results for peer in result.nearest_peer_ids)
        for peer in islice(raw, MAX_MENTIONS):
            if len(peer) <= MAX_PEER_BYTES:
                yield PeerId(base58.b58encode(peer).decode())


async def _once(item: T) -> AsyncIterator[T]:
    yield item


def _multiaddr(address: str) -> str:
    """``HOST:PORT`` as ``/ip4/HOST/tcp/PORT``, ``/ip6/…`` or ``/dns/…``."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        kind = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        kind = "dns"
    return f"/{kind}/{host}/tcp/{port}"
