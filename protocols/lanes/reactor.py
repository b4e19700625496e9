"""The thread that moves bulk data: non-blocking sockets, watched by one selector.

The event loop is for decisions; gigabytes would starve it, and each hop between threads costs
more than a chunk takes. So long bodies are sent and received here, straight from and into the
buffers of their feeds and drains (:mod:`protocols.lanes.lane`). Everything that runs on this thread
runs one after the other, so what only it touches needs no locks; :meth:`Reactor.post` brings a
function here from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import NamedTuple, Protocol

from protocols.bucket import Bucket
from protocols.lanes.arrivals import IncomingSpeed
from protocols.lanes.pacing import Pacer
from protocols.lanes.standing_queue import standing
from protocols.round_robin import RoundRobin

logger = logging.getLogger(__name__)

_SWEEP_S = 1.0  # the longest time between two looks at what is due
_TICK_S = 0.02  # the shortest
_PACE_S = 0.025  # between two looks at how much has arrived
_CLOSE_S = 0.005  # the same while only short bodies are under way, which end soon
_SEVERAL_S = 60.0  # after sending to several hosts at once: a lone one is one of several
_GATHER_S = 0.004  # the longest that bytes of a long body may gather before they are read
_ENOUGH = 1 << 15  # bytes that are worth being woken for


class Load(NamedTuple):
    """What one connection moves."""

    under_way: int  # bytes that were given to the system and have not arrived
    sends: bool  # there is more to send
    receives: bool  # more is to come
    round_trip: float  # seconds, the shortest; 0 where the system does not tell, or nothing is sent


class Watched(Protocol):
    """Something with a socket that the reactor serves. All of it is called on its thread."""

    who: str  # the peer, or its address until that is known
    local: bool  # both ends are on this machine
    host: str  # of the other end

    def ready(self, readable: bool, writable: bool) -> None:
        """The socket can be read or written, or there was more to do when the turn ended."""
        ...

    def due(self, now: float) -> float:
        """Look at what ran out of time; returns when to look again (``math.inf``: never)."""
        ...

    def granted(self) -> None:
        """It is this one's turn to send under the limit of the node."""
        ...

    def load(self) -> Load:
        """What it moves now."""
        ...

    def cut(self) -> None:
        """The reactor ends."""
        ...


