"""What a transport counts and measures: bytes, refusals, round trips, throughput."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from protocols.identity import PeerId

MAX_MEASURED_PEERS = 1024  # peers with figures of their own; the longest unused is dropped
LONG_BYTES = 256 * 1024  # a shorter transfer's time is mostly round trips and waiting
_SMOOTHING = 0.2  # weight of a new sample
_KEPT_TRANSFERS = 256  # between two looks at a meter


@dataclass(slots=True)
class PeerStats:
    """Figures of one peer. Seconds, bytes, bytes a second; None until measured."""

    bytes_in: int = 0
    bytes_out: int = 0
    round_trip: float | None = None
    upload: float | None = None
    download: float | None = None


@dataclass(slots=True)
class Meter:
    """How fast this node's own link is in one direction, by what its transfers show together.

    Transfers that run at once share the link, so the speed over one of them is what all of them
    moved while it ran. The highest such speed counts, as some peers are slower than this link.

    Where all moved less than :data:`LONG_BYTES`, most of the time may have been waiting. Such a
    speed is a lower bound: it can show that the link is faster than was known, as it must where a
    coarse codec leaves nothing but short bodies, and never that it is slower.

    ``link``, where given, measures arrivals in windows and is believed first
    (:mod:`protocols.lanes.pacing`). Where it has seen no new window since the last look, its speed
    is old, and all transfers count as lower bounds.
    """

    link: Callable[[], tuple[float | None, int]] = lambda: (None, 0)  # its speed; windows seen
    _speed: float | None = None
    _windows: int = 0
    _moved: deque[tuple[float, float, int]] = field(
        default_factory=lambda: deque(maxlen=_KEPT_TRANSFERS)
    )  # from, until, bytes

    def note(self, until: float, seconds: float, count: int) -> None:
        """A transfer of ``count`` bytes took the ``seconds`` before ``until``."""
        self._moved.append((until - seconds, until, count))

    def read(self) -> float | None:
        """Bytes a second by the transfers since the last look; as before if there were none.

        A link that has become slower shows at once, a faster one within a few looks.
        """
        long, short = 0.0, 0.0
        for began, ended, _ in self._moved:
            count = _within(began, ended, self._moved)
            if count >= LONG_BYTES:
                long = max(long, count / (ended - began))
            else:
                short = max(short, count / (ended - began))
        self._moved.clear()
        speed, windows = self.link()
        if speed is not None:
            fresh, self._windows = windows != self._windows, windows
            self._speed = speed if fresh else max(speed, self._speed or 0.0, long, short)
            return self._speed
        known = self._speed or 0.0
        if long:
            self._speed = (known + long) / 2 if 0 < known < long else long
        if short > known:
            self._speed = max(short, self._speed or 0.0)
        return self._speed


def _within(began: float, ended: float, moved: deque[tuple[float, float, int]]) -> float:
    """Bytes of all transfers between two moments, each as if at an even pace."""
    total = 0.0
    for start, stop, count in moved:
        shared = min(ended, stop) - max(began, start)
        if shared > 0:
            total += count * shared / (stop - start)
    return total


@dataclass(slots=True)
class TransportStats:
    """Counters since the start. Byte counts are of headers, and of bodies as they travel."""

    in_by_name: Counter[str] = field(default_factory=Counter)
    out_by_name: Counter[str] = field(default_factory=Counter)
    requests_by_name: Counter[str] = field(default_factory=Counter)  # answered here
    connections: int = 0  # accepted and proven
    refused_handshakes: int = 0  # spoke TLS, but proved no identity
    garbage_connections: int = 0  # did not speak our protocol, or left in the handshake
    capped_connections: int = 0  # over the limit of connections
    refused_requests: int = 0  # answered with an error
    stalled_bodies: int = 0
    by_peer: dict[PeerId, PeerStats] = field(default_factory=dict)
    upload: Meter = field(default_factory=Meter)
    download: Meter = field(default_factory=Meter)

    def peer(self, peer: PeerId) -> PeerStats:
        """The figures of ``peer``, started if there are none."""
        found = self.by_peer.pop(peer, None) or PeerStats()
        self.by_peer[peer] = found
        if len(self.by_peer) > MAX_MEASURED_PEERS:
            del self.by_peer[next(iter(self.by_peer))]
        return found

    @property
    def round_trip(self) -> float | None:
        """Seconds to a peer and back, the median over peers; None before any was measured."""
        known = sorted(p.round_trip for p in self.by_peer.values() if p.round_trip is not None)
        return known[len(known) // 2] if known else None

    def received(self, peer: PeerId, name: str, count: int) -> None:
        """``count`` bytes of a body came in."""
        self.in_by_name[name] += count
        self.peer(peer).bytes_in += count

    def sent(self, peer: PeerId, name: str, count: int) -> None:
        """``count`` bytes of a body went out."""
        self.out_by_name[name] += count
        self.peer(peer).bytes_out += count

    def measured_call(self, peer: PeerId, seconds: float) -> None:
        """A call came back after ``seconds``, the handler's own time taken off."""
        stats = self.peer(peer)
        stats.round_trip = _smooth(stats.round_trip, max(seconds, 0.0))

    def measured_upload(
        self, peer: PeerId, count: int, seconds: float, *, linked: bool = True
    ) -> None:
        """A body of ``count`` bytes was taken by the peer.

        Unless ``linked``, it stayed on this machine: how fast that was changes from one time to
        the next, and says nothing of this node's link.
        """
        if linked and count and seconds > 0:
            self.upload.note(asyncio.get_running_loop().time(), seconds, count)
        if count >= LONG_BYTES and seconds > 0:
            stats = self.peer(peer)
            stats.upload = _smooth(stats.upload, count / seconds)

    def measured_download(
        self,
        peer: PeerId,
        count: int,
        seconds: float,
        since_asked: float,
        *,
        linked: bool = True,
    ) -> None:
        """A body of ``count`` bytes arrived from the peer; reading it took ``seconds``.

        A short one may have lain here before anybody read it, so it counts as if it had taken all
        the time ``since_asked``: since its announcement came, or since it was asked for.
        ``linked`` as above.
        """
        long = count >= LONG_BYTES
        took = seconds if long else since_asked
        if linked and count and took > 0:
            self.download.note(asyncio.get_running_loop().time(), took, count)
        if long and seconds > 0:
            stats = self.peer(peer)
            stats.download = _smooth(stats.download, count / seconds)


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
