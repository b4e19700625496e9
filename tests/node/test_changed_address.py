"""A node that is dialled elsewhere by now: its address changes, a port is forwarded to it.

On the virtual clock; links and routers may not be up yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from identity_kit import identity

from bootstrap.dial_back import Reach
from node.config import resolve
from node.entry.entrance import Entrance
from node.entry.lookout import LAST_AGAIN_S, MOVED_S, Lookout
from node.entry.outbound import Outbound
from node.entry.own_address import OwnPlace
from node.monitor.event_log import EventLog
from node.monitor.events import Notice, Problem
from protocols.addresses import PeerAddress
from protocols.errors import Unreachable, Why
from protocols.memory import virtual_time

PEERS = [PeerAddress("192.0.2.7", number, identity(number).peer_id) for number in (2, 3)]
OLD, NEW = "10.0.0.1", "192.168.1.7"
OUTER, ELSEWHERE = "203.0.113.7", "203.0.113.8"


class Scene:
    """The node, with what its peers say of it."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own = OLD  # the machine's address
        self.dialled = True  # whether peers can dial it there
        self.outer = ""  # where they see it come from, if that is elsewhere
        self.forwarded = False  # whether they get through to its port there
        self.relaying = False  # whether they relay
        self.record: tuple[str, ...] = ()
        self.announced: list[list[str]] = []  # to all
        self.looks: list[float] = []
        self.tries: list[float] = []  # to be dialled where they see it come from
        self.gone = asyncio.Event()  # the relay
        transport: Any = SimpleNamespace(
            listening=("0.0.0.0", 4390),
            peer_id=identity(1).peer_id,
            relays=SimpleNamespace(reserve=self._reserve, attend=self._attend, met=0),
            book=SimpleNamespace(add=lambda *given: None),
        )
        whereabouts: Any = SimpleNamespace(publish=self._publish, own=None)
        self.whereabouts = whereabouts
        self.log = EventLog()
        self.spawned: list[Any] = []
        self.outbound = Outbound(transport, self.log, self._spawn)
        config = resolve({"dir": str(tmp_path)}, {})
        self.place = OwnPlace(config, transport, self.outbound, whereabouts)
        monkeypatch.setattr("node.entry.own_address.outward_address", lambda *given: self.own)
        monkeypatch.setattr("node.entry.entrance.greet", self._greet)
        monkeypatch.setattr("node.entry.reaching.reach", self._reach)
        monkeypatch.setattr("node.entry.reaching.outside", self._outside)
        self.place.publish()
        self.place.told = lambda: self.announced.append(self.place.addresses())
        clocks: Any = SimpleNamespace(add=lambda *given: None)
        cache: Any = SimpleNamespace(remember=lambda places: None, load=list)
        entrance = Entrance(
            config, transport, whereabouts, cache, clocks, self.log, self.outbound,
            lambda peer: f"{self.own}:7", self.place,
        )  # fmt: skip
        node: Any = SimpleNamespace(
            place=self.place, outbound=self.outbound, events=self.log,
            cache=cache,
        )  # fmt: skip
        swarm: Any = SimpleNamespace(now=self.now, membership=SimpleNamespace(liveness=None))
        replica: Any = SimpleNamespace(place=SimpleNamespace(run=b""))
        self.reaching = entrance.reaching
        self.lookout = Lookout(node, entrance, swarm, replica, lambda peer, error: None)
        self.lookout.relays = lambda: PEERS  # type: ignore[method-assign]

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self.spawned.append(task)
        return task

    def _publish(self, where: Any, relay: str) -> None:
        self.record = tuple(where)
        self.whereabouts.own = SimpleNamespace(record=SimpleNamespace(addresses=self.record))

    async def _greet(self, transport: Any, whereabouts: Any, peer: Any, **_: Any) -> Any:
        welcome = SimpleNamespace(observed=f"{self.outer or self.own}:50000")
        return SimpleNamespace(peer=peer, welcome=welcome, offset=0.0, round_trip=0.1)

    async def _reach(self, transport: Any, peers: Any) -> Reach:
        self.looks.append(self.now())
        assert self.record, "there is something to dial"
        await asyncio.sleep(1)
        if any(one.startswith("relay") for one in self.record):
            return Reach.YES
        if self.outer:
            passed = self.forwarded and f"{self.outer}:4390" in self.record
            return Reach.YES if passed else Reach.ELSEWHERE
        return Reach.YES if self.dialled else Reach.NO

    async def _outside(self, transport: Any, seen: Any, port: int) -> str:
        assert set(seen.values()) == {f"{self.outer or self.own}:50000"}
        self.tries.append(self.now())
        await asyncio.sleep(1)
        passed = self.forwarded if self.outer else self.dialled
        return f"{self.outer or self.own}:{port}" if passed else ""

    async def _reserve(self, peer: Any) -> float:
        if not self.relaying:
            raise Unreachable(peer, Why.TIMEOUT)
        return 1.0

    async def _attend(self, peer: Any, where: str) -> None:
        await self.gone.wait()
        self.gone.clear()
        raise Unreachable(peer, Why.TIMEOUT)

    async def until(self, done: Callable[[], bool], seconds: float) -> None:
        for _ in range(int(seconds)):
            if done():
                return
            await asyncio.sleep(1)
        raise AssertionError("not within that time")

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        async def islands() -> list[Any]:
            return []

        dht: Any = SimpleNamespace(islands=islands)
        task = asyncio.ensure_future(self.lookout.run(dht))
        try:
            yield
        finally:
            for one in (task, *self.spawned):
                one.cancel()
            await asyncio.gather(task, *self.spawned, return_exceptions=True)

    def told(self, kind: type[Any]) -> list[Any]:
        return [one.event for one in self.log.since(0) if isinstance(one.event, kind)]


