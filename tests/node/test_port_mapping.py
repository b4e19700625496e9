"""A port that the router is asked to forward: what becomes of it while the node lives.

With a real router: tests/swarm/test_swarm_nat.py.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from http_kit import wait_for

from node.entry import port_mapping
from node.entry.port_mapping import LEASE_S, OTHERS, PortMapping
from node.monitor.event_log import EventLog
from node.monitor.events import Event, Notice, Problem
from protocols.errors import OperatorError
from protocols.tasks import beside


class Forwarder:
    """A router; ``taken`` are the outer ports of others."""

    inside = "192.168.1.10"

    def __init__(self, outside: str = "9.9.9.9") -> None:
        self.outside = outside
        self.taken: set[int] = set()
        self.ports: dict[int, int] = {}
        self.asked = 0
        self.failure = ""
        self.forgotten: list[int] = []
        self.answers = threading.Event()
        self.answers.set()

    def forward(self, outer: int, inner: int, seconds: int, before: str) -> bool:
        self.asked += 1
        assert self.answers.wait(20)
        if self.failure:
            raise OSError(self.failure)
        assert seconds == LEASE_S
        if outer in self.taken:
            return False
        self.ports[outer] = inner
        return True

    def forget(self, outer: int) -> None:
        if self.failure:
            raise OSError(self.failure)
        del self.ports[outer]
        self.forgotten.append(outer)


class Place:
    """A mapping and what is said of it."""

    def __init__(self, tmp_path: Path, router: Forwarder) -> None:
        self.log = EventLog(tmp_path / "events.jsonl")
        self.said: list[Event] = []
        self.log.subscribe(lambda record: self.said.append(record.event))
        self.mapping = PortMapping(self.log, lambda: router)

    def texts(self) -> list[str]:
        return [event.text for event in self.said if isinstance(event, Notice)]

    def problems(self) -> list[Problem]:
        return [event for event in self.said if isinstance(event, Problem)]


async def test_the_port_is_forwarded_by_its_own_number_and_let_go_of(tmp_path: Path) -> None:
    router = Forwarder()
    place = Place(tmp_path, router)
    await place.mapping.open(4390)
    assert place.mapping.outer == "9.9.9.9:4390"
    assert place.texts() == ["the router forwards 9.9.9.9:4390 to this node"]
    await place.mapping.aclose()
    assert router.ports == {}
    await place.mapping.aclose()  # once is enough


async def test_a_port_of_another_machine_is_left_to_it(tmp_path: Path) -> None:
    router = Forwarder()
    router.taken = {4390, 4391}
    place = Place(tmp_path, router)
    await place.mapping.open(4390)
    assert place.mapping.outer == "9.9.9.9:4392"
    assert router.ports == {4392: 4390}


async def test_a_bounded_number_of_ports_is_tried(tmp_path: Path) -> None:
    router = Forwarder()
    router.taken = set(range(65536))
    for port, tried in ((4390, OTHERS), (65534, 2)):
        router.asked = 0
        place = Place(tmp_path, router)
        await place.mapping.open(port)
        assert router.asked == tried
        assert place.mapping.outer == ""
        assert "forwarded to others" in place.texts()[0]


@pytest.mark.parametrize("outside", ["10.1.2.3", "100.64.3.4", "192.168.0.2", "", "x"])
async def test_an_address_that_is_none_of_the_internet_is_told(
    tmp_path: Path, outside: str
) -> None:
    place = Place(tmp_path, Forwarder(outside))
    await place.mapping.open(4390)
    assert "behind a translator itself" in place.texts()[0]


async def test_no_router_keeps_nobody_from_starting(tmp_path: Path) -> None:
    router = Forwarder()
    router.failure = "No IGD UPnP Device discovered"
    place = Place(tmp_path, router)
    await place.mapping.open(4390)
    await place.mapping.keep()  # there is nothing to keep
    await place.mapping.aclose()
    said = "no router forwards a port to this node: No IGD UPnP Device discovered"
    assert place.texts() == [said]
    assert place.mapping.outer == ""


async def test_a_router_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_mapping, "SILENT_S", 0.05)
    router = Forwarder()
    router.answers.clear()
    place = Place(tmp_path, router)
    await place.mapping.open(4390)
    assert place.texts() == ["no router forwards a port to this node: it is silent"]
    router.answers.set()  # at last: what nobody renews is given back, and nobody is told of it
    await wait_for(lambda: bool(router.forgotten))
    assert place.mapping.outer == ""
    await place.mapping.aclose()
    assert router.ports == {}, "it does not stay open for longer than the node lives"


async def asked_when_it_ends(place: Place, router: Forwarder, asking: Awaitable[object]) -> None:
    """A node is told to stop while the router is yet to answer."""
    before = router.asked
    router.answers.clear()
    task = asyncio.ensure_future(asking)
    await wait_for(lambda: router.asked > before)
    task.cancel()
    await place.mapping.aclose()
    router.answers.set()


async def test_a_port_that_is_asked_for_as_the_node_ends_is_let_go_of(tmp_path: Path) -> None:
    router = Forwarder()
    place = Place(tmp_path, router)
    await place.mapping.open(4390)
    await asked_when_it_ends(place, router, place.mapping.renew())
    await wait_for(lambda: router.forgotten == [4390, 4390])
    place = Place(tmp_path, router)
    await asked_when_it_ends(place, router, place.mapping.open(4390))
    await wait_for(lambda: router.forgotten == [4390] * 3)
    assert router.ports == {}


async def test_an_answer_that_nobody_takes_any_more_is_let_go_of(tmp_path: Path) -> None:
    """The node ends as the router says that it forwards another port by now."""
    router = Forwarder()
    place = Place(tmp_path, router)
    await place.mapping.open(4390)
    router.taken = {4390}
    router.ports.clear()
    await asyncio.to_thread(place.mapping._open, 4390)
    assert router.ports == {4391: 4390}
    await place.mapping.aclose()
    assert router.ports == {}


@asynccontextmanager
async def kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Forwarder, Place]]:
    """A port that the router is asked for again and again."""
    monkeypatch.setattr(port_mapping, "AGAIN_S", 0.01)
    router = Forwarder()
    place = Place(tmp_path, router)
    await place.mapping.open(4390)
    async with beside(place.mapping.keep()):
        yield router, place


async def test_it_is_asked_for_again_and_a_refusal_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that was restarted has forgotten the port, or given it to another."""
    async with kept(tmp_path, monkeypatch) as (router, place):
        router.ports.clear()
        await wait_for(lambda: bool(router.ports))
        router.failure = "Action Failed"
        before = router.asked
        await wait_for(lambda: router.asked > before + 3)
        assert [problem.code for problem in place.problems()] == ["E302"]
        router.failure = ""
        router.ports.clear()
        await wait_for(lambda: bool(router.ports))
        router.taken = set(range(65536))
        await wait_for(lambda: len(place.problems()) == 2)
        assert "forwarded to others" in place.problems()[1].why
        assert place.mapping.outer == "9.9.9.9:4390"


