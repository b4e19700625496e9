"""The matrix of links: asked of peers while somebody looks, each believed of its own links only."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from node.reports.links import ASKED, FORGOTTEN_S, FRESH_S, WATCHED_S, LinkTable, tell_links
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import Link, MemoryNetwork, MemoryTransport
from protocols.messages import Link as Told
from protocols.messages import Links

PEERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, 9)]
ME, ALPS, MESA, STRANGER = PEERS[:4]


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Here:
    """A table at :data:`ME`, and peers whose transports have measured what a test says."""

    count: int = 3
    network: MemoryNetwork = field(
        default_factory=lambda: MemoryNetwork(seed=1, link=Link(latency=0.01))
    )
    ahead: float = 0.0  # of the peers' clocks
    asked: list[tuple[float, PeerId]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mine = self.network.join(ME)
        self.others = {peer: self._join(peer) for peer in PEERS[1 : self.count]}
        self.table = LinkTable(self.mine, ME, lambda: list(self.others), now=now, clock=now)

    def _join(self, peer: PeerId) -> MemoryTransport:
        transport = self.network.join(peer)
        tell_links(transport, clock=lambda: now() + self.ahead)
        told = transport._handlers.calls["links"]

        async def noted(caller: PeerId, body: bytes) -> bytes:
            self.asked.append((now(), peer))
            return await told[0](caller, body)

        transport.on_call("links", noted, max_body=0)
        return transport

    def measure(self, peer: PeerId, other: PeerId, **values: float) -> None:
        stats = (self.mine if peer == ME else self.others[peer]).stats.peer(other)
        for name, value in values.items():
            setattr(stats, name, value)

    def seen(self) -> dict[tuple[PeerId, PeerId], tuple[float | None, float | None]]:
        views = self.table.look().links
        keys = [(PeerId(v.source), PeerId(v.target)) for v in views]
        assert len(set(keys)) == len(keys)
        return {k: (v.bytes_per_second, v.round_trip_s) for k, v in zip(keys, views, strict=True)}


def run(main: Callable[[Here], Coroutine[Any, Any, None]], **given: Any) -> None:
    async def play() -> None:
        await main(Here(**given))

    virtual_time.run(play())


def test_links_of_others_are_what_they_tell() -> None:
    async def main(here: Here) -> None:
        here.measure(ALPS, MESA, upload=3e6, download=5e6, round_trip=0.2)
        assert (ALPS, MESA) not in here.seen()
        await here.table.ask()
        assert here.seen()[ALPS, MESA] == (3e6, 0.2)
        assert here.seen()[MESA, ALPS] == (5e6, 0.2)

    run(main)


def test_what_this_node_has_measured_comes_first_and_the_sender_before_the_receiver() -> None:
    async def main(here: Here) -> None:
        here.measure(ME, ALPS, upload=1e6, round_trip=0.5)
        here.measure(ALPS, ME, upload=7e6, download=2e6, round_trip=0.9)
        here.measure(ALPS, MESA, upload=3e6)
        here.measure(MESA, ALPS, upload=4e6, download=9e6)
        await here.table.ask()
        seen = here.seen()
        assert seen[ME, ALPS][0] == 1e6
        assert seen[ALPS, ME][0] == 7e6  # not measured here
        assert seen[ALPS, MESA][0] == 3e6
        assert seen[MESA, ALPS][0] == 4e6

    run(main)


def test_of_too_many_links_each_island_has_its_share() -> None:
    async def main(here: Here) -> None:
        for one in (ME, *here.others):
            for other in (ME, *here.others):
                if one != other:
                    here.measure(one, other, upload=1e6)
        for _ in range(2):
            await here.table.ask()
        assert len(here.seen()) == 56
        found = here.table.look(28)
        assert (len(found.links), found.left_out) == (28, 28)
        others = [link for link in found.links if ME not in (link.source, link.target)]
        assert len(others) == 14  # and all 14 of its own
        assert set(Counter(link.source for link in others).values()) == {2}
        assert max(Counter(link.target for link in others).values()) <= 3
        assert {link.target for link in others} == set(here.others)

    run(main, count=8)


def test_of_links_of_others_among_themselves_a_peer_is_not_believed() -> None:
    async def main(here: Here) -> None:
        async def lie(peer: PeerId, body: bytes) -> bytes:
            return Links(0.0, (Told(STRANGER, 1e9, 1e9, 0.001), Told(MESA, 2e6, 0.0, 0.0))).encode()

        here.others[ALPS].on_call("links", lie, max_body=0)
        await here.table.ask()
        ends = {peer for pair in here.seen() for peer in pair}
        assert STRANGER not in ends  # who is no island is not shown
        assert here.seen()[ALPS, MESA][0] == 2e6

    run(main)


def test_figures_that_no_link_can_have_are_left_out() -> None:
    async def main(here: Here) -> None:
        async def lie(peer: PeerId, body: bytes) -> bytes:
            told = (Told(MESA, 1.7e308, 1e6, 0.1), Told(ME, 1e6, 0.0, 1e300))
            return Links(1.7e308, told).encode()

        here.others[ALPS].on_call("links", lie, max_body=0)
        await here.table.ask()
        assert (ALPS, MESA) not in here.seen()
        assert here.seen()[ALPS, ME] == (None, pytest.approx(0.02))  # as measured here
        assert ALPS not in here.table.offsets

    run(main)


@pytest.mark.parametrize("answer", [b"", b"\x93garbage", b"\x00" * 4000])
def test_an_answer_that_is_none_changes_nothing(answer: bytes) -> None:
    async def main(here: Here) -> None:
        async def nonsense(peer: PeerId, body: bytes) -> bytes:
            return answer

        here.others[ALPS].on_call("links", nonsense, max_body=0)
        here.measure(MESA, ALPS, upload=4e6)
        await here.table.ask()
        assert here.seen()[MESA, ALPS][0] == 4e6
        assert ALPS not in here.table.offsets

    run(main)


def test_nobody_is_asked_unless_somebody_looks_and_then_not_often() -> None:
    async def main(here: Here) -> None:
        asking = asyncio.create_task(here.table.run())
        await asyncio.sleep(100.0)
        assert not here.asked
        began = now()
        while now() < began + 2 * FRESH_S:
            here.table.look()
            await asyncio.sleep(1.0)
        for peer in here.others:
            times = [when for when, who in here.asked if who == peer]
            assert len(times) == 2
            assert times[1] - times[0] >= FRESH_S
        seconds = {int(when) for when, _ in here.asked}
        assert all(sum(int(when) == s for when, _ in here.asked) <= ASKED for s in seconds)
        await asyncio.sleep(WATCHED_S + 1)
        told = len(here.asked)
        await asyncio.sleep(10 * FRESH_S)
        assert len(here.asked) == told
        asking.cancel()

    run(main, count=8)


def test_who_is_gone_and_what_is_old_is_shown_no_more() -> None:
    async def main(here: Here) -> None:
        here.measure(ALPS, MESA, upload=3e6)
        await here.table.ask()
        assert (ALPS, MESA) in here.seen()
        del here.others[MESA]
        assert (ALPS, MESA) not in here.seen()
        await here.table.ask()
        assert set(here.table.offsets) == {ALPS, STRANGER}
        here.measure(ALPS, STRANGER, upload=1e6)
        await asyncio.sleep(FRESH_S)
        await here.table.ask()
        assert (ALPS, STRANGER) in here.seen()
        await asyncio.sleep(FORGOTTEN_S + 1)
        assert (ALPS, STRANGER) not in here.seen()

    run(main, count=4)


def test_clocks_are_compared() -> None:
    async def main(here: Here) -> None:
        here.ahead = 2.5
        await here.table.ask()
        assert here.table.offsets == {peer: pytest.approx(2.5, abs=0.011) for peer in here.others}

    run(main)
