"""What is under way on a lane in either direction: a drain being filled, a feed being sent.

For :mod:`protocols.lanes.lane` alone, on the data thread.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable

from protocols.errors import LocalProtocolError, TransferStalled
from protocols.lanes.losses import Losses
from protocols.lanes.packing import SMALLEST, Packer, Unpacker
from protocols.lanes.reactor import Load
from protocols.lanes.socket import Told, prefer_bbr, send_evenly, told, unacknowledged, unsent
from protocols.lanes.wire import Frame
from protocols.transport import Drain, Feed

Done = Callable[[BaseException | None], None]

_LONG = 1 << 15  # bytes still to come: with fewer, gathering would delay the end


class LaneProgress:
    """When a lane last made progress: bytes moved, or the peer acknowledged some."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        self._unacknowledged = 0
        self._slow = False  # at the last look the peer had taken less than it has to

    def blocked(self, sock: socket.socket) -> None:
        """The socket takes no more for now, or has taken everything."""
        self._unacknowledged, self._slow = unacknowledged(sock), False

    def acknowledged(self, sock: socket.socket, now: float, sending: Sending | None) -> bool:
        """Whether the peer has acknowledged some of what the kernel had still to send.

        While something is being sent, less than ``min_rate`` bytes a second since the last
        progress passes once, not twice in a row: the peer may have had no room until just now.
        """
        before, self._unacknowledged = self._unacknowledged, unacknowledged(sock)
        gone, was_slow = before - self._unacknowledged, self._slow
        least = sending.min_rate * (now - self.at) if sending is not None else 0.0
        self._slow = self._unacknowledged > 0 and gone < least
        return gone > 0 and not (self._slow and was_slow)

    def deadline(self, receiving: Receiving | None, sending: Sending | None) -> float:
        """When what is under way has stood still for too long."""
        until = math.inf
        if sending is not None:
            if sending.queued:
                return math.inf  # the limit is ours
            until = self.at + sending.stall
        if receiving is not None and not receiving.paused:
            until = min(until, self.at + receiving.stall)
        return until


def load(
    sock: socket.socket, receiving: Receiving | None, sending: Sending | None, losses: Losses
) -> Load:
    """What is under way. ``receives`` is set for bodies only: whether a message comes is open."""
    coming, left = receiving is not None and not receiving.paused, unacknowledged(sock)
    facts = told(sock) if sending is not None or left > 0 else Told()
    if losses.look(facts):
        prefer_bbr(sock)
    if losses.far():
        send_evenly(sock)
    return Load(
        max(0, left - facts.beyond),
        (sending is not None and not sending.starved) or (left > 0 and unsent(sock) > 0),
        coming and receiving is not None and not isinstance(receiving.drain, Frame),
        min(facts.round_trip, losses.shortest.get(losses.host, math.inf)),
    )


class _Move:
    """What is under way in one direction; ``done`` is called once, when it has ended."""

    def __init__(self, done: Done) -> None:
        self._done = done

    def end(self, error: BaseException | None) -> None:
        """Tell that it has ended.

        The callback is let go of: it leads to whoever gets the error, whose traceback leads here.
        """
        done, self._done = self._done, _nobody
        done(error)


def _nobody(error: BaseException | None) -> None:
    """Its end was told already."""


