"""A lane as the event loop sees it: things to wait for.

What is asked of a :class:`LaneHandle` is done by its :class:`~protocols.lanes.lane.Lane` on the
data thread. Cancelling leaves nothing behind: when a method returns, however it does, the feed or
drain it was given is not used any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Callable

from protocols.errors import LocalProtocolError, Malformed, Unreachable, Why
from protocols.identity import PeerId, public_key
from protocols.lanes.bodies import ChunkDrain, Nowhere
from protocols.lanes.lane import Lane
from protocols.lanes.moves import Done, Receiving, Sending
from protocols.lanes.packing import Packer, Unpacker, packer
from protocols.lanes.reactor import Reactor
from protocols.lanes.wire import PREAMBLE, Frame, claim, claim_frame, preamble_frame
from protocols.limits import Limits
from protocols.transport import Drain, Feed


class End:
    """How a transfer ended; for the event loop alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.come: asyncio.Future[None] = loop.create_future()
        self.failed = False
        self.error: BaseException | None = None  # until it is raised

    def settle(self, error: BaseException | None) -> None:
        """It has ended; only the first end counts."""
        if not self.come.done():
            self.error, self.failed = error, error is not None
            self.come.set_result(None)

    def result(self) -> None:
        """Raise its error, if there is one: once.

        The traceback refers to all who wait for the transfer, and so to this. If this kept the
        error, too, they and the body would be in memory until the garbage collector runs.
        """
        if not self.failed:
            return
        error, self.error = self.error, None
        try:
            raise error or LocalProtocolError("the transfer has failed before")
        finally:
            del error


class Transfer:
    """Something under way on a lane; ``what.moved`` are its bytes so far."""

    def __init__(self, what: Receiving | Sending, end: End) -> None:
        self.what = what
        self.end = end

    @property
    def ended(self) -> bool:
        """It goes on no more."""
        return self.end.come.done()


