"""The dialling side of lanes: pushes and pulls over connections that are kept for the next one.

One lane carries one transfer at a time; transfers with one peer that run at the same time each
have a lane, up to a bound. A lane that was in the middle of something when its transfer ended is
cut, and so is one that nobody has used for a while. Where nothing comes on one that had been kept,
the others that are as old are cut with it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from protocols.address_book import AddressBook
from protocols.addresses import is_relayed
from protocols.connections import same_machine, tls
from protocols.connections.names import Names
from protocols.connections.sockets import prepare_lane
from protocols.dialling import SHORT, reach, unreached
from protocols.errors import (
    IdentityMismatch,
    LocalProtocolError,
    Malformed,
    RemoteRefused,
    TransferStalled,
    TransportError,
    Unreachable,
    Why,
)
from protocols.identity import PeerId
from protocols.lanes.bodies import feeding
from protocols.lanes.handle import LaneBody, LaneHandle, Transfer
from protocols.lanes.moves import Sending
from protocols.lanes.reactor import Reactor
from protocols.lanes.wire import PACKED_PUSH, PULL, PUSH, Reply, Request, reply_frame
from protocols.limits import Limits
from protocols.relay.client import Relays
from protocols.stats import TransportStats
from protocols.transport import MAX_CALL_BYTES, MAX_HEADER_BYTES, NOT_TAKEN, Feed, Outgoing


class _PeerLanes:
    """The lanes to one peer."""

    def __init__(self, most: int) -> None:
        self.gate = asyncio.Semaphore(most)
        self.users = 0
        self.idle: list[LaneHandle] = []
        self.busy: set[LaneHandle] = set()


class LaneClient:
    """Pushes and pulls; :class:`protocols.http.transport.HttpTransport` owns it."""

    def __init__(
        self,
        peer_id: PeerId,
        reactor: Reactor,
        *,
        book: AddressBook,
        names: Names,
        context: ssl.SSLContext | None,
        stats: TransportStats,
        limits: Limits,
        relays: Relays,
    ) -> None:
        self._peer_id = peer_id
        self._relays = relays
        self._reactor = reactor
        self._book = book
        self._names = names
        self._context = context
        self._stats = stats
        self._limits = limits
        self.on_silent: Callable[[PeerId, float], None] = lambda peer, since: None
        self._places: dict[PeerId, _PeerLanes] = {}
        self._closed = False

    async def push(
        self, peer: PeerId, name: str, header: bytes, body: Outgoing | Feed, timeout: float
    ) -> bytes:
        """See :class:`~protocols.transport.Transport`."""
        clock = asyncio.get_running_loop().time
        asks = _request(PUSH, name, header, body.length)
        async with feeding(body) as feed, self._lane(peer, timeout) as link:
            began = clock()
            packer = link.packer(self._stats.peer(peer).upload)
            request = (replace(asks, verb=PACKED_PUSH) if packer else asks).encode()
            frame = reply_frame(MAX_CALL_BYTES)
            # First: the reply may come while the body goes out, and a lane whose user expects
            # nothing is cut when something comes.
            receiving = link.start_receiving(frame, frame.length, stall=timeout)
            sending = link.start_sending(request, feed, stall=timeout, slow=True, packer=packer)
            try:
                await self._heard(peer, link, sending, receiving)
            finally:
                sent = max(sending.what.moved - (len(request) - len(header)), 0)
                self._stats.sent(peer, name, sent)
            reply = _reply(frame.data, peer)
            whole = len(reply.detail) == reply.length  # else the rest of it is still to come
            given = not sending.end.failed
            link.reusable = whole and given
            self._stats.received(peer, name, reply.length)
            self._check(reply, MAX_CALL_BYTES, link)
            if not given:
                raise Unreachable(peer, Why.NOT_ATOLL, NOT_TAKEN)
            seconds = clock() - began - sending.what.held
            count = sending.what.moved - len(request)
            self._stats.measured_upload(peer, count, seconds, linked=not link.unlimited)
            return reply.detail

    @asynccontextmanager
    async def pull(
        self, peer: PeerId, name: str, header: bytes, max_length: int, timeout: float
    ) -> AsyncIterator[LaneBody]:
        """See :class:`~protocols.transport.Transport`."""
        clock = asyncio.get_running_loop().time
        request = _request(PULL, name, header, max_length).encode()
        async with self._lane(peer, timeout) as link:
            asked = clock()
            self._stats.sent(peer, name, len(header))
            frame = reply_frame(None)
            receiving = link.start_receiving(frame, frame.length, stall=timeout)
            sending = link.start_sending(request, None, stall=timeout)
            await self._heard(peer, link, sending, receiving)
            reply = _reply(frame.data, peer)
            link.reusable = bool(reply.code) and len(reply.detail) == reply.length
            self._check(reply, max_length, link)
            body = LaneBody(
                link,
                reply.length,
                stall=timeout,
                packed=reply.packed,
                on_bytes=partial(self._stats.received, peer, name),
            )
            yield body
            if body.left == 0:
                link.reusable = True
                self._stats.measured_download(
                    peer, body.came, body.took, clock() - asked, linked=not link.local
                )

    def drop_idle(self, peer: PeerId, before: float) -> None:
        """Cut the lanes to ``peer`` that carry nothing now, nor have since ``before``."""
        place = self._places.get(peer)
        for link in place.idle if place is not None else ():
            if link.idle_since is not None and link.idle_since <= before:
                link.abort()

    def close(self) -> None:
        """Cut everything and open nothing more."""
        self._closed = True
        for place in list(self._places.values()):
            for link in (*place.idle, *place.busy):
                link.abort()

    # --- lanes --------------------------------------------------------------------------------

    @asynccontextmanager
    async def _lane(self, peer: PeerId, timeout: float) -> AsyncIterator[LaneHandle]:
        """A lane to ``peer`` for one exchange; ``timeout`` in seconds bounds getting it."""
        place = self._places.setdefault(peer, _PeerLanes(self._limits.per_peer))
        place.users += 1
        link: LaneHandle | None = None
        try:
            try:
                async with asyncio.timeout(timeout):
                    await place.gate.acquire()
                    try:
                        link = await self._idle_or_new(place, peer)
                    except BaseException:  # also cancellation: the place is free again
                        place.gate.release()
                        raise
            except TimeoutError as error:
                raise Unreachable(peer, Why.TIMEOUT, f"{timeout:g} s") from error
            try:
                yield link
            finally:
                place.gate.release()
                place.busy.discard(link)
                self._put_back(place, link)
        finally:
            place.users -= 1
            self._forget(peer, place)

    async def _idle_or_new(self, place: _PeerLanes, peer: PeerId) -> LaneHandle:
        while place.idle:
            link = place.idle.pop()
            if link.alive:
                break
        else:
            if self._closed:
                raise Unreachable(peer, Why.RESET, "this transport is closed")
            link = await reach(self._book, peer, partial(self._open, peer))
        link.reusable = False
        place.busy.add(link)
        return link

    def _put_back(self, place: _PeerLanes, link: LaneHandle) -> None:
        if link.reusable and link.alive and not self._closed:
            link.idle_since = asyncio.get_running_loop().time()
            place.idle.append(link)
            link.rest(self._limits.idle_client)
        else:
            link.abort()

    def _forget(self, peer: PeerId, place: _PeerLanes) -> None:
        """Keep no place for a peer without lanes."""
        place.idle = [link for link in place.idle if link.alive]
        if not place.users and not place.idle and self._places.get(peer) is place:
            del self._places[peer]

    async def _open(self, peer: PeerId, address: str) -> LaneHandle:
        """A new lane to one address."""
        within = self._limits.connect
        try:
            if is_relayed(address):
                async with asyncio.timeout(2 * within):
                    sock = await self._relays.connect(address, peer)
                    return await self._introduced(peer, address, sock)
            if (near := same_machine.connection(address, peer)) is not None:
                async with asyncio.timeout(within):
                    return await self._introduced(peer, address, near)
            clock = asyncio.get_running_loop().time
            began = clock()

            async def connected(sock: socket.socket) -> LaneHandle:
                nonlocal began
                took = clock() - began
                try:
                    link = await self._introduced(peer, address, sock)
                finally:
                    began = clock()  # another place of the same name may be tried
                self._stats.measured_call(peer, took)
                return link

            return await self._names.met(address, peer, within, connected)
        except OSError as error:
            raise unreached(address, peer, error) from error

    async def _introduced(self, peer: PeerId, address: str, sock: socket.socket) -> LaneHandle:
        """The lane on a connection to one address; raises OSError, TransportError."""
        prepare_lane(sock)
        link = LaneHandle(self._reactor, sock, peer, self._limits)
        link.on_lost = partial(self._lost, peer)
        try:
            proven = await link.introduce(self._context, tls.server_name(peer), self._peer_id)
            if proven != peer:  # without TLS it is only a claim
                raise IdentityMismatch(address, peer, proven)
        except BaseException as error:  # also cancellation: no link is left half-open
            link.abort()
            if isinstance(error, Malformed):
                raise Unreachable(address, Why.NOT_ATOLL, "it gives no identity") from error
            if isinstance(error, Unreachable):  # it broke
                raise Unreachable(address, error.why, "in the handshake") from error
            raise
        return link

    def _lost(self, peer: PeerId) -> None:
        if peer in self._places:
            self._forget(peer, self._places[peer])

    # --- replies ------------------------------------------------------------------------------

    async def _heard(
        self, peer: PeerId, link: LaneHandle, sending: Transfer, receiving: Transfer
    ) -> None:
        """As :func:`_either`; nothing on a lane that was idle: others may be dead, too.

        But a body that its caller cuts short has no answer yet, however well it is taken.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            await _either(link, sending, receiving)
        except (TransferStalled, asyncio.CancelledError) as error:
            what = sending.what
            assert isinstance(what, Sending)
            quiet = min(clock() - began, what.quiet(time.monotonic()))
            long = isinstance(error, TransferStalled) or quiet >= SHORT
            if long and link.idle_since is not None and not receiving.what.moved:
                self.on_silent(peer, began)
            raise

    def _check(self, reply: Reply, limit: int, link: LaneHandle) -> None:
        if reply.code:
            raise RemoteRefused(reply.code, reply.detail.decode(errors="replace"))
        if reply.length > limit:
            link.reusable = False
            raise RemoteRefused("too_large", f"an answer of {reply.length} bytes exceeds {limit}")


