"""The wall clock of a node: set by nobody while it runs."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from dht_kit import keep_hiveminds_clock
from hub_kit import place
from identity_kit import identity

from bootstrap.handshake import Clocks, Gate
from node.clock import SteadyClock, Waited, wall
from node.config import NodeConfig, resolve
from node.daemon import Daemon
from node.entry.entrance import Entrance
from node.hosts.helper import Helper
from node.island.events import told_of
from node.monitor.event_log import EventLog
from node.monitor.events import (
    CheckpointSaved,
    ClockPut,
    DataAwaited,
    Notice,
    Record,
    RoundDone,
    Step,
)
from node.monitor.observer import Observer
from node.monitor.state import STALL_S
from node.runtime import Node
from node.trainer.channel import Awaited
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


def test_it_can_be_put_right() -> None:
    now = {"wall": 1_000_000.0, "since": 50.0}
    clock = SteadyClock(lambda: now["wall"], lambda: now["since"])
    now["wall"] += 3600.0  # the machine stood still: it has counted nothing
    assert clock.behind() == 3600.0
    clock.put(3600.0)
    assert clock() == 1_003_600.0
    assert clock.behind() == 0.0


def test_who_stood_still_has_waited_for_nobody() -> None:
    now = 50.0
    waited = Waited(30.0, lambda: now)
    for _ in range(4):
        now += 15.0
        assert waited() == now - 50.0
    now += 8 * 3600.0
    assert waited() == 60.0 + 30.0


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
    me.measure = partial(Entrance.measure, me)
    me.reaching = SimpleNamespace(greeted=lambda peer: None)
    greeting = await Entrance._greet(me, "192.0.2.1:1", identity(1).peer_id, b"")
    assert abs(greeting.offset) < 5.0
    assert abs(me.clocks.offset) < 1.0


def node_in(home: Path, number: int = 1, events: EventLog | None = None) -> Node:
    """A node before it does anything; its directory is not locked."""
    daemon = Daemon(NodeConfig(dir=home, listen="127.0.0.1:0", api="127.0.0.1:0"), None)
    daemon.home.make()
    key, unused = identity(number), cast(Any, None)
    tasks = cast(Any, SimpleNamespace(spawn=Coroutine.close))
    log, port = events or EventLog(), HttpTransport(key)
    return Node(daemon, log, key, False, port, tasks, unused, unused)


class PutBack:
    """What the machine's clock says, and how many seconds have gone by since it was put back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.start, self.gone = time.time(), 0.0
        monkeypatch.setattr("time.time", lambda: self.start + self.gone - 3600.0)
        monkeypatch.setattr("node.clock.wall", self.steady)

    def steady(self) -> float:
        return self.start + self.gone


async def test_a_node_that_hangs_is_not_healthy_though_the_clock_was_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = PutBack(monkeypatch)
    node = node_in(tmp_path / "node", events=EventLog(clock=now.steady))
    node.state.status = "active"
    for number in range(2):
        now.gone += 10.0
        node.events.emit(Step(step=number, round=number, loss=2.0, seconds=1.0))
        node.events.emit(RoundDone(round=number))
    assert node.state.unhealthy() == []
    now.gone += STALL_S + 1.0
    assert node.state.unhealthy() == ["no inner step for 121 s"]
    assert [alarm.kind for alarm in node.state.alarms_now()] == ["stall"]
    assert node.state.brief()["node"]["uptime_s"] == pytest.approx(now.gone)


@pytest.mark.parametrize("by", [3600.0, -3600.0])
async def test_what_lasts_lasts_as_long_where_the_clock_is_put_right(
    by: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = PutBack(monkeypatch)
    put = 0.0

    def clock() -> float:
        return now.steady() + put

    monkeypatch.setattr("node.clock.wall", clock)
    node = node_in(tmp_path / "node", events=EventLog(clock=clock))
    node.state.status = "active"
    for number in range(3):
        now.gone += 10.0
        node.events.emit(Step(step=number, round=number, loss=2.0, seconds=1.0))
        node.events.emit(RoundDone(round=number, total_rounds=9, eta_s=60.0))
    node.events.emit(CheckpointSaved(round=2, path="there"))
    now.gone += 2.0
    before = node.state.brief()
    put = by
    node.events.emit(ClockPut(seconds=by, text="it was wrong"))
    after = node.state.brief()
    assert after["time"] == before["time"] + by
    assert after["alarms"] == [] == node.state.unhealthy()
    assert after["node"]["uptime_s"] == pytest.approx(32.0)
    assert after["checkpoint"]["time"] == pytest.approx(after["time"] - 2.0)
    assert after["fragments"][0]["time"] == pytest.approx(after["time"] - 2.0)
    assert after["training"]["eta_s"] == pytest.approx(before["training"]["eta_s"])
    now.gone += STALL_S
    assert node.state.unhealthy() == ["no inner step for 122 s"]
    assert [alarm.kind for alarm in node.state.alarms_now()] == ["stall"]


async def test_the_events_of_a_daemon_have_the_time_that_nobody_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, seen = PutBack(monkeypatch), list[Record]()

    class Said:
        def __init__(self, daemon: Daemon, events: EventLog, *others: object) -> None:
            self.events = events

        async def live(self, stack: AsyncExitStack) -> None:
            seen.append(self.events.emit(Notice(text="there")))

    monkeypatch.setattr("node.daemon.Node", Said)
    await Daemon(NodeConfig(dir=tmp_path, listen="127.0.0.1:0"), None).main()
    assert [record.time for record in seen] == [now.start]


async def test_so_have_those_of_an_islands_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, seen = PutBack(monkeypatch), list[Record]()

    async def serve(helper: Helper) -> None:
        seen.append(helper.events.emit(Notice(text="there")))

    monkeypatch.setattr(Helper, "_serve", serve)
    config = resolve({"dir": str(tmp_path), "device": "cpu"}, {})
    await Helper(config, place(1, host=1)).main()
    assert [record.time for record in seen] == [now.start]


async def test_so_has_what_an_observer_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    now = PutBack(monkeypatch)
    observer = Observer([])
    now.gone = 10.0
    assert observer.log.emit(Notice(text="there")).time == now.start + 10.0
    state = observer.state.brief()
    assert state["time"] == now.start + 10.0
    assert state["node"]["uptime_s"] == 10.0


def test_so_has_the_wait_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    now = PutBack(monkeypatch)
    told = told_of(Awaited(step=3, seconds=2.0, ranks=(1,)))
    assert told == DataAwaited(step=3, since=now.start - 2.0, ranks=(1,))


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
