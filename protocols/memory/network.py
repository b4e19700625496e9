"""The simulated internet under :mod:`protocols.memory.transport`: delays, bandwidth, faults.

Every directed pair of nodes has a :class:`Link`; every node has an uplink and a downlink that
its transfers share. What is sent passes three stages, each a timer on the event loop, so the
model costs a few microseconds a packet and gives the same history for the same seed:

1. the sender's uplink, one piece after the other (a transfer queues one piece at a time, so
   concurrent transfers take turns and share it fairly);
2. the link: its latency, its jitter, and for what is lost the time to send it again;
3. the receiver's downlink, in the order of arrival.

A message of one packet does not queue behind bulk data (routers with fair queueing behave so);
its bytes are still charged. Lost packets delay a stream and never break it, as with TCP.
Congestion control is not modelled.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from protocols.errors import LocalProtocolError
from protocols.identity import PeerId
from protocols.transport import CHUNK_BYTES

if TYPE_CHECKING:
    from protocols.memory.transport import MemoryTransport

PACKET_BYTES = 1500
MIN_RETRANSMIT = 0.2  # seconds, the least retransmission time-out of Linux TCP
BUFFERED_CHUNKS = 4  # that a receiver holds without reading before the sender waits
MAX_FLIGHT_CHUNKS = 64  # on a link of unlimited bandwidth


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two nodes."""

    latency: float = 0.02  # seconds, one way
    jitter: float = 0.0  # seconds, added uniformly
    loss: float = 0.0  # probability that a packet is lost and sent again
    drop: float = 0.0  # probability that a whole exchange breaks with Why.RESET


class TraceEvent(NamedTuple):
    """One line of a network's history."""

    time: float
    event: str  # connect, refused, call, push, pull, reply, reset, killed, ...
    source: str
    target: str
    name: str
    size: int


class MemoryNode:
    """One machine: its speeds (bytes/s), when its links are free again, and its health."""

    __slots__ = (
        "address", "alive", "down_free", "download", "frozen", "group", "peer",
        "transport", "up_free", "upload",
    )  # fmt: skip

    def __init__(self, peer: PeerId, address: str, upload: float, download: float) -> None:
        self.peer = peer
        self.address = address
        self.upload = upload
        self.download = download
        self.up_free = 0.0
        self.down_free = 0.0
        self.alive = True
        self.frozen = False
        self.group = 0
        self.transport: MemoryTransport