def test_who_is_not_dialled_at_once_is_called_there_all_the_same_and_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, monkeypatch)
        async with scene.looking():
            scene.own, scene.dialled = NEW, False
            await asyncio.sleep(4 * LAST_AGAIN_S)
            assert scene.record == (f"{NEW}:4390",)
            assert scene.announced == [[f"{NEW}:4390"]], "once, and never that there is none"
            assert [event.code for event in scene.told(Problem)] == ["E302"]
            pauses = [b - a for a, b in zip(scene.looks, scene.looks[1:], strict=False)]
            assert 6 < len(pauses) < 30
            assert max(pauses) < LAST_AGAIN_S + 3 * MOVED_S
            assert pauses[-1] > 3 * pauses[0]
            scene.dialled = True
            await scene.until(lambda: bool(scene.told(Notice)), 2 * LAST_AGAIN_S)
            [notice] = scene.told(Notice)
            assert notice.text.endswith(f"{NEW}:4390 now (dial-back ok (direct))")
            looks = len(scene.looks)
            await asyncio.sleep(4 * LAST_AGAIN_S)
            assert len(scene.looks) == looks

    virtual_time.run(main())


def test_who_took_a_relay_is_announced_again_once_it_is_dialled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, monkeypatch)
        async with scene.looking():
            scene.own, scene.dialled, scene.relaying = NEW, False, True
            await asyncio.sleep(4 * LAST_AGAIN_S)
            relayed = [scene.outbound.address]
            assert scene.announced == [[f"{NEW}:4390"], relayed], "that it tries is told to few"
            # while it tries once more it is called where it would be dialled: for a second
            await scene.until(lambda: scene.record == tuple(relayed), 2 * MOVED_S)
            [notice] = scene.told(Notice)
            assert notice.text.startswith(f"this node's address is {relayed[0]} now (outbound")
            scene.dialled = True
            await scene.until(lambda: len(scene.announced) > 2, 2 * LAST_AGAIN_S)
            assert scene.announced[2:] == [[f"{NEW}:4390"]]
            assert scene.outbound.describe() == ""
            scene.gone.set()  # nobody misses it, nor looks for another
            await asyncio.gather(*scene.spawned)
            assert scene.told(Problem) == []
            scene.own, scene.dialled = OLD, False  # and a relay is taken once more
            await scene.until(lambda: scene.outbound.needed, LAST_AGAIN_S)
            assert scene.announced[-1] == [scene.outbound.address]

    virtual_time.run(main())