async def test_what_is_forwarded_by_then_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that was restarted may have another address outside, and the port be another's."""
    async with kept(tmp_path, monkeypatch) as (router, place):
        router.taken = {4390}
        await wait_for(lambda: place.mapping.outer == "9.9.9.9:4391")
        router.taken = set()
        router.outside = "8.8.8.8"
        await wait_for(lambda: place.mapping.outer != "9.9.9.9:4391")
        assert place.mapping.outer == "8.8.8.8:4391", "the port that it has been called at stays"
        assert place.texts()[1:] == [
            "the router forwards 9.9.9.9:4391 to this node now",
            "the router forwards 8.8.8.8:4391 to this node now",
        ]
        router.outside = ""  # its own link is down
        await wait_for(lambda: bool(place.problems()))
        assert "no address of the internet" in place.problems()[0].why
        assert place.mapping.outer == "8.8.8.8:4391"
    await place.mapping.aclose()
    assert router.forgotten == [4391]


async def test_where_no_router_answers_the_library_says_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        discoverdelay = 0

        def discover(self) -> int:
            raise Exception("Success")

    monkeypatch.setitem(sys.modules, "miniupnpc", SimpleNamespace(UPnP=Library))
    place = Place(tmp_path, Forwarder())
    mapping = PortMapping(place.log)
    await mapping.open(4390)
    said = "no router forwards a port to this node: none answers to UPnP in this network"
    assert place.texts() == [said]