class Receiving(_Move):
    """A drain that is being filled with ``length`` bytes.

    ``last``: the other end is to send nothing after them. Into an :class:`Unpacker` they come
    packed, and ``moved`` and ``left`` are of what comes over the lane.
    """

    def __init__(
        self, drain: Drain, length: int, *, stall: float, min_rate: float, last: bool, done: Done
    ) -> None:
        super().__init__(done)
        self.drain = drain
        self.length = self.left = length
        self.moved = 0
        self._learn()
        self.stall = stall
        self.min_rate = min_rate
        self.last = last
        self.paused = False  # the drain has no room
        self.held = 0.0  # seconds it had none, all in all
        self.since = self.begun = time.monotonic()  # when the pause or the wait for bytes began
        self._begun = False  # something came, though perhaps not enough to be opened
        self._waited = 0.0
        self._window = 0

    @property
    def age(self) -> float:
        """Seconds from the start to the last byte."""
        return self.since - self.begun

    @property
    def amid(self) -> bool:
        """Whether it has begun and its end is not near."""
        return self.moved > 0 and self.length - self.given >= _LONG

    @property
    def given(self) -> int:
        """Bytes of the ``length`` that the drain has got."""
        drain = self.drain
        return self.length - drain.left if isinstance(drain, Unpacker) else self.moved

    def room(self) -> memoryview | None:
        """Where the next bytes go, none of them if nothing is ``left``; None: there is no room."""
        room = self.drain.room()
        self._learn()
        return None if room is None else room[: self.left]

    def took(self, count: int) -> None:
        """Tell the drain; raises what it raises."""
        self.moved += count
        self.left -= count
        try:
            self.drain.took(count)
        finally:
            self._learn()  # also of a packed body that is refused: more of it is to come

    def _learn(self) -> None:
        if isinstance(self.drain, Frame):  # which learns its own length on the way
            self.left = self.drain.length - self.moved
        elif isinstance(self.drain, Unpacker):
            self.left = self.drain.to_come

    def waited(self, now: float, came: int, who: str) -> None:
        """Bytes came; raises :class:`TransferStalled` if they keep coming too slowly."""
        if self._begun or not isinstance(self.drain, Frame):  # a message may be long in coming
            self._waited += now - self.since
        self.since = now
        if self._waited >= self.stall:
            if self._window < self.min_rate * self._waited:
                raise TransferStalled(f"{who}: {self._window / self._waited:.0f} bytes a second")
            self._waited, self._window = 0.0, 0
        self._begun = True
        self._window += came


class Sending(_Move):
    """A few bytes, and behind them a feed, packed where there is a ``packer``."""

    def __init__(
        self,
        head: bytes,
        feed: Feed | None,
        *,
        stall: float,
        min_rate: float,
        done: Done,
        packer: Packer | None = None,
    ) -> None:
        super().__init__(done)
        self.view = memoryview(head)
        self.chunk = memoryview(b"")  # of the feed, not in ``view`` yet
        self._packer = packer
        self._piece = bytearray()  # of the feed, to be packed
        self.feed = feed
        self.length = self.left = feed.length if feed is not None else 0  # bytes of the feed
        self.moved = 0
        self.moved_at = time.monotonic()  # when the socket last took some
        self.piece = memoryview(b"")  # handed to the socket, which has not taken it yet
        self.granted = 0  # bytes that may be sent before it is somebody else's turn
        self.stall = stall
        self.min_rate = min_rate
        self.starved = False  # the feed has nothing
        self.held = 0.0  # seconds it had nothing, all in all
        self.since = 0.0
        self.blocked = False  # the socket takes no more
        self.queued = False  # waits for its turn under the limit of the node

    def quiet(self, now: float) -> float:
        """Seconds in which the peer has owed us something: room for more, or its answer."""
        return 0.0 if self.starved or self.queued else now - self.moved_at

    def more(self) -> bool:
        """Have bytes in ``view``, from the feed if need be; False: it has none now, or no more."""
        if self.view:
            return True
        if self._packer is not None:
            return self._pack(self._packer)
        if not self.chunk and not self._next_chunk():
            return False
        self.view, self.chunk = self.chunk, memoryview(b"")
        return True

    def _pack(self, packer: Packer) -> bool:
        """Have a packed piece in ``view``, a short one only at the end of the body."""
        piece = self._piece
        while len(piece) < packer.size and (self.chunk or self._next_chunk()):
            room = packer.size - len(piece)
            piece += self.chunk[:room]
            self.chunk = self.chunk[room:]
        if not piece or (len(piece) < SMALLEST and self.left):
            return False
        self.starved = False  # the feed is asked again after this piece
        self.view, self._piece = memoryview(packer.pack(bytes(piece))), bytearray()
        return True

    def _next_chunk(self) -> bool:
        if not self.left or self.feed is None:
            return False
        chunk = self.feed.next()
        if chunk is None:
            self.starved, self.since = True, time.monotonic()
            return False
        self.chunk = memoryview(chunk).cast("B")
        if not self.chunk:
            raise LocalProtocolError(f"body {self.left} bytes shorter than announced")
        if len(self.chunk) > self.left:
            raise LocalProtocolError(f"body longer than the announced {self.length} bytes")
        self.left -= len(self.chunk)
        return True

    def let_go(self) -> None:
        """Refer to no bytes any more: they are the feed's."""
        self.view = self.piece = self.chunk = memoryview(b"")