def test_the_router_forwards_to_where_a_node_is_before_peers_dial_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, monkeypatch)
        scene.place.mapped = lambda: "9.9.9.9:4390"
        scene.place.publish()

        async def map_again() -> None:
            scene.dialled = True

        scene.place.map_again = map_again
        async with scene.looking():
            scene.own, scene.dialled = NEW, False  # the port leads to the old address
            await scene.until(lambda: bool(scene.told(Notice)), 4 * MOVED_S)
            assert scene.told(Problem) == []
            assert scene.record == ("9.9.9.9:4390", f"{NEW}:4390")

    virtual_time.run(main())


async def came(scene: Scene) -> str:
    """The node has joined through its peers; returns how it is called."""
    greetings: Any = [await scene._greet(None, None, one.peer) for one in PEERS]
    for one in PEERS:
        scene.reaching.greeted(one.peer)
    return await scene.reaching.check(greetings, PEERS, b"")


def test_a_port_that_is_forwarded_is_found_on_the_way_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or all of an address, as clouds translate: nobody has to be told it."""

    async def main() -> None:
        scene = Scene(tmp_path, monkeypatch)
        scene.outer, scene.forwarded = OUTER, True
        assert await came(scene) == f"dial-back ok (direct at {OUTER}:4390, as peers see it)"
        assert scene.record == (f"{OUTER}:4390", f"{OLD}:4390"), "those beside it see that one"
        assert scene.announced[-1] == list(scene.record)
        assert not scene.outbound.needed

    virtual_time.run(main())


def test_who_has_taken_a_relay_is_dialled_once_its_port_is_forwarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, monkeypatch)
        scene.outer, scene.relaying = OUTER, True
        assert (await came(scene)).startswith("outbound only -> relay")
        relayed = scene.record
        async with scene.looking():
            await asyncio.sleep(3 * LAST_AGAIN_S)
            assert scene.record == relayed
            assert scene.told(Notice) == []
            assert len(scene.tries) > 6
            scene.forwarded = True
            await scene.until(lambda: bool(scene.told(Notice)), LAST_AGAIN_S + 30)
            [notice] = scene.told(Notice)
            where = f"{OUTER}:4390, {OLD}:4390"
            how = f"dial-back ok (direct at {OUTER}:4390, as peers see it)"
            assert notice.text == f"this node's address is {where} now ({how})"
            assert scene.announced[-1] == where.split(", ")
            scene.outer = ELSEWHERE  # of which this machine sees nothing
            await scene.until(lambda: f"{ELSEWHERE}:4390" in scene.record, 2 * LAST_AGAIN_S)
            scene.forwarded = False
            await scene.until(lambda: scene.outbound.needed, 2 * LAST_AGAIN_S)
            assert scene.record == relayed
            assert scene.told(Problem) == []

    virtual_time.run(main())


def test_a_firewall_that_opens_later_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, monkeypatch)
        scene.dialled, scene.relaying = False, True
        assert (await came(scene)).startswith("outbound only -> relay")
        async with scene.looking():
            await asyncio.sleep(LAST_AGAIN_S)
            scene.dialled = True
            await scene.until(lambda: not scene.outbound.needed, LAST_AGAIN_S + 30)
            assert scene.record == (f"{OLD}:4390",)
            await asyncio.sleep(2 * LAST_AGAIN_S)
            looks = len(scene.looks)
            await asyncio.sleep(2 * LAST_AGAIN_S)
            assert len(scene.looks) == looks, "and then it is settled"

    virtual_time.run(main())


def test_who_began_a_run_learns_where_it_is_dialled_and_takes_no_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever came has found the way, by an address that this node was not told of."""

    async def main() -> None:
        scene = Scene(tmp_path, monkeypatch)
        scene.outer, scene.relaying = OUTER, True
        async with scene.looking():
            await asyncio.sleep(3 * LAST_AGAIN_S)
            assert scene.tries
            assert not scene.outbound.needed
            assert scene.log.since(0) == []
            scene.forwarded = True
            await scene.until(lambda: bool(scene.told(Notice)), LAST_AGAIN_S + 30)
            assert scene.record == (f"{OUTER}:4390", f"{OLD}:4390")

    virtual_time.run(main())
