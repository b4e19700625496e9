"""One lane on the reactor's thread: a socket that feeds are sent from and drains are filled from.

Everything here runs on the thread of :mod:`protocols.lanes.reactor`. A lane does at most one thing
in each direction at a time, and tells the ends of both by a callback. It never waits: a feed
without bytes or a drain without room is left alone until it wakes the lane, and a socket that would
block until the selector reports it ready.

Progress is any byte either way. A receiver gives up when nothing comes for ``stall`` seconds, or
when less than ``min_rate`` bytes a second came over ``stall`` seconds of waiting; time in which its
drain had no room does not count. A sender gives up when nothing goes for ``stall`` seconds, or less
than ``min_rate`` for twice that long; waits under the node's own limit do not count. Where those
who move a body judge its pace, next to nothing is asked (:meth:`protocols.limits.Limits.least`).
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import ssl
import time
from collections.abc import Callable

from protocols.connections.sealing import MAX_FRAME_BYTES
from protocols.errors import AtollError, TransferStalled, Unreachable, Why
from protocols.identity import PeerId
from protocols.lanes.losses import Losses
from protocols.lanes.moves import Done, LaneProgress, Receiving, Sending, load
from protocols.lanes.reactor import Load, Reactor
from protocols.lanes.socket import (
    WOULD_BLOCK,
    SocketError,
    broken,
    fill,
    host_of,
    other_end_left,
    same_machine,
    shake,
    silent,
    throw_away_unsent,
    wrapped,
)
from protocols.lanes.wire import Frame

_TURN_BYTES = 1 << 21  # after this many the other lanes have their turn
_LOOK_BYTES = 1 << 16  # of a turn, that a read costs at least if it leaves bytes behind
_PLAIN_PIECE = 1 << 20
_BLIND_S = 0.25  # between two checks whether the other end of an unread lane has left
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Lane:
    """One connection. ``on_end`` is told once, last, when it has been cut."""

    def __init__(
        self, reactor: Reactor, sock: socket.socket, who: str, on_end: Callable[[], None]
    ) -> None:
        self.who = who  # for messages: the peer or its address
        self._reactor = reactor
        self._sock = sock
        self._on_end = on_end
        self._receiving: Receiving | None = None
        self._sending: Sending | None = None
        self._shaking: Callable[[PeerId | None, BaseException | None], None] | None = None
        self.blind = True  # bytes may have come that nobody wants yet: the socket is not read
        self._watchful = False
        self._rest_until = math.inf  # an idle lane is cut then
        self._events, self._again, self._alive = 0, False, True
        self._secure, self.local, self.host = False, same_machine(sock), host_of(sock)
        self._progress, self._losses = LaneProgress(), Losses(self.host, reactor.shortest)

    def begin(self) -> None:
        """From now on the reactor looks after it."""
        self._reactor.add(self)

    # --- what a lane is told to do ------------------------------------------------------------

    def secure(
        self,
        context: ssl.SSLContext,
        server_name: str | None,
        done: Callable[[PeerId | None, BaseException | None], None],
    ) -> None:
        """Shake hands, as the server if ``server_name`` is None; ``done(peer, error)``."""
        if not self._alive:
            done(None, self._reset())
            return
        self._watch(0)
        try:
            self._sock = wrapped(self._sock, context, server_name)
        except (OSError, ValueError) as error:
            self.cut()
            done(None, error)
            return
        self._secure = True
        self._shaking = done
        self._shake()

    def receive(self, receiving: Receiving) -> None:
        """Fill a drain."""
        if not self._alive:
            receiving.end(self._reset())
            return
        self.blind = False
        self._receiving = receiving
        self._rest_until = math.inf
        self._progress.at = receiving.since = time.monotonic()
        self._reactor.moves(self, self._progress.at + receiving.stall)
        try:
            receiving.drain.attach(lambda: self._woken(receiving))
        except Exception as error:  # noqa: BLE001  # the drain's own: the receiver gets it
            self._received(error)
            return
        self._turn()

    def send(self, sending: Sending) -> None:
        """Send bytes and a feed."""
        if not self._alive:
            sending.end(self._reset())
            return
        self._sending = sending
        self._rest_until = math.inf
        self._progress.at = time.monotonic()
        self._reactor.moves(self, self._progress.at + sending.stall)
        if sending.feed is not None:
            try:
                sending.feed.attach(lambda: self._woken(sending))
            except Exception as error:  # noqa: BLE001  # the feed's own: the sender gets it
                self._sent(error)
                return
        self._turn()

    def stop(self, receiving: Receiving) -> None:
        """Leave a drain alone from now on; the rest of the body stays unread."""
        if self._receiving is receiving:
            self._received(self._reset())

    def rest(self, seconds: float) -> None:
        """Idle from now on: after ``seconds`` the lane is cut, and as by :meth:`listen`."""
        self._rest_until = time.monotonic() + seconds
        self._reactor.look(self._rest_until)
        self.listen()

    def listen(self) -> None:
        """Expect nothing from the other end: cut the lane if it sends something, or leaves."""
        self.blind = False
        self._wish()

    def look_away(self) -> None:
        """Leave what comes next unread until our user asks; cut if the other end leaves."""
        self.blind = self._watchful = True
        self._reactor.look(time.monotonic() + _BLIND_S)
        self._wish()

    def cut(self, error: BaseException | None = None) -> None:
        """Close; what is under way fails with ``error``, by default as a broken connection."""
        if not self._alive:
            return
        self._alive = False
        self._watch(0)
        self._reactor.remove(self)
        if self._sending is not None:  # what the kernel still has must not hold up the bad news
            throw_away_unsent(self._sock)
        self._sock.close()
        failure = error or self._reset()
        if self._shaking is not None:
            shaken, self._shaking = self._shaking, None
            shaken(None, failure)
        self._received(failure)
        self._sent(failure)
        self._on_end()

    # --- what the reactor calls ---------------------------------------------------------------

    def ready(self, readable: bool, writable: bool) -> None:
        """The socket can be read or written, or there was more to do when the turn ended."""
        self._again = False
        if self._shaking is not None:
            self._shake()
            return
        if writable and self._sending is not None:
            self._sending.blocked = False
        if readable and self._receiving is None and not self.blind:
            self._listen()
        self._turn()

    def granted(self) -> None:
        """It is our turn to send under the upload limit."""
        if self._sending is not None:
            self._sending.queued = False
            self._progress.at = time.monotonic()
            self._turn()

    def load(self) -> Load:  # see protocols.lanes.moves.load
        return load(self._sock, self._receiving, self._sending, self._losses)

    def due(self, now: float) -> float:
        """Look at what ran out of time; returns when to look again."""
        if now >= self._rest_until:
            self.cut()
            return math.inf
        if self._blinded() and other_end_left(self._sock):
            self.cut()
            return math.inf
        until = self._progress.deadline(self._receiving, self._sending)
        if until <= now and self._progress.acknowledged(self._sock, now, self._sending):
            self._progress.at = now
            until = self._progress.deadline(self._receiving, self._sending)
        if until <= now:
            error = TransferStalled(f"{self.who}: stalled for {now - self._progress.at:.3g} s")
            self._received(error)
            self._sent(error)
            until = self._progress.deadline(self._receiving, self._sending)
        if self._blinded():
            until = min(until, now + _BLIND_S)
        return min(until, self._rest_until)

    def _blinded(self) -> bool:
        return self.blind and self._watchful and self._receiving is None

    # --- the turn of a lane -------------------------------------------------------------------

    def _turn(self) -> None:
        """Do what can be done now in both directions, and say what to wait for."""
        if self._alive and self._sending is not None:
            self._guard(self._send_some, self._sent)
        if self._alive and self._receiving is not None:
            self._guard(self._receive_some, self._received)
        self._wish()

    def _guard(self, move: Callable[[], None], end: Done) -> None:
        try:
            move()
        except SocketError as failed:
            self._broken(failed.error)
        except Exception as error:  # noqa: BLE001  # of a feed or drain: its owner gets it
            end(error)

    def _broken(self, error: OSError) -> None:
        """The socket failed; where a message is due (without TLS), what came before is read."""
        receiving = self._receiving
        if receiving is not None and isinstance(receiving.drain, Frame) and not self._secure:
            with contextlib.suppress(SocketError, AtollError):
                self._receive_some()
        self.cut(broken(error, self.who))

    def _wish(self) -> None:
        if not self._alive or self._shaking is not None:
            return
        receiving, sending = self._receiving, self._sending
        events = 0
        wanted = not self.blind if receiving is None else not receiving.paused
        if wanted:
            events |= _READ
        if sending is not None and sending.blocked:
            events |= _WRITE
        self._watch(events)

    def _watch(self, events: int) -> None:
        if events != self._events:
            self._reactor.watch(self, self._sock, self._events, events)
            self._events = events

    def _more_later(self) -> None:
        if not self._again:
            self._again = True
            self._reactor.again(self)

    def _woken(self, what: Receiving | Sending) -> None:
        """A feed or drain woke us, from any thread."""
        self._reactor.post(lambda: self._resume(what))

    def _resume(self, what: Receiving | Sending) -> None:
        now = time.monotonic()
        if what is self._receiving and what.paused:
            what.paused = False
        elif what is self._sending and what.starved:
            what.starved = False
        else:
            return
        what.held += now - what.since
        what.since = now
        if isinstance(what, Receiving):
            self._progress.at = now
            self._reactor.look(now + what.stall)
        self._turn()

    # --- sending ------------------------------------------------------------------------------

    def _send_some(self) -> None:
        sending = self._sending
        assert sending is not None
        if sending.blocked or sending.starved or sending.queued:
            return
        budget = _TURN_BYTES
        largest = MAX_FRAME_BYTES if self._secure else _PLAIN_PIECE
        while sending.piece or sending.more():
            if budget <= 0:
                self._more_later()
                return
            if not sending.piece:
                if not sending.granted:
                    sending.granted = self._reactor.allow(self, len(sending.view))
                if not sending.granted:
                    sending.queued = True
                    return
                size = min(len(sending.view), sending.granted, largest)
                sending.granted -= size
                sending.piece = sending.view[:size]
                sending.view = sending.view[size:]
            try:
                count = self._sock.send(sending.piece)
            except WOULD_BLOCK:
                sending.blocked = True
                self._progress.blocked(self._sock)
                return
            except OSError as error:
                raise SocketError(error) from error
            budget -= count
            self._reactor.gave(self, count)
            sending.moved += count
            sending.piece = sending.piece[count:]
            self._progress.at = sending.moved_at = time.monotonic()
        if not sending.starved:
            self._progress.blocked(self._sock)
            self._sent(None)

    def _sent(self, error: BaseException | None) -> None:
        if self._sending is not None:
            sending, self._sending = self._sending, None
            sending.let_go()
            if self._receiving is None:
                self.blind = True  # the other end may speak next
            sending.end(error)

    # --- receiving ----------------------------------------------------------------------------

    def _receive_some(self) -> None:
        receiving = self._receiving
        assert receiving is not None
        if receiving.paused:
            return
        budget, began = _TURN_BYTES, receiving.since
        while receiving.left:
            if budget <= 0:
                self._more_later()
                return
            room = receiving.room()  # asked anew: it may have been taken back
            if room is None:
                receiving.paused, receiving.since = True, time.monotonic()
                return
            if not receiving.left:  # what was held is handed on, and nothing comes behind it
                break
            filled = fill(self._sock, room, secure=self._secure)
            if filled.came or filled.put:
                budget -= filled.put if filled.dry else max(filled.put, _LOOK_BYTES)
                self._reactor.took(self, filled.came)
                self._progress.at = time.monotonic()
                receiving.waited(self._progress.at, filled.came, self.who)
            if filled.put:
                receiving.took(filled.put)
            if filled.dry and receiving.left:
                if receiving.amid and not self.local:
                    self._reactor.gather(_TURN_BYTES - budget, time.monotonic() - began)
                return
        self._received(None)

    def _received(self, error: BaseException | None) -> None:
        if self._receiving is not None:
            receiving, self._receiving = self._receiving, None
            self.blind = not receiving.last or receiving.left > 0
            receiving.end(error)

    def _listen(self) -> None:
        """Nothing is expected now: cut the lane if bytes or the end of the stream have come."""
        try:
            if not silent(self._sock):
                self.cut()
        except SocketError as failed:
            self.cut(broken(failed.error, self.who))

    # --- the handshake ------------------------------------------------------------------------

    def _shake(self) -> None:
        done = self._shaking
        assert done is not None
        try:
            found = shake(self._sock)
        except (OSError, ValueError) as error:  # a ValueError: the peer was gone before
            self.cut(error)
            return
        if isinstance(found, int):
            self._watch(found)
        else:
            self._shaking = None
            self._wish()
            done(found, None)

    def _reset(self) -> Unreachable:
        return Unreachable(self.who, Why.RESET)
