"""The listening side of lanes: pushes and pulls of proven peers, served one after the other.

The handler runs in the task of its connection, and is cancelled when its caller leaves. Nothing
of a push's body is read before the handler asks for it, so that a handler without room for
it holds the sender back by TCP alone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from dataclasses import replace
from functools import partial

from protocols.connections.accepted import Connection
from protocols.connections.sockets import prepare_lane
from protocols.errors import (
    Malformed,
    RemoteRefused,
    TransferStalled,
    TransportError,
)
from protocols.handlers import Handlers, refusal
from protocols.identity import PeerId
from protocols.lanes.bodies import feeding
from protocols.lanes.handle import LaneBody, LaneHandle
from protocols.lanes.reactor import Reactor
from protocols.lanes.wire import PACKED_PUSH, PULL, Reply, Request, request_frame
from protocols.limits import Limits
from protocols.stats import TransportStats

logger = logging.getLogger(__name__)

_LANES = 2  # times as many as a peer opens: some that it has cut may still seem open
_Lanes = dict[LaneHandle, asyncio.Task[None]]  # with the task of each; the longest idle first


class LaneServer:
    """Serves lanes that :class:`~protocols.http.listener.Listener` has accepted."""

    def __init__(
        self,
        peer_id: PeerId,
        reactor: Reactor,
        handlers: Handlers,
        *,
        context: ssl.SSLContext | None,
        stats: TransportStats,
        limits: Limits,
    ) -> None:
        self._peer_id = peer_id
        self._reactor = reactor
        self._handlers = handlers
        self._context = context
        self._stats = stats
        self._limits = limits
        self._by_peer: dict[PeerId, _Lanes] = {}
        self.serving: set[asyncio.Task[None]] = set()  # tasks in which a handler runs

    async def serve(self, sock: socket.socket, connection: Connection) -> None:
        """One lane to its end.

        Raises ``OSError`` or Malformed if the stranger is not a peer.
        """
        prepare_lane(sock)
        link = LaneHandle(self._reactor, sock, connection.source, self._limits)
        try:
            async with asyncio.timeout(self._limits.handshake):
                try:
                    peer = await link.accept(self._context, self._peer_id)
                except TransportError as error:
                    raise ConnectionResetError("left in the handshake") from error
            self._stats.connections += 1
            connection.proven(peer)
            link.name(peer)
            await self._serve_peer(link, peer, connection)
        finally:
            link.abort()

    async def _serve_peer(self, link: LaneHandle, peer: PeerId, connection: Connection) -> None:
        """Exchange after exchange, unless the peer has too many lanes that are all serving."""
        task = asyncio.current_task()
        assert task is not None
        lanes = self._by_peer.setdefault(peer, {})
        if len(lanes) >= _LANES * self._limits.per_peer:
            self._stats.capped_connections += 1
            if not self._cut_idle(lanes):
                return
        lanes[link] = task
        try:
            while await self._exchange(link, peer, connection) and link in lanes:
                lanes[link] = lanes.pop(link)  # behind those that have been idle for longer
        finally:
            lanes.pop(link, None)
            if not lanes and self._by_peer.get(peer) is lanes:
                del self._by_peer[peer]

    def _cut_idle(self, lanes: _Lanes) -> bool:
        """Cut the lane that has been idle the longest; returns whether there was one."""
        for link, task in lanes.items():
            if task not in self.serving:
                del lanes[link]
                link.abort()
                return True
        return False

    async def _exchange(self, link: LaneHandle, peer: PeerId, connection: Connection) -> bool:
        """One request and its answer; returns whether another may follow."""
        try:
            message = await link.message(request_frame(), stall=self._limits.idle_server)
            request = Request.decode(message)
            request = replace(request, name=self._handlers.known(request.name))
        except TransportError:
            return False
        except Malformed as error:
            logger.debug("a lane of %s: %s", peer, error)
            self._stats.garbage_connections += 1
            return False
        task = asyncio.current_task()
        assert task is not None
        link.on_lost = partial(_cancel, task)
        self.serving.add(task)
        try:
            self._stats.received(peer, request.name, len(request.header))
            with connection.serving():
                if request.verb == PULL:
                    return await self._pull(link, peer, request)
                return await self._push(link, peer, request)
        except asyncio.CancelledError as cancelled:
            # the task keeps it, and it would keep the frames: those of the task, and the body
            cancelled.__traceback__ = None
            raise
        finally:
            link.on_lost = _nothing
            self.serving.discard(task)

    async def _push(self, link: LaneHandle, peer: PeerId, request: Request) -> bool:
        body = LaneBody(
            link,
            request.length,
            stall=self._limits.stall,
            packed=request.verb == PACKED_PUSH,
            on_bytes=partial(self._stats.received, peer, request.name),
        )
        if request.length:
            link.look_away()
        else:
            link.listen()
        started = time.perf_counter()
        try:
            handler, max_length = self._handlers.push(peer, request.name)
            if request.length > max_length:
                raise RemoteRefused("too_large", f"at most {max_length} bytes")
            answer = await handler(peer, request.header, body)
        except Exception as error:  # noqa: BLE001  # whatever a handler raises is its answer
            reply = self._refused(error, request.name)
        else:
            took = time.perf_counter() - started
            reply = Reply("", took, len(answer), answer)
            self._stats.requests_by_name[request.name] += 1
            self._stats.measured_download(peer, body.came, body.took, took, linked=not link.local)
        await body.stop()
        self._stats.sent(peer, request.name, len(reply.detail))
        try:
            await link.send(reply.encode(), stall=self._limits.stall)
            return not body.left or await self._discard(body)
        except TransportError:
            return False

    async def _discard(self, body: LaneBody) -> bool:
        """Read and drop the rest of a body, for ``linger`` seconds; returns whether it ended."""
        linger = self._limits.linger
        try:
            async with asyncio.timeout(linger):
                return await body.discard(stall=linger)
        except (TimeoutError, TransportError, Malformed):
            return False

    async def _pull(self, link: LaneHandle, peer: PeerId, request: Request) -> bool:
        link.listen()
        started = time.perf_counter()
        try:
            handler, slow = self._handlers.pull(peer, request.name)
            body = await handler(peer, request.header)
            if body.length > request.length:
                raise RemoteRefused("too_large", f"a body of {body.length} bytes")
        except Exception as error:  # noqa: BLE001  # whatever a handler raises is its answer
            refused = self._refused(error, request.name)
            self._stats.sent(peer, request.name, len(refused.detail))
            try:
                await link.send(refused.encode(), stall=self._limits.stall)
            except TransportError:
                return False
            return True
        self._stats.requests_by_name[request.name] += 1
        took = time.perf_counter() - started
        packer = link.packer(self._stats.peer(peer).upload)
        head = Reply("", took, body.length, packed=packer is not None).encode()
        async with feeding(body) as feed:
            stall = self._limits.stall
            transfer = link.start_sending(head, feed, stall=stall, slow=slow, packer=packer)
            try:
                await link.finish(transfer)
            except TransferStalled:
                self._stats.stalled_bodies += 1
                return False
            except TransportError:
                return False
            except Exception:  # the source is the handler's code: its error is logged here
                logger.exception("the body of %s failed", request.name)
                return False
            finally:
                self._stats.sent(peer, request.name, max(transfer.what.moved - len(head), 0))
        return True

    def _refused(self, error: Exception, name: str) -> Reply:
        refused = refusal(error, name)
        self._stats.refused_requests += 1
        self._stats.stalled_bodies += refused.code == "stalled"
        return Reply.refusal(refused.code, refused.detail)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _nothing() -> None:
    """What is done when a lane is lost while no handler runs on it."""
