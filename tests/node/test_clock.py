"""The wall clock of a node: set by nobody while it runs."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from dht_kit import keep_hiveminds_clock
from identity_kit import identity

from bootstrap.handshake import Clocks, Gate
from node.clock import SteadyClock, wall
from node.config import NodeConfig, resolve
from node.daemon import Daemon
from node.entry.entrance import Entrance
from node.monitor.event_log import EventLog
from node.runtime import Node
from protocols.address_book import AddressBook
from protocols.http.transport import HttpTransport
from protocols.memory.transport import Link, MemoryNetwork
from protocols.whereabouts import Whereabouts


def test_it_is_the_wall_clock() -> None:
    assert abs(wall() - time.time()) < 5.0


def test_an_hour_that_somebody_sets_the_clock_by_is_not_seen() -> None:
    now = {"wall": 1_000_000.0, "since": 50.0}
    clock = SteadyClock(lambda: now["wall"], lambda: now["since"])
    assert clock() == 1_000_000.0
    for step in (3600.0, -7200.0):
        now["wall"] += step
        now["since"] += 10.0
    assert clock() == 1_000_020.0


def test_time_slept_through_counts() -> None:
    now = {"since": 50.0}
    clock = SteadyClock(lambda: 1_000_000.0, lambda: now["since"])
    now["since"] += 8 * 3600.0
    assert clock() == 1_000_000.0 + 8 * 3600.0


async def test_greetings_measure_it_and_not_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's was set back by an hour since the start; a seed that came anew is greeted."""

    def steady() -> float:
        return time.time() + 3600.0

    monkeypatch.setattr("node.clock.wall", steady)
    network = MemoryNetwork(seed=1, link=Link(latency=0.0005))
    transports = [network.join(identity(number).peer_id) for number in (1, 2)]
    books = [Whereabouts(one, identity(n)) for n, one in enumerate(transports, start=1)]
    Gate(transports[0], books[0], software="0", run=lambda: b"", clock=steady)
    me: Any = SimpleNamespace(
        transport=transports[1], whereabouts=books[1], clocks=Clocks(), config=resolve({}, {})
    )
    me.reaching = SimpleNamespace(greeted=lambda peer: None)
    greeting = await Entrance._greet(me, "192.0.2.1:1", identity(1).peer_id, b"")
    assert abs(greeting.offset) < 5.0
    assert abs(me.clocks.offset) < 1.0


def node_in(home: Path, number: int = 1) -> Node:
    """A node before it does anything; its directory is not locked."""
    daemon = Daemon(NodeConfig(dir=home, listen="127.0.0.1:0", api="127.0.0.1:0"), None)
    daemon.home.make()
    key, unused = identity(number), cast(Any, None)
    tasks = cast(Any, SimpleNamespace(spawn=Coroutine.close))
    return Node(daemon, EventLog(), key, False, HttpTransport(key), tasks, unused, unused)


async def test_the_directory_does_not_notice_that_somebody_sets_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was set ahead by three hours since the start."""
    keep_hiveminds_clock(monkeypatch)
    monkeypatch.setattr("node.clock.wall", lambda: time.time() - 3 * 3600.0)
    node = node_in(tmp_path / "node")
    node.whereabouts.publish(["192.0.2.1:4390"])
    run: Any = SimpleNamespace(peers=[], signed=SimpleNamespace(run_id=bytes(32)))
    async with AsyncExitStack() as stack:
        directory = await node.open_directory(stack, run)
        own = node.whereabouts.own
        assert own is not None
        assert abs(own.expires - (time.time() - 2 * 3600.0)) < 60.0
        assert await directory.announce(own.data)
        assert list(await directory.islands()) == [identity(1).peer_id]


async def test_a_node_whose_clock_was_put_back_between_two_starts_is_found_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others keep the address record with the highest number, for up to two hours."""
    ahead = 3000.0
    monkeypatch.setattr("node.clock.wall", lambda: time.time() + ahead)
    book = AddressBook()
    others = Whereabouts(HttpTransport(identity(2)), identity(2), book)
    before = node_in(tmp_path / "node")
    for _ in range(2):  # it is signed anew while the node runs
        others.learn(before.whereabouts.publish(["192.0.2.1:4390"]))
        ahead += 600.0
    ahead = 0.0
    others.learn(node_in(tmp_path / "node").whereabouts.publish(["198.51.100.7:4390"]))
    assert book.addresses(identity(1).peer_id) == ["198.51.100.7:4390"]