class Reactor:
    """One thread, one selector, one limit: the operator's, or the link's (:mod:`.pacing`)."""

    def __init__(self, max_upload: float | None = None, cores: int = 1) -> None:
        self.cores = cores  # that this process may use
        self.hosts = 1  # that were sent to at the last look; any thread may ask
        self.bucket = Bucket(max_upload)
        self.pacer = Pacer()
        self.incoming = IncomingSpeed()
        self.shortest: dict[str, float] = {}  # see protocols.lanes.losses
        self._max_upload = max_upload or math.inf
        self._given = self._taken = 0  # bytes, to and from all sockets
        self._loads: dict[Watched, int] = {}  # connections in use: bytes under way
        self._pace_at = math.inf
        self._several_at = -math.inf  # when several hosts were last sent to
        self._gather_until = 0.0  # until then sockets are not looked at
        self._selector: selectors.BaseSelector
        self._wake_selector: selectors.BaseSelector  # for posts alone, no sockets
        self._wake_in: socket.socket
        self._wake_out: socket.socket
        self._lock = threading.Lock()
        self._posted: deque[Callable[[], None]] = deque()
        self._awake = False  # a byte is in the pipe already
        self._stopped = True  # until it is started
        self._watched: set[Watched] = set()
        self._again: list[Watched] = []  # had more to do when their turn ended
        self._line = RoundRobin[Watched]()  # lanes waiting under the upload limit
        self._turn: Watched | None = None
        self._sweep_at = 0.0
        self._on_end: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, name="atoll-lanes", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._wake_selector = selectors.DefaultSelector()
        for selector in (self._selector, self._wake_selector):
            selector.register(self._wake_out, selectors.EVENT_READ)
        self._stopped = False
        self._thread.start()

    async def aclose(self) -> None:
        """Cut everything and wait for the thread to end."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._stopped:
                return
            self._on_end = partial(loop.call_soon_threadsafe, ended.set_result, None)
            self._stopped = True
        self._poke()
        await ended
        self._thread.join()

    def post(self, callback: Callable[[], None]) -> bool:
        """Run ``callback`` on the reactor's thread soon; False if the thread is not running."""
        with self._lock:
            if self._stopped:
                return False
            self._posted.append(callback)
            poke, self._awake = not self._awake, True
        if poke:
            self._poke()
        return True

    def _poke(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake up anyhow
            self._wake_in.send(b"\0")

    # --- for those who are watched, on the thread ---------------------------------------------

    def watch(self, one: Watched, sock: socket.socket, old: int, new: int) -> None:
        """Change what is waited for on a socket from ``old`` to ``new`` (selector events)."""
        if old and new:
            self._selector.modify(sock, new, one)
        elif new:
            self._selector.register(sock, new, one)
        elif old:
            self._selector.unregister(sock)

    def add(self, one: Watched) -> None:
        """From now on ask ``one`` what is due."""
        self._watched.add(one)

    def remove(self, one: Watched) -> None:
        """Never call ``one`` again."""
        self._watched.discard(one)
        self._given -= self._loads.pop(one, 0)  # those bytes never arrived

    def moves(self, one: Watched, until: float) -> None:
        """From now on ``one`` sends or receives something; ask what is due at ``until``."""
        if not one.local:
            self._loads.setdefault(one, 0)
            self._pace_at = min(self._pace_at, time.monotonic())
        self.look(until)

    def gave(self, one: Watched, count: int) -> None:
        """A socket accepted ``count`` bytes."""
        if not one.local:  # traffic within a machine says nothing about the link
            self._given += count

    def took(self, one: Watched, count: int) -> None:
        """``count`` bytes were read from a socket."""
        if not one.local:
            self._taken += count

    def carried(self, count: int) -> None:
        """``count`` bytes went out past this thread (messages, relayed calls): lanes pay for them.

        They count as part of what the link carries. Otherwise the link would seem slower by them,
        and lanes would be slowed down a second time. May be called from any thread.
        """
        self.bucket.spend(count)
        self.post(lambda: self._carry(count))

    def _carry(self, count: int) -> None:
        self._given += count

    def gather(self, count: int, seconds: float) -> None:
        """``count`` bytes of a long body came in ``seconds``: where these are few, let more gather.

        A link that is slower than the processor would wake this thread with every few packets,
        which costs several times what reading them does. Never gathers more than a socket holds.
        """
        wait = min(_GATHER_S, _ENOUGH * seconds / max(1, count))
        if count < _ENOUGH and wait > _GATHER_S / 8:
            self._gather_until = time.monotonic() + wait

    def again(self, one: Watched) -> None:
        """Give ``one`` another turn once the others had theirs."""
        self._again.append(one)

    def look(self, when: float) -> None:
        """Ask what is due at ``when`` at the latest."""
        self._sweep_at = min(self._sweep_at, when)

    @property
    def speed(self) -> float:
        """Bytes a second that the node can send, as far as is known; any thread may ask."""
        return min(self.pacer.speed or math.inf, self._max_upload)

    def unlimited(self, one: Watched) -> bool:
        """Whether neither a link nor a setting limits what it sends."""
        return one.local and self._max_upload == math.inf

    def allow(self, one: Watched, want: int) -> int:
        """How many bytes ``one`` may send now; 0: its turn comes later, by ``granted``."""
        if not self.bucket.limited or self.unlimited(one):
            return want
        if self._turn is one:
            self._turn = None
            allowed = self.bucket.take(want)
            if allowed:
                return allowed
        self._line.add(one.who, one)
        return 0

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._once()
        finally:
            self._end()

    def _once(self) -> None:
        now = time.monotonic()
        selector = self._wake_selector if now < self._gather_until else self._selector
        for key, events in selector.select(self._timeout(now)):
            if key.data is None:
                with contextlib.suppress(OSError):
                    self._wake_out.recv(4096)
            elif key.data in self._watched:
                readable, writable = (
                    bool(events & selectors.EVENT_READ),
                    bool(events & selectors.EVENT_WRITE),
                )
                self._guarded(key.data.ready, readable, writable)
        self._run_posted()
        again, self._again = self._again, []
        for one in again:
            if one in self._watched:
                self._guarded(one.ready, False, False)
        self._serve_line()
        now = time.monotonic()
        if now >= self._pace_at:
            self._pace(now)
        if now >= self._sweep_at:
            self._sweep(now)

    def _pace(self, now: float) -> None:
        """Look at how much has arrived, and set the node's rate by it."""
        coming, wanting = False, set[str]()
        round_trips: list[float] = []
        for one in list(self._loads):
            load = one.load()
            self._loads[one] = load.under_way
            coming = coming or load.receives
            if load.sends:
                wanting.add(one.host)
                round_trips.append(load.round_trip)
            if not (load.under_way or load.sends or load.receives):
                del self._loads[one]
        before, under_way = self.pacer.rate, sum(self._loads.values())
        self.hosts = len(wanting) or self.hosts
        if len(wanting) > 1:
            self._several_at = now
        several = len(wanting) != 1 or now >= self._several_at + _SEVERAL_S
        alone = "" if several else min(wanting)
        arrived = self._given - under_way
        stands = standing(list(self._loads.values()))
        tells = stands > 0 or any(round_trips)  # on a quick link nothing may stand anywhere
        self.pacer.note(
            now,
            arrived,
            bool(wanting),
            under_way,
            alone=alone,
            stands=stands if tells else None,
            round_trip=fmean(round_trips) if round_trips else 0.0,
        )
        self.incoming.note(now, self._taken, coming)
        if self.pacer.rate != before:
            rate = min(self.pacer.rate, self._max_upload)
            self.bucket.change(rate if rate < math.inf else None)
        again = now + (_CLOSE_S if self.pacer.looks_closely else _PACE_S)
        self._pace_at = again if self._loads else math.inf

    def _timeout(self, now: float) -> float | None:
        if self._again or self._posted:
            return 0.0
        wait = min(self._sweep_at, self._pace_at) - now
        if now < self._gather_until:
            wait = min(wait, self._gather_until - now)
        if self._line:
            wait = min(wait, self.bucket.wait())
        return None if wait == math.inf else max(wait, 0.0)

    def _run_posted(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, deque()
            self._awake = False
        for callback in posted:
            self._guarded(callback)

    def _serve_line(self) -> None:
        """Give waiting lanes one grant each, peer after peer, until the bucket is empty."""
        while self._line and self.bucket.wait() == 0:
            one = self._line.next()
            if one in self._watched:
                self._turn = one
                self._guarded(one.granted)
                self._turn = None

    def _sweep(self, now: float) -> None:
        self._sweep_at = now + _SWEEP_S if self._watched else math.inf
        for one in list(self._watched):
            when = self._due(one, now)
            self._sweep_at = min(self._sweep_at, max(when, now + _TICK_S))

    def _due(self, one: Watched, now: float) -> float:
        try:
            return one.due(now)
        except Exception:  # one lane's bug must not end the others
            logger.exception("a lane failed")
            return math.inf

    def _guarded(self, call: Callable[..., None], *args: bool) -> None:
        try:
            call(*args)
        except Exception:  # what one lane or callback does must not end the others
            logger.exception("a callback of the data thread failed")

    def _end(self) -> None:
        with self._lock:
            self._stopped = True
        self._run_posted()
        for one in list(self._watched):
            self._guarded(one.cut)
        self._selector.close()
        self._wake_selector.close()
        self._wake_in.close()
        self._wake_out.close()
        self._on_end()