class LaneHandle:
    """One lane, and two notes of its owner's.

    ``reusable``: the next exchange may begin. ``idle_since``: when it last began to wait for one,
    by the loop's clock; None while it is new.
    """

    def __init__(self, reactor: Reactor, sock: socket.socket, who: str, limits: Limits) -> None:
        self._loop = asyncio.get_running_loop()
        self._reactor = reactor
        self._limits = limits
        self.lost = self._loop.create_future()
        self.on_lost: Callable[[], None] = lambda: None
        self.reusable = False
        self.idle_since: float | None = None
        self._aborted = False
        self.who = who
        self.lane = Lane(reactor, sock, who, self._end)  # to be used on the data thread only
        self._post(self.lane.begin)

    @property
    def alive(self) -> bool:
        """Neither end has cut it, as far as we know."""
        return not self._aborted and not self.lost.done()

    @property
    def local(self) -> bool:
        """Both ends are on this machine."""
        return self.lane.local  # never changes, so any thread may ask

    @property
    def unlimited(self) -> bool:
        """Neither a link nor a setting limits what it sends."""
        return self._reactor.unlimited(self.lane)

    def packer(self, to_peer: float | None) -> Packer | None:
        """For a body to a peer, to which they lately went at this speed; None: it does not pay."""
        reactor = self._reactor
        if self.local:
            return None
        return packer(reactor.speed, to_peer or math.inf, reactor.hosts, reactor.cores)

    def name(self, peer: PeerId) -> None:
        """The peer is known now: its lanes share its turns under the upload limit."""
        self.who = peer

        def named() -> None:
            self.lane.who = peer

        self._post(named)

    # --- the handshake ------------------------------------------------------------------------

    async def introduce(
        self, context: ssl.SSLContext | None, server_name: str, me: PeerId
    ) -> PeerId:
        """The client's part, the preamble included; returns who answers.

        Raises ``OSError`` (``ssl.SSLError``, :class:`~protocols.connections.tls.WrongPeer`) as
        sockets do.
        """
        if context is None:
            await self.send(PREAMBLE[False] + claim(me), stall=_LONG)
            return await self._claimed()
        await self.send(PREAMBLE[True], stall=_LONG)
        return await self._secured(context, server_name)

    async def accept(self, context: ssl.SSLContext | None, me: PeerId) -> PeerId:
        """The server's part; returns who calls. Raises Malformed or as :meth:`introduce`."""
        preamble = await self.message(preamble_frame(), stall=_LONG)
        if preamble != PREAMBLE[context is not None]:
            raise Malformed("another kind of connection")
        if context is not None:
            return await self._secured(context, None)
        peer = await self._claimed()
        await self.send(claim(me), stall=_LONG)
        return peer

    async def _claimed(self) -> PeerId:
        data = await self.message(claim_frame(), stall=_LONG)
        peer = PeerId(bytes(data[1:]).decode("ascii", errors="replace"))
        public_key(peer)  # raises Malformed
        return peer

    async def _secured(self, context: ssl.SSLContext, server_name: str | None) -> PeerId:
        proven: asyncio.Future[PeerId] = self._loop.create_future()

        def done(peer: PeerId | None, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(settle, peer, error)

        def settle(peer: PeerId | None, error: BaseException | None) -> None:
            if proven.done():
                return
            if peer is not None:
                proven.set_result(peer)
            else:
                proven.set_exception(error or self._closed())

        if not self._post(lambda: self.lane.secure(context, server_name, done)):
            raise self._closed()
        return await proven

    # --- transfers ----------------------------------------------------------------------------

    def start_sending(
        self,
        head: bytes,
        feed: Feed | None,
        *,
        stall: float,
        slow: bool = False,
        packer: Packer | None = None,
    ) -> Transfer:
        """Send a few bytes and a feed; ``slow`` as in :meth:`Limits.least`."""
        end, done = self._ending()
        least = self._limits.least(feed.length if feed is not None else 0, slow=slow)
        sending = Sending(head, feed, stall=stall, min_rate=least, done=done, packer=packer)
        transfer = Transfer(sending, end)
        if not self._post(lambda: self.lane.send(sending)):
            end.settle(self._closed())
        return transfer

    def start_receiving(
        self, drain: Drain, length: int, *, stall: float, last: bool = False, slow: bool = False
    ) -> Transfer:
        """Fill a drain with ``length`` bytes; with ``last`` nothing may follow them.

        ``slow`` as in :meth:`Limits.least`.
        """
        end, done = self._ending()
        least = self._limits.least(length, slow=slow)
        receiving = Receiving(drain, length, stall=stall, min_rate=least, last=last, done=done)
        transfer = Transfer(receiving, end)
        if not self._post(lambda: self.lane.receive(receiving)):
            end.settle(self._closed())
        return transfer

    def _ending(self) -> tuple[End, Done]:
        """The end of a transfer, and the callback by which the data thread tells of it.

        The callback must not refer to the :class:`Transfer`, whose ``what`` refers to it: such a
        cycle would keep the body in memory until the garbage collector runs.
        """
        loop = self._loop
        end = End(loop)

        def done(error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(end.settle, error)

        return end, done

    async def finish(self, transfer: Transfer) -> None:
        """Wait for the end of ``transfer``; if cancelled, stop it first."""
        try:
            await asyncio.wait([transfer.end.come])
        except asyncio.CancelledError:
            await self.stop(transfer)
            raise
        transfer.end.result()

    async def stop(self, transfer: Transfer) -> None:
        """End a transfer now. If it was sending, the lane is cut."""
        what = transfer.what
        if isinstance(what, Receiving):
            if not self._post(lambda: self.lane.stop(what)):
                transfer.end.settle(self._closed())
        elif not transfer.ended:
            self.abort()
        await _settled(transfer.end.come)

    async def send(self, message: bytes, *, stall: float) -> None:
        """Send a few bytes."""
        await self.finish(self.start_sending(message, None, stall=stall))

    async def message(self, frame: Frame, *, stall: float) -> bytearray:
        """Receive one message."""
        await self.finish(self.start_receiving(frame, frame.length, stall=stall))
        return frame.data

    def look_away(self) -> None:
        """Leave unread what comes next; see :meth:`Lane.look_away`."""
        self._post(self.lane.look_away)

    def listen(self) -> None:
        """Expect nothing to come; see :meth:`Lane.listen`."""
        self._post(self.lane.listen)

    def rest(self, seconds: float) -> None:
        """Idle from now on; cut after ``seconds``."""
        self._post(lambda: self.lane.rest(seconds))

    def abort(self) -> None:
        """Cut the connection."""
        self._aborted = True
        self._post(self.lane.cut)

    def _post(self, callback: Callable[[], None]) -> bool:
        return self._reactor.post(callback)

    def _closed(self) -> Unreachable:
        return Unreachable(self.who, Why.RESET, "this transport is closed")

    def _end(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._ended)

    def _ended(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
            self.on_lost()


_LONG = 3600.0  # seconds; callers put a deadline of their own on the handshake


async def _settled(future: asyncio.Future[None]) -> None:
    """Wait for the data thread's answer, which comes at once, also if cancelled meanwhile."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


class LaneBody:
    """A body on its way in on a lane; :class:`~protocols.transport.Incoming`."""

    def __init__(
        self,
        link: LaneHandle,
        length: int,
        *,
        stall: float,
        packed: bool,
        on_bytes: Callable[[int], None],
    ) -> None:
        self.length = length
        self._unpacker = Unpacker(Nowhere(), length) if packed else None
        self._counted = 0  # bytes that ``on_bytes`` was told of
        self._link = link
        self._stall = stall
        self._on_bytes = on_bytes
        self._transfer: Transfer | None = None
        self._drain: ChunkDrain | None = None

    @property
    def left(self) -> int:
        """Bytes that nobody has got yet; exact only while nothing is under way."""
        what = self._transfer.what if self._transfer is not None else None
        return self.length - (what.given if isinstance(what, Receiving) else 0)

    @property
    def came(self) -> int:
        """Bytes that came over the lane, exact as :attr:`left` is."""
        return self._transfer.what.moved if self._transfer is not None else 0

    @property
    def took(self) -> float:
        """Seconds from its start to its last byte, without those in which the drain had no room."""
        what = self._transfer.what if self._transfer is not None else None
        return what.age - what.held if isinstance(what, Receiving) else 0.0

    async def into(self, drain: Drain, *, stall: float = 0.0, slow: bool = False) -> None:
        """See :class:`~protocols.transport.Incoming`."""
        self._stall = max(self._stall, stall)
        transfer = self._begin(drain, slow=slow)
        try:
            await self._link.finish(transfer)
        finally:
            self._count()

    def _begin(self, drain: Drain, *, slow: bool = False) -> Transfer:
        if self._transfer is not None:
            raise LocalProtocolError("a body can be taken once only")
        self._transfer = self._link.start_receiving(
            self._into(drain), self.length, stall=self._stall, last=True, slow=slow
        )
        return self._transfer

    def _into(self, drain: Drain) -> Drain:
        if self._unpacker is None:
            return drain
        self._unpacker.drain = drain
        return self._unpacker

    def __aiter__(self) -> LaneBody:
        return self

    async def __anext__(self) -> memoryview:
        if self._drain is None:
            self._drain = ChunkDrain()
            self._begin(self._drain)
        assert self._transfer is not None
        chunk = await self._drain.next(self._transfer.end.come)
        self._count()
        if chunk is None:
            self._transfer.end.result()
            raise StopAsyncIteration
        return chunk

    def _count(self) -> None:
        more, self._counted = self.came - self._counted, self.came
        self._on_bytes(more)

    async def stop(self) -> None:
        """Take no more of it."""
        if self._transfer is not None and not self._transfer.ended:
            await self._link.stop(self._transfer)

    async def discard(self, *, stall: float) -> bool:
        """Read and drop what :meth:`stop` has left; returns whether that ended.

        Raises as a lane does.
        """
        if self._unpacker is not None and self._unpacker.spoiled:
            return False
        rest = self._link.start_receiving(self._into(Nowhere()), self.left, stall=stall)
        await self._link.finish(rest)
        return True
