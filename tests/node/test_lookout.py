"""Who is looked for in the DHT, and what goes on meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

from node.entry.lookout import AGAIN_S, ASKED_AT_ONCE, DISCOVERY_S, MOVED_S, SILENT_S, Lookout
from node.errors import operator_error
from node.monitor.views import NodeView
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time

ANSWER_S = 5.0  # until it is known of one that it does not answer
ME, ISLAND, *SILENT = (
    Identity.from_seed(n.to_bytes(32, "big")).peer_id for n in range(1, 3 + 4 * ASKED_AT_ONCE)
)


class Scene:
    """A node that looks for others; most of those that it finds are gone."""

    def __init__(self) -> None:
        self.known: dict[PeerId, None] = {}
        self.asked: list[tuple[PeerId, float]] = []
        self.seeds_visited: list[float] = []
        self.looked: list[float] = []
        self.told: list[Any] = []
        now = asyncio.get_running_loop().time
        node: Any = SimpleNamespace(
            identity=SimpleNamespace(peer_id=ME),
            transport=SimpleNamespace(book=None),
            cache=SimpleNamespace(remember=lambda places: None),
            place=SimpleNamespace(moved=False, addresses=lambda: ["10.0.0.9:1"]),
            outbound=SimpleNamespace(),
            events=SimpleNamespace(emit=self.told.append),
            state=SimpleNamespace(node=NodeView(peer=ME)),
        )
        node.place.map_again = AsyncMock()
        node.place.join_address = lambda: f"10.0.0.9:1/{ME}"
        self.node = node
        swarm: Any = SimpleNamespace(
            presence=SimpleNamespace(ask=self._ask),
            membership=SimpleNamespace(islands=self.known, alive=lambda now: ()),
            now=now,
        )
        self.reaching = reaching = SimpleNamespace(look_again=self._look_again, settled=True)
        entrance: Any = SimpleNamespace(
            visit_seeds=self._visit_seeds,
            reaching=reaching,
            config=SimpleNamespace(peers=[], invitation=""),
            cache=SimpleNamespace(load=list),
            transport=None,
        )
        replica: Any = SimpleNamespace(place=SimpleNamespace(run=b""))
        self.lookout = Lookout(node, entrance, swarm, replica, lambda peer, error: None)
        self.now = now

    async def _ask(self, peer: PeerId) -> None:
        self.asked.append((peer, self.now()))
        if peer == ISLAND:
            self.known[peer] = None
        else:
            await asyncio.sleep(ANSWER_S)

    async def _visit_seeds(self, run: bytes, known: object) -> list[Any]:
        self.seeds_visited.append(self.now())
        return []

    async def _look_again(self, places: list[Any], run: bytes) -> None:
        self.looked.append(self.now())
        self.node.place.moved = len(self.looked) < 2  # nobody answers at first
        self.reaching.settled = len(self.looked) > 3
        if not self.reaching.settled:
            raise operator_error("E302")

    async def look(self, seconds: float) -> None:
        async def islands() -> dict[PeerId, None]:
            return dict.fromkeys([ME, *SILENT, ISLAND])

        dht: Any = SimpleNamespace(islands=islands)
        try:
            async with asyncio.timeout(seconds):
                await self.lookout.run(dht)
        except TimeoutError:
            return


def test_many_who_do_not_answer_hold_up_nothing() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.look(3.5 * DISCOVERY_S)
        assert [at for peer, at in scene.asked if peer == ISLAND] == [4 * ANSWER_S]
        assert [at for peer, at in scene.asked if peer == SILENT[0]] == [0.0]
        assert scene.seeds_visited == [0.0, DISCOVERY_S, 2 * DISCOVERY_S, 3 * DISCOVERY_S]

    virtual_time.run(main())


def test_others_are_told_where_this_node_is_once_its_address_has_changed() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.look(1.5 * DISCOVERY_S)
        assert scene.looked == []
        scene.node.place.moved = True
        await scene.look(3.5 * DISCOVERY_S)
        first, second, third, fourth = scene.looked  # until it is dialled
        assert second - first == MOVED_S
        assert AGAIN_S <= third - second < AGAIN_S + MOVED_S
        assert AGAIN_S <= fourth - third < 2 * AGAIN_S + MOVED_S
        assert [event.code for event in scene.told] == ["E302", "E302"]  # and the node goes on
        assert scene.node.outbound.candidates == scene.lookout.relays
        said: Any = SimpleNamespace(note=MagicMock(), tell=MagicMock(), ask=None)
        scene.lookout.swarm.presence, dht = said, MagicMock()
        scene.lookout.moved(dht)
        said.note.assert_called_once_with(addresses=("10.0.0.9:1",))
        said.tell.assert_called_once_with()
        dht.keep_announced.assert_called_once_with()
        assert scene.node.state.node.join_address == f"10.0.0.9:1/{ME}"

    virtual_time.run(main())


def test_who_did_not_answer_is_asked_again_later() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.look(SILENT_S + 2 * DISCOVERY_S)
        times = [at for peer, at in scene.asked if peer == SILENT[0]]
        assert len(times) == 2
        assert times[1] >= SILENT_S

    virtual_time.run(main())