class MemoryNetwork:
    """Nodes, the links between them, and the faults a test injects.

    ``link``, ``upload`` and ``download`` hold for whatever is not set one by one; the defaults
    are 20 ms and unlimited bandwidth. ``trace``, when given, collects :class:`TraceEvent`.
    Everything random is drawn from generators seeded with ``seed`` and the link's two ends, so
    traffic on one link does not change what happens on another.

    >>> network = MemoryNetwork(seed=1, link=Link(latency=0.05))
    >>> a, b = (network.join(peer) for peer in peers)
    >>> network.partition({a.peer_id}, {b.peer_id}); ...; network.heal()
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        link: Link | None = None,
        upload: float = math.inf,
        download: float = math.inf,
        trace: list[TraceEvent] | None = None,
    ) -> None:
        self.seed = seed
        self.trace = trace
        self.tamper: Callable[[PeerId, PeerId, str, bytes], bytes] | None = None
        """Test hook: (sender, receiver, name, bytes) to the bytes that arrive."""
        self._link = link or Link()
        self._upload = upload
        self._download = download
        self._links: dict[tuple[PeerId, PeerId], Link] = {}
        self._random: dict[tuple[PeerId, PeerId], random.Random] = {}
        self._nodes: dict[PeerId, MemoryNode] = {}
        self._addresses: dict[str, MemoryNode] = {}
        self._partitioned = False
        self._cut: set[tuple[PeerId, PeerId]] = set()  # from, to
        self._held: list[Pipe] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._armed = math.inf  # the moment the timer is set to
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- nodes --------------------------------------------------------------------------------

    def join(
        self, peer: PeerId, *, upload: float | None = None, download: float | None = None
    ) -> MemoryTransport:
        """Plug in a node, or plug a killed one in again, and return its transport.

        ``upload`` and ``download`` are bytes a second.
        """
        from protocols.memory.transport import MemoryTransport

        before = self._nodes.get(peer)
        if before is not None and before.alive:
            raise LocalProtocolError(f"{peer} is on the network already")
        number = len(self._addresses) + 1
        address = (
            before.address
            if before
            else f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:4390"
        )
        node = MemoryNode(
            peer,
            address,
            self._upload if upload is None else upload,
            self._download if download is None else download,
        )
        node.group = before.group if before else 0
        node.transport = MemoryTransport(self, node)
        self._nodes[peer] = self._addresses[address] = node
        return node.transport

    def node(self, peer: PeerId) -> MemoryNode | None:
        """The node of a peer, dead ones included."""
        return self._nodes.get(peer)

    def at(self, address: str) -> MemoryNode | None:
        """The node that has this address."""
        return self._addresses.get(address)

    def set_link(self, a: PeerId, b: PeerId, link: Link, *, both: bool = True) -> None:
        """Give the link from ``a`` to ``b`` (and back) a model of its own."""
        self._links[a, b] = link
        if both:
            self._links[b, a] = link

    def link(self, a: PeerId, b: PeerId) -> Link:
        """The model of the link from ``a`` to ``b``."""
        return self._links.get((a, b), self._link)

    # --- faults -------------------------------------------------------------------------------

    def partition(self, *groups: set[PeerId]) -> None:
        """Let nothing pass between groups; nodes in none form one more group.

        Streams that are open stay so and go on after :meth:`heal`, unless they time out first.
        """
        for node in self._nodes.values():
            node.group = 0
        for number, group in enumerate(groups, start=1):
            for peer in group:
                self._nodes[peer].group = number
        self._partitioned = True
        self.note("partition")
        self._release()  # a new partition may join what an older one had parted

    def heal(self) -> None:
        """End the partition."""
        self._partitioned = False
        self.note("heal")
        self._release()

    def cut(self, a: PeerId, b: PeerId, *, both: bool = True) -> None:
        """Let nothing pass from ``a`` to ``b`` (and back) any more, and break nothing."""
        self._cut |= {(a, b), (b, a)} if both else {(a, b)}
        self.note("cut", a, b)

    def splice(self, a: PeerId, b: PeerId) -> None:
        """Undo :meth:`cut`, both ways; what was on its way arrives."""
        self._cut -= {(a, b), (b, a)}
        self.note("splice", a, b)
        self._release()

    def kill(self, peer: PeerId) -> None:
        """End a node: its transfers break, its handlers are cancelled, connects are refused."""
        node = self._nodes[peer]
        self.note("killed", peer)
        node.transport.shut()

    def freeze(self, peer: PeerId) -> None:
        """Let nothing in or out and break nothing: a stopped process, or a dark link."""
        self._nodes[peer].frozen = True
        self.note("freeze", peer)

    def thaw(self, peer: PeerId) -> None:
        """Undo :meth:`freeze`; what was on its way arrives."""
        self._nodes[peer].frozen = False
        self.note("thaw", peer)
        self._release()

    def blocked(self, a: MemoryNode, b: MemoryNode) -> bool:
        """Whether nothing passes from ``a`` to ``b`` now."""
        parted = (self._partitioned and a.group != b.group) or (a.peer, b.peer) in self._cut
        return a.frozen or b.frozen or parted

    def _release(self) -> None:
        held, self._held = self._held, []
        for pipe in held:  # sent again, so they take the link's latency once more
            self.schedule(
                self.now() + self.link(pipe.source.peer, pipe.target.peer).latency, pipe.arrive
            )

    def hold(self, pipe: Pipe) -> None:
        """Keep a piece that met a closed link until the link opens."""
        self._held.append(pipe)

    # --- chance -------------------------------------------------------------------------------

    def delay(self, source: PeerId, target: PeerId, size: int) -> float:
        """Seconds that ``size`` bytes spend on the link, lost packets sent again included."""
        link = self.link(source, target)
        delay = link.latency
        if link.jitter:
            delay += link.jitter * self._chance(source, target).random()
        if link.loss:
            chance = self._chance(source, target)
            again = max(MIN_RETRANSMIT, 2 * link.latency)
            if size > PACKET_BYTES:  # packets behind the lost one tell the sender in a round trip
                if chance.random() >= (1 - link.loss) ** (size / PACKET_BYTES):
                    delay += 2 * link.latency
                else:
                    return delay
            while chance.random() < link.loss:
                delay += again
                again *= 2
        return delay

    def drops(self, source: PeerId, target: PeerId) -> float | None:
        """None, or the share of an exchange (0 to 1) after which it shall break."""
        link = self.link(source, target)
        if not link.drop:
            return None
        chance = self._chance(source, target)
        return chance.random() if chance.random() < link.drop else None

    def _chance(self, source: PeerId, target: PeerId) -> random.Random:
        key = (source, target)
        if key not in self._random:
            self._random[key] = random.Random(f"{self.seed}:{source}:{target}")
        return self._random[key]

    def note(
        self, event: str, source: str = "", target: str = "", name: str = "", size: int = 0
    ) -> None:
        """Add a line to the trace, if one is kept."""
        if self.trace is not None:
            self.trace.append(TraceEvent(self.now(), event, source, target, name, size))

    # --- time ---------------------------------------------------------------------------------

    def now(self) -> float:
        """The event loop's clock, in seconds."""
        return self.loop.time()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that all of it runs on: the first one it was used from."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def schedule(self, when: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` at ``when``; those of one moment run in the order of scheduling.

        asyncio's own timers give no order to equal times, hence the queue and a single timer.
        """
        heapq.heappush(self._events, (when, self._count, callback))
        self._count += 1
        if when < self._armed:
            self._arm(when)

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed = when
        self._timer = self.loop.call_at(when, self._fire)

    def _fire(self) -> None:
        until = max(self.now(), self._armed)
        self._armed = -math.inf  # callbacks that schedule more need not set the timer
        events = self._events
        try:
            while events and events[0][0] <= until:
                heapq.heappop(events)[2]()
        finally:
            self._armed = math.inf
            if events:
                self._arm(events[0][0])


class Pipe:
    """An ordered stream of pieces from one node to another."""

    __slots__ = ("_pieces", "_ready", "busy", "network", "source", "target")

    def __init__(self, network: MemoryNetwork, source: MemoryNode, target: MemoryNode) -> None:
        self.network = network
        self.source = source
        self.target = target
        self.busy = 0.0  # when the last piece sent will arrive
        self._pieces: deque[tuple[int, Callable[[], None]]] = deque()
        self._ready = 0.0  # when the last piece that passed the link reaches the receiver

    def window(self) -> int:
        """Bytes that may be on the way or unread: the link's capacity and a few chunks."""
        rate = min(self.source.upload, self.target.download)
        latency = self.network.link(self.source.peer, self.target.peer).latency
        flight = 0.0 if latency == 0 else rate * latency / CHUNK_BYTES
        return (BUFFERED_CHUNKS + math.ceil(min(flight, MAX_FLIGHT_CHUNKS))) * CHUNK_BYTES

    def working_until(self) -> float:
        """Until when something is on the way; the past if nothing is, or nothing passes."""
        return 0.0 if self.network.blocked(self.source, self.target) else self.busy

    def send(self, size: int, deliver: Callable[[], None]) -> float:
        """Put ``size`` bytes on the way; return when they will have left the sender's uplink."""
        source = self.source
        now = self.network.now()
        seconds = size / source.upload
        queued = max(now, source.up_free)
        source.up_free = queued + seconds
        left = now + seconds if size <= PACKET_BYTES else source.up_free
        self._pieces.append((size, deliver))
        arrival = left + self.network.delay(source.peer, self.target.peer, size)
        self.busy = max(self.busy, arrival)
        self.network.schedule(arrival, self.arrive)
        return left

    def arrive(self) -> None:
        """A piece has passed the link: the oldest one, whichever packet was the fastest."""
        target = self.target
        if self.network.blocked(self.source, target):
            self.network.hold(self)
            return
        size, deliver = self._pieces.popleft()
        now = self.network.now()
        target.down_free = max(now, target.down_free) + size / target.download
        at = max(now if size <= PACKET_BYTES else target.down_free, self._ready)
        if at <= now:
            deliver()
        else:
            self._ready = self.busy = at
            self.network.schedule(at, deliver)
