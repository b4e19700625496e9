"""The relay: tells hidden nodes who calls them, and brings two that are hidden together.

Both dial it, and each is told where it sees the other, so that they can meet past it
(:mod:`protocols.relay.punching`). Where they do not, it carries what they send each other.

Everything is bounded: the nodes that wait here, the calls that one of them has not fetched (in all
and of one caller), the connections carried at once (in all and of one peer), their speed all
together (:mod:`protocols.relay.turns`), and how long one may be silent. Where no more may be
carried, an idle connection makes way, one of the peer or the address that has most. The relay
itself never dials, so no request can make it dial a stranger. Whom a relay serves is decided where
all calls are admitted (:meth:`protocols.http.transport.HttpTransport.admit`), and by ``may_wait``:
only peers that were greeted may be called through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from protocols.bucket import Bucket
from protocols.connections.sockets import prepare_lane
from protocols.errors import RemoteRefused
from protocols.identity import PeerId
from protocols.relay.punching import meeting_places
from protocols.relay.splice import splice
from protocols.relay.turns import Turns
from protocols.relay.wire import (
    MAX_CALLS,
    MAX_CALLS_OF_ONE,
    TOKEN_BYTES,
    RelayCall,
    RelayCalls,
    RelayDial,
    RelayEnd,
    RelayMeeting,
    RelayWait,
    heard,
    say,
    spoken,
)
from protocols.stats import TransportStats

WAIT, DIAL = "relay-wait", "relay-dial"  # names of calls
HOLD_S = 20.0  # how long a question is kept open
BRIEF_S = 8.0  # between two questions: a node that does not ask again by then is gone
JOIN_S = 10.0  # for both ends of a call to come
IDLE_S = 120.0  # without a byte: longer than connections are kept for their next use
MAX_WAITING = 256  # hidden nodes
MAX_WAITING_OF_ONE = 64  # of them, from one place
QUIET_S = 10.0  # without a byte: it may make way for another
MAX_CIRCUITS = 512  # connections carried or about to be
MAX_CIRCUITS_OF_ONE = 64  # of them, of one peer


@dataclass(eq=False)
class _Hidden:
    """A node that waits here. ``left``: when its last question ended; None while one is open.

    ``news`` is its newest question's. Where there is an older one its connection has broken, as the
    relay may notice late: what becomes of it changes nothing, and it is told of no call.
    """

    place: str  # from where it comes
    calls: deque[RelayCall] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    left: float | None = None


@dataclass(eq=False)
class _Circuit:
    """A call to be carried: the end that came first waits for the other."""

    peers: tuple[PeerId, PeerId]
    names: frozenset[str]  # of both peers, and of the places that they come from
    said: tuple[bytes, bytes]  # by the two ends, of their tokens
    until: float  # both must have come by then
    moved: float  # when the last byte came
    ends: list[tuple[socket.socket, RelayEnd]] = field(default_factory=list)
    met: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class RelayServer:
    """Answers ``relay-wait`` and ``relay-dial``, for the :mod:`protocols.http.transport`."""

    def __init__(
        self,
        stats: TransportStats,
        *,
        on_sent: Callable[[int], None] = lambda count: None,
        most: Callable[[], float] = lambda: math.inf,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rate = 0.0  # bytes a second for calls that are carried; 0: none are
        self.may_wait: Callable[[PeerId], bool] = lambda peer: True
        self.place_of: Callable[[PeerId], str] = lambda peer: ""  # empty: not known
        self._stats = stats
        self._on_sent = on_sent
        self._most = most  # bytes a second that the link allows now, whatever ``rate`` is
        self._now = now
        self._limit = 0.0  # of the bucket
        self._bucket = Bucket(None)
        self._turns = Turns(self._bucket)
        self._hidden: dict[PeerId, _Hidden] = {}
        self._circuits: set[_Circuit] = set()
        self._by_said: dict[bytes, _Circuit] = {}

    def offer(self, rate: float) -> None:
        """Carry calls at ``rate`` bytes a second, all together; 0: only tell who calls."""
        self.rate = rate
        self._limit = min(rate, self._most())
        self._bucket = Bucket(self._limit or None)
        self._turns = Turns(self._bucket)

    # --- those who wait -----------------------------------------------------------------------

    async def wait(self, peer: PeerId, body: bytes) -> bytes:
        """Answer ``relay-wait``: the calls for ``peer``, or none after a while."""
        asked: RelayWait = RelayWait.decode(body)
        if not self.may_wait(peer):
            raise RemoteRefused("stranger", "greet this node first")
        self._forget_gone()
        here = self._hidden.get(peer)
        if here is None or asked.begin:
            place = self.place_of(peer)
            if here is None and len(self._hidden) >= MAX_WAITING:
                raise RemoteRefused("full", f"{MAX_WAITING} nodes wait here already")
            if here is None and place and self._from(place) >= MAX_WAITING_OF_ONE:
                raise RemoteRefused("full", f"{MAX_WAITING_OF_ONE} nodes from {place} wait here")
            here = self._hidden[peer] = _Hidden(place)  # questions before it end by timeout
        news = here.news = asyncio.Event()
        if not asked.begin and not here.calls:
            try:
                here.left = None
                async with asyncio.timeout(HOLD_S):
                    await news.wait()
            except TimeoutError:
                pass  # nobody called
            except asyncio.CancelledError:  # the connection broke: calls would go nowhere
                if here.news is news and self._hidden.get(peer) is here:
                    del self._hidden[peer]
                raise
            if here.news is not news:
                return RelayCalls(self.rate, ()).encode()
        here.left = self._now()
        calls = [here.calls.popleft() for _ in range(min(len(here.calls), MAX_CALLS))]
        return RelayCalls(self.rate, tuple(calls)).encode()

    def tell(self, target: PeerId, call: RelayCall) -> None:
        """Have ``target`` told of a call; raises RemoteRefused where it does not wait here."""
        self._forget_gone()
        here = self._hidden.get(target)
        if here is None:
            raise RemoteRefused("absent", "it does not wait here")
        if len(here.calls) >= MAX_CALLS:
            raise RemoteRefused("full", "it has not fetched its last calls")
        if sum(one.caller == call.caller for one in here.calls) >= MAX_CALLS_OF_ONE:
            raise RemoteRefused("full", "it has not fetched your last calls")
        here.calls.append(call)
        here.news.set()

    def _from(self, place: str) -> int:
        return sum(here.place == place for here in self._hidden.values())

    def _forget_gone(self) -> None:
        latest = self._now() - BRIEF_S
        for peer, here in list(self._hidden.items()):
            if here.left is not None and here.left < latest:
                del self._hidden[peer]

    # --- those who call -----------------------------------------------------------------------

    async def dial(self, peer: PeerId, body: bytes) -> bytes:
        """Answer ``relay-dial``: have ``target`` dial the caller, or both dial here."""
        asked: RelayDial = RelayDial.decode(body)
        if asked.token:
            spoken(asked.token)  # raises where it is none
            self.tell(asked.target, RelayCall(peer, asked.token, asked.addresses))
            return b""
        self._forget_late()
        if not self.rate and not asked.punch:
            raise RemoteRefused("tells", "this relay carries nothing, it only tells who calls")
        both = (peer, asked.target)
        in_the_way = {found for one in both if (found := self._in_the_way(one, both)) is not None}
        if len(self._circuits) - len(in_the_way) >= MAX_CIRCUITS:
            if (quiet := self._quiet()) is None:
                raise RemoteRefused("full", f"{MAX_CIRCUITS} connections are carried already")
            in_the_way.add(quiet)
        ours, theirs = (secrets.token_bytes(TOKEN_BYTES) for _ in both)
        self.tell(asked.target, RelayCall(peer, theirs, ()))
        for found in in_the_way:
            self._cut(found)
        now, names = self._now(), frozenset({*both, *map(self.place_of, both)} - {""})
        circuit = _Circuit(both, names, (spoken(ours), spoken(theirs)), now + JOIN_S, now)
        self._circuits.add(circuit)
        self._by_said |= dict.fromkeys(circuit.said, circuit)
        return ours

    def _in_the_way(self, one: PeerId, both: tuple[PeerId, PeerId]) -> _Circuit | None:
        """Which connection of ``one`` has to go for another between ``both``; None: there is room.

        It is one of the pair with the most, so that no pair shuts others out. Raises RemoteRefused
        where no pair has two more than ``both``.
        """
        circuits = [circuit for circuit in self._circuits if one in circuit.peers]
        if len(circuits) < MAX_CIRCUITS_OF_ONE:
            return None
        by_pair = Counter(frozenset(circuit.peers) for circuit in circuits)
        pair, most = by_pair.most_common(1)[0]
        if most < by_pair[frozenset(both)] + 2:
            raise RemoteRefused("full", f"{MAX_CIRCUITS_OF_ONE} connections of one peer")
        of_pair = (circuit for circuit in circuits if frozenset(circuit.peers) == pair)
        return min(of_pair, key=lambda circuit: circuit.moved)

    def _quiet(self) -> _Circuit | None:
        """The longest idle connection of the peer or place that has most of them; None: none."""
        count = Counter(name for circuit in self._circuits for name in circuit.names)
        latest = self._now() - QUIET_S
        quiet = (one for one in self._circuits if one.met.is_set() and one.moved <= latest)

        def has_most(circuit: _Circuit) -> tuple[int, float]:
            return max(count[name] for name in circuit.names), -circuit.moved

        return max(quiet, key=has_most, default=None)

    def _cut(self, circuit: _Circuit) -> None:
        if not circuit.met.is_set():
            self._drop(circuit)
            return
        self._circuits.discard(circuit)
        for end, _ in circuit.ends:
            with contextlib.suppress(OSError):  # it has ended just now
                end.shutdown(socket.SHUT_RDWR)  # whoever carries it closes it

    # --- the connections ----------------------------------------------------------------------

    async def join(self, sock: socket.socket, said: bytes, bounded: Callable[[], None]) -> bool:
        """Carry a connection that ``said`` its call, to its end; False: none is expected.

        Where nothing is carried, the end is when both have been told of each other. ``bounded`` is
        told that one is expected, and bounded from here on. The socket is closed at the end. Raises
        OSError, TimeoutError, and Malformed where it does not say what it is for.
        """
        self._forget_late()
        circuit = self._by_said.pop(said, None)
        if circuit is None:
            return False
        bounded()
        try:
            prepare_lane(sock)
            async with asyncio.timeout(JOIN_S):
                end = await heard(sock, RelayEnd)
            circuit.ends.append((sock, end))
            if len(circuit.ends) == 1:
                async with asyncio.timeout(JOIN_S):
                    await circuit.met.wait()
                await circuit.over.wait()
            else:
                circuit.until, circuit.moved = math.inf, self._now()
                circuit.met.set()
                if await self._told_of_each_other(*circuit.ends):
                    await self._carry(circuit)
        finally:
            sock.close()
            self._drop(circuit)
        return True

    async def _told_of_each_other(
        self, one: tuple[socket.socket, RelayEnd], other: tuple[socket.socket, RelayEnd]
    ) -> bool:
        """Tell both ends where the other is seen; returns whether they are carried from here."""
        carries, punch = bool(self.rate), one[1].punch and other[1].punch
        for (sock, _), (there, said) in ((one, other), (other, one)):
            places = meeting_places(there, said.inside, sock) if punch else ()
            await say(sock, RelayMeeting(carries, places))
        return carries

    async def _carry(self, circuit: _Circuit) -> None:
        def moved(count: int) -> None:
            circuit.moved = self._now()
            self._moved(count)

        (one, _), (other, _) = circuit.ends
        take = partial(self._turns.take, "/".join(sorted(circuit.peers)))
        await splice(one, other, take, idle=IDLE_S, moved=moved)

    def _moved(self, count: int) -> None:
        self._stats.in_by_name["relay"] += count
        self._stats.out_by_name["relay"] += count
        self._on_sent(count)
        limit = min(self.rate, self._most())
        if limit != self._limit and limit:
            self._limit = limit
            self._bucket.change(limit)

    def _drop(self, circuit: _Circuit) -> None:
        circuit.over.set()
        self._circuits.discard(circuit)
        for said in circuit.said:
            self._by_said.pop(said, None)

    def _forget_late(self) -> None:
        now = self._now()
        for circuit in [c for c in self._circuits if c.until < now]:
            self._drop(circuit)