async def test_it_is_asked_for_at_once_where_the_machine_has_another_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Forwarder()
    place = Place(tmp_path, router)
    assert await place.mapping.renew() == "", "nothing is forwarded yet"
    assert router.asked == 0
    await place.mapping.open(4390)
    router.taken = {4390}  # leads to another machine by now
    assert await place.mapping.renew() == ""
    assert place.mapping.outer == "9.9.9.9:4391"
    router.answers.clear()
    monkeypatch.setattr(port_mapping, "SILENT_S", 0.5)
    assert await place.mapping.renew() == "it is silent"
    router.answers.set()
    assert place.mapping.outer == "9.9.9.9:4391"


class Home:
    """A router as miniupnpc shows it, and where ``machine`` is behind it.

    ``leases``: it knows an end of what it forwards. ``strict``: it lets nobody let go of what leads
    to another address.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine, self.outside = "192.168.1.10", "9.9.9.9"
        self.leases, self.strict = True, False
        self.table: dict[int, tuple[str, int]] = {}
        monkeypatch.setitem(sys.modules, "miniupnpc", SimpleNamespace(UPnP=lambda: self))

    lanaddr = property(lambda self: self.machine)

    def discover(self) -> int:
        return 1

    def selectigd(self) -> int:
        return 1

    def externalipaddress(self) -> str:
        return self.outside

    def getspecificportmapping(self, outer: int, protocol: str) -> tuple[object, ...] | None:
        there = self.table.get(outer)
        return there and (*there, "Atoll", True, LEASE_S)

    def addportmapping(
        self, outer: int, protocol: str, host: str, inner: int, words: str, of: str, seconds: int
    ) -> bool:
        if seconds and not self.leases:
            raise Exception("OnlyPermanentLeasesSupported")
        if self.table.get(outer, (host, inner)) != (host, inner):
            raise Exception("ConflictInMappingEntry")
        self.table[outer] = (host, inner)
        return True

    def deleteportmapping(self, outer: int, protocol: str) -> bool:
        if self.strict and self.table[outer][0] != self.machine:
            raise Exception("Action not authorized")
        del self.table[outer]
        return True


@pytest.mark.parametrize("leases", [True, False])
async def test_the_same_port_leads_to_where_the_machine_is_however_often_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leases: bool
) -> None:
    home = Home(monkeypatch)
    home.leases = leases
    mapping = PortMapping(EventLog(tmp_path / "events.jsonl"))
    await mapping.open(4390)
    for last in range(11, 13 + OTHERS):
        home.machine = f"192.168.1.{last}"
        assert await mapping.renew() == ""
        assert mapping.outer == "9.9.9.9:4390"
        assert home.table == {4390: (home.machine, 4390)}, "nothing leads to where it was"
    await mapping.aclose()
    assert home.table == {}


@pytest.mark.parametrize("why", ["others", "strict", "elsewhere"])
async def test_what_leads_to_others_stays_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Behind another router a machine may have the address that this one had behind its own."""
    home = Home(monkeypatch)
    mapping = PortMapping(EventLog(tmp_path / "events.jsonl"))
    await mapping.open(4390)
    home.machine = "192.168.1.11"
    if why == "others":
        home.table[4390] = ("192.168.1.12", 4390)
    home.strict = why == "strict"
    if why == "elsewhere":
        home.outside = "8.8.8.8"
    theirs = dict(home.table)
    assert await mapping.renew() == ""
    assert home.table == {**theirs, 4391: ("192.168.1.11", 4390)}


async def test_without_the_library_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "miniupnpc", None)
    mapping = PortMapping(EventLog(tmp_path / "events.jsonl"))
    with pytest.raises(OperatorError, match="needs miniupnpc") as caught:
        await mapping.open(4390)
    assert caught.value.code == "E605"
    assert "-e '.[upnp]'" in caught.value.fix
