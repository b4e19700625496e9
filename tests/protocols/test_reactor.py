"""The data thread by itself, with sockets of the test's own."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from http_kit import wait_for

from protocols.bodies import BufferDrain
from protocols.lanes.lane import Lane
from protocols.lanes.moves import Receiving
from protocols.lanes.reactor import Load, Reactor

PACKET, PACKETS = 1400, 400


class Counted(BufferDrain):
    """A buffer that counts how often bytes came within 2 ms of those before."""

    hasty, at = 0, -math.inf

    def took(self, count: int) -> None:
        now = time.monotonic()
        self.hasty += now - self.at < 0.002
        self.at = now
        super().took(count)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection."""
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        yield near, far


async def test_packets_of_a_slow_link_gather_before_they_are_read(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, far = ends
    body = bytes(range(250)) * (PACKET * PACKETS // 250)
    arrived, ended = bytearray(len(body)), list[BaseException | None]()
    drain = Counted(arrived)

    def send() -> None:
        for at in range(0, len(body), PACKET):
            far.sendall(body[at : at + PACKET])
            time.sleep(0.0005)  # the link's, not a wait

    reactor = Reactor()
    reactor.start()
    try:
        lane = Lane(reactor, near, "somebody", lambda: None)
        lane.local = False  # as if a link were between them
        receiving = Receiving(
            drain, len(body), stall=10.0, min_rate=0.0, last=True, done=ended.append
        )
        reactor.post(lane.begin)
        reactor.post(lambda: lane.receive(receiving))
        sender = threading.Thread(target=send)
        sender.start()
        await wait_for(lambda: bool(ended))
        await asyncio.to_thread(sender.join)
    finally:
        await reactor.aclose()
    assert ended == [None]
    assert bytes(arrived) == body
    # however slow the sender is; the last 32 KB do not wait
    assert drain.hasty < PACKETS // 10


class Waiting:
    """Somebody who always has something to send, and no socket."""

    local, host = False, "192.0.2.1"

    def __init__(self, reactor: Reactor, who: str) -> None:
        self.who = who
        self.got = 0
        self._reactor = reactor

    def begin(self) -> None:
        self._reactor.add(self)
        self.granted()

    def granted(self) -> None:
        while count := self._reactor.allow(self, 1400):
            self.got += count

    def ready(self, readable: bool, writable: bool) -> None:
        """There is no socket."""

    def due(self, now: float) -> float:
        return math.inf

    def load(self) -> Load:
        return Load(0, True, False, 0.0)

    def cut(self) -> None:
        """There is nothing to close."""


async def test_who_opens_many_lanes_gets_no_more_of_a_limit() -> None:
    reactor = Reactor(10e6)
    greedy = [Waiting(reactor, "greedy") for _ in range(31)]
    modest = Waiting(reactor, "modest")

    def begin() -> None:
        for one in (*greedy, modest):
            one.begin()

    reactor.start()
    try:
        reactor.post(begin)  # all at one moment: who comes later missed what the others got
        await wait_for(lambda: sum(one.got for one in greedy) > 200 * 1400)
    finally:
        await reactor.aclose()
    taken = sum(one.got for one in greedy)
    assert modest.got == pytest.approx(taken, abs=2 * 1400)
    assert min(one.got for one in greedy) > 0


@pytest.mark.parametrize(("round_trip", "told"), [(0.001, 0.0), (0.0, None)])
async def test_that_nothing_stands_in_queues_is_told_where_the_system_tells(
    round_trip: float, told: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a link that became much faster all has arrived at each look: pacing is to notice that."""
    reactor, looks = Reactor(), list[float | None]()

    class Sending(Waiting):
        def begin(self) -> None:
            reactor.add(self)
            reactor.moves(self, math.inf)

        def load(self) -> Load:
            return Load(0, True, False, round_trip)

    def note(*given: object, stands: float | None, **more: object) -> None:
        looks.append(stands)

    monkeypatch.setattr(reactor.pacer, "note", note)
    reactor.start()
    try:
        reactor.post(Sending(reactor, "somebody").begin)
        await wait_for(lambda: len(looks) > 2)
    finally:
        await reactor.aclose()
    assert set(looks) == {told}
