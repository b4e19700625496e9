"""Who reaches whom how fast, for the whole swarm: each peer's own measurements, asked for.

Peers measure their links in passing. A node tells its own to whoever asks (``links``), and asks
others only while somebody looks at its matrix of links: a few peers a second, each at most twice a
minute, so that watching 64 peers costs a node some kilobytes a second and nobody else anything.
Of what a peer tells only links of its own are believed. The answer has its wall clock as well, from
which follows how far the two clocks are apart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

from node.monitor.views import LinkView
from protocols.bounds import MAX_PEERS
from protocols.errors import RemoteProtocolError, TransportError
from protocols.identity import PeerId
from protocols.messages import Link, Links
from protocols.stats import PeerStats, TransportStats
from protocols.transport import Transport

ASKED = 4  # peers at a time
ASK_S = 1.0  # between two times
FRESH_S = 30.0  # what a peer told is not asked for again within this
FORGOTTEN_S = 300.0  # what is older is no more shown
WATCHED_S = 20.0  # after a look; then nobody is asked
CALL_TIMEOUT_S = 5.0


class Measuring(Transport, Protocol):
    """A transport that measures what passes through it."""

    @property
    def stats(self) -> TransportStats: ...


def tell_links(transport: Measuring, clock: Callable[[], float] = time.time) -> None:
    """Answer ``links`` with what this transport has measured."""

    async def answer(peer: PeerId, body: bytes) -> bytes:
        known = transport.stats.by_peer.items()
        measured = ((other, stats) for other, stats in known if _any(stats))
        return Links(
            time=clock(),
            links=tuple(_link(other, stats) for other, stats in islice(measured, MAX_PEERS)),
        ).encode()

    transport.on_call("links", answer, max_body=0)


def _any(stats: PeerStats) -> bool:
    return bool(stats.upload or stats.download or stats.round_trip)


def _link(peer: PeerId, stats: PeerStats) -> Link:
    return Link(peer, stats.upload or 0.0, stats.download or 0.0, stats.round_trip or 0.0)


@dataclass(slots=True)
class _Told:
    """The answer of one peer, and when it came."""

    when: float
    links: dict[PeerId, Link]


@dataclass
class LinkTable:
    """The links between all islands that this node knows of.

    ``now`` is monotonic and orders what was told, ``clock`` is the wall clock that is compared.
    """

    transport: Measuring
    me: PeerId
    islands: Callable[[], Collection[PeerId]] = tuple  # that live, besides this node
    now: Callable[[], float] = time.monotonic
    clock: Callable[[], float] = time.time
    offsets: dict[PeerId, float] = field(default_factory=dict)  # their clocks minus ours, seconds
    _told: dict[PeerId, _Told] = field(default_factory=dict)
    _asked: dict[PeerId, float] = field(default_factory=dict)
    _looked: float = float("-inf")

    def look(self) -> list[LinkView]:
        """All links that are known; for a while after this, peers are asked for more."""
        self._looked = self.now()
        return list(self._views())

    def own(self) -> list[LinkView]:
        """As :meth:`look`, of this node's own links, and without asking anybody."""
        return [
            view
            for peer in self.islands()
            if (stats := self.transport.stats.by_peer.get(peer)) is not None
            for view in _both(self.me, _link(peer, stats), 0.0)
        ]

    async def run(self) -> None:
        """Ask around while somebody looks, until cancelled."""
        while True:
            if self.now() - self._looked < WATCHED_S:
                await self.ask()
            await asyncio.sleep(ASK_S)

    async def ask(self) -> None:
        """Ask those whose answers are the oldest."""
        now, there = self.now(), [peer for peer in self.islands() if peer != self.me]
        for known in (self._told, self._asked, self.offsets):
            for peer in [peer for peer in known if peer not in there]:
                del known[peer]
        due = [p for p in there if now - self._asked.get(p, float("-inf")) >= FRESH_S]
        due.sort(key=lambda peer: self._asked.get(peer, float("-inf")))
        for peer in due[:ASKED]:
            self._asked[peer] = now
        await asyncio.gather(*map(self._ask_one, due[:ASKED]))

    async def _ask_one(self, peer: PeerId) -> None:
        sent = self.clock()
        try:
            reply = await self.transport.call(
                peer, "links", b"", timeout=CALL_TIMEOUT_S, max_reply=Links.MAX_BYTES
            )
            answer = Links.decode(reply)
        except (TransportError, RemoteProtocolError):
            return  # it may be older than this question; it is asked again later
        # as NTP does: their time was read half way between our two (RFC 5905, section 8)
        self.offsets[peer] = answer.time - (sent + self.clock()) / 2
        self._told[peer] = _Told(self.now(), {link.peer: link for link in answer.links})

    def _views(self) -> Iterator[LinkView]:
        """Own measurements first; else what the sender told, else what the receiver did."""
        now, there = self.now(), {self.me, *self.islands()}
        told = [
            (peer, view)
            for peer, said in self._told.items()
            if now - said.when <= FORGOTTEN_S
            for link in said.links.values()
            for view in _both(peer, link, now - said.when)
        ]
        sent = [view for peer, view in told if view.source == peer]
        received = [view for peer, view in told if view.source != peer]
        found: dict[tuple[PeerId, PeerId], LinkView] = {}
        for view in (*self.own(), *sent, *received):
            ends = PeerId(view.source), PeerId(view.target)
            if not there.issuperset(ends):
                continue
            held = found.get(ends)
            if held is None:
                found[ends] = view
            elif held.bytes_per_second is None and view.bytes_per_second is not None:
                trip = view.round_trip_s if held.round_trip_s is None else held.round_trip_s
                found[ends] = replace(view, round_trip_s=trip)
        yield from found.values()


def _both(teller: PeerId, link: Link, age: float) -> Iterator[LinkView]:
    """Both directions of a link as one end of it has measured them."""
    trip = link.round_trip or None
    if link.upload or trip:
        yield LinkView(teller, link.peer, link.upload or None, trip, age)
    if link.download or trip:
        yield LinkView(link.peer, teller, link.download or None, trip, age)