async def _either(link: LaneHandle, sending: Transfer, receiving: Transfer) -> None:
    """Wait for the reply, which may come before everything is sent.

    Raises what ended the exchange without one: first of all the error of the body's own source.
    """
    both = [sending.end.come, receiving.end.come]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if sending.ended and not receiving.ended:
            if sending.end.failed and not isinstance(sending.end.error, Unreachable):
                link.abort()
            await asyncio.wait([receiving.end.come])
    except asyncio.CancelledError:
        link.abort()
        raise
    finally:
        if not (receiving.ended and sending.ended):
            link.abort()
            await link.stop(receiving)
        await link.stop(sending)
    if not receiving.end.failed:
        return
    if not isinstance(sending.end.error, TransportError):
        sending.end.result()
    try:
        receiving.end.result()
    except Malformed as failure:
        raise Unreachable(link.who, Why.NOT_ATOLL, str(failure)) from failure


def _request(verb: int, name: str, header: bytes, length: int) -> Request:
    if len(header) > MAX_HEADER_BYTES:
        raise LocalProtocolError(f"header of {len(header)} bytes exceeds {MAX_HEADER_BYTES}")
    return Request(verb, name, header, length)


def _reply(data: bytearray, peer: PeerId) -> Reply:
    try:
        return Reply.decode(data)
    except Malformed as error:
        raise Unreachable(peer, Why.NOT_ATOLL, str(error)) from error
