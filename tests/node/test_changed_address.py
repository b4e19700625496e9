"""A node whose address changes while links and routers are not up yet, on the virtual clock."""

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


class Scene:
    """The node, with what its peers say of it."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own = OLD  # the machine's address
        self.dialled = True  # whether peers can dial it there
        self.relaying = False  # whether they relay
        self.record: tuple[str, ...] = ()
        self.announced: list[list[str]] = []  # to all
        self.looks: list[float] = []
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
        self.place.publish()
        self.place.told = lambda: self.announced.append(self.place.addresses())
        clocks: Any = SimpleNamespace(add=lambda *given: None)
        nothing: Any = None
        entrance = Entrance(
            config, transport, whereabouts, nothing, clocks, self.log, self.outbound,
            lambda peer: f"{self.own}:7", self.place.seen,
        )  # fmt: skip
        node: Any = SimpleNamespace(place=self.place, outbound=self.outbound, events=self.log)
        swarm: Any = SimpleNamespace(now=self.now)
        replica: Any = SimpleNamespace(place=SimpleNamespace(run=b""))
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
        return SimpleNamespace(peer=peer, welcome=None, offset=0.0, round_trip=0.1)

    async def _reach(self, transport: Any, peers: Any) -> Reach:
        self.looks.append(self.now())
        assert self.record, "there is something to dial"
        await asyncio.sleep(1)
        by_relay = any(one.startswith("relay") for one in self.record)
        return Reach.YES if by_relay or self.dialled else Reach.NO

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
        async def look() -> None:
            while True:
                await self.lookout._look_after_own_place()
                await asyncio.sleep(MOVED_S)

        task = asyncio.ensure_future(look())
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
