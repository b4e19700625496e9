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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from node.monitor.views import MAX_LINKS, KnownLinks, LinkView, can_be_drawn
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


def own_speeds(stats: TransportStats, limit: float) -> dict[str, float]:
    """What a node announces of its own link, 0: unknown; of its upload no more than its limit."""
    upload = stats.upload.read() or 0.0
    return {
        "upload": min(upload or limit, limit) if limit else upload,
        "download": stats.download.read() or 0.0,
        "round_trip": stats.round_trip or 0.0,
    }


def _any(stats: PeerStats) -> bool:
    return bool(stats.upload or stats.download or stats.round_trip)


def _possible(link: Link) -> bool:
    return all(map(can_be_drawn, (link.upload, link.download, link.round_trip)))


def _link(peer: PeerId, stats: PeerStats) -> Link:
    return Link(peer, stats.upload or 0.0, stats.download or 0.0, stats.round_trip or 0.0)


@dataclass(slots=True)
class _Told:
    """The answer of one peer, and when it came."""

    when: float
    links: Mapping[PeerId, Link]
    sent: frozenset[PeerId] = field(init=False)  # to whom it tells of a link
    received: frozenset[PeerId] = field(init=False)  # and from whom

    def __post_init__(self) -> None:
        known = self.links.items()
        self.sent = frozenset(p for p, link in known if link.upload or link.round_trip)
        self.received = frozenset(p for p, link in known if link.download or link.round_trip)


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

    def look(self, limit: int = MAX_LINKS) -> KnownLinks:
        """The links that are known; for a while after this, peers are asked for more.

        Of more than ``limit``: all of this node, and of each other sender about as many, to
        receivers from all of them.
        """
        self._looked = now = self.now()
        tellers = self._tellers(now)
        order = sorted({self.me, *self.islands()})
        ends = _ends(tellers, order)
        total = sum(map(len, ends))
        if total > limit:
            ends = _cut(order, ends, self.me, limit)
        links = tuple(
            view
            for sender, receivers in zip(order, ends, strict=True)
            for receiver in receivers
            if (view := self._view(tellers, sender, receiver, now)) is not None
        )
        return KnownLinks(links, max(0, total - len(links)))

    def own(self) -> list[LinkView]:
        """As :meth:`look`, of this node's own links, and without asking anybody."""
        return [
            view
            for peer in self.islands()
            if (stats := self.transport.stats.by_peer.get(peer)) is not None
            for view in _both(self.me, _link(peer, stats))
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
        offset = answer.time - (sent + self.clock()) / 2
        if can_be_drawn(offset):
            self.offsets[peer] = offset
        links = {link.peer: link for link in answer.links if _possible(link)}
        self._told[peer] = _Told(self.now(), links)

    def _tellers(self, now: float) -> dict[PeerId, _Told]:
        """Who tells of links, and what: this node of its own, and others not too long ago."""
        there, measured = self.islands(), self.transport.stats.by_peer
        own = {peer: _link(peer, measured[peer]) for peer in there if peer in measured}
        told = {p: said for p, said in self._told.items() if now - said.when <= FORGOTTEN_S}
        return {**told, self.me: _Told(now, own)}

    def _view(
        self, tellers: Mapping[PeerId, _Told], sender: PeerId, receiver: PeerId, now: float
    ) -> LinkView | None:
        """Own measurements first; else what the sender told, else what the receiver did."""
        found: LinkView | None = None
        for teller in (receiver, sender) if receiver == self.me else (sender, receiver):
            told = tellers.get(teller)
            link = told.links.get(receiver if teller == sender else sender) if told else None
            if told is None or link is None:
                continue
            speed = (link.upload if teller == sender else link.download) or None
            trip = link.round_trip or None
            if found is not None and found.round_trip_s is not None:
                trip = found.round_trip_s
            if speed or (found is None and trip):
                found = LinkView(sender, receiver, speed, trip, now - told.when)
            if found is not None and found.bytes_per_second is not None:
                break
        return found


def _ends(tellers: Mapping[PeerId, _Told], order: Sequence[PeerId]) -> list[list[PeerId]]:
    """By sender, in order: the receivers to which a link is known, those behind it first."""
    sent = {teller: told.sent for teller, told in tellers.items()}
    received = {teller: told.received for teller, told in tellers.items()}
    nobody: frozenset[PeerId] = frozenset()
    found = []
    for place, sender in enumerate(order):
        to = sent.get(sender, nobody)
        found.append(
            [
                other
                for other in (*order[place + 1 :], *order[:place])
                if other in to or sender in received.get(other, nobody)
            ]
        )
    return found


def _cut(
    order: Sequence[PeerId], ends: list[list[PeerId]], me: PeerId, limit: int
) -> list[list[PeerId]]:
    """All links of ``me``, and of the others about as many each, evenly over their receivers."""
    kept = [
        found if one == me else [me] if me in found else []
        for one, found in zip(order, ends, strict=True)
    ]
    others = [
        [to for to in found if one != me and to != me]
        for one, found in zip(order, ends, strict=True)
    ]
    room = limit - sum(map(len, kept))
    by_count = sorted(range(len(order)), key=lambda place: len(others[place]))
    for left, place in zip(range(len(order), 0, -1), by_count, strict=True):
        count = min(len(others[place]), max(0, room) // left)
        room -= count
        step = len(others[place]) / max(1, count)
        kept[place] = kept[place] + [others[place][int(i * step)] for i in range(count)]
    return kept


def _both(me: PeerId, link: Link) -> Iterator[LinkView]:
    """Both directions of a link as this node has measured them."""
    trip = link.round_trip or None
    if link.upload or trip:
        yield LinkView(me, link.peer, link.upload or None, trip, 0.0)
    if link.download or trip:
        yield LinkView(link.peer, me, link.download or None, trip, 0.0)
