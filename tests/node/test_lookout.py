"""Who is looked for in the DHT, and what goes on meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from node.entry.lookout import ASKED_AT_ONCE, DISCOVERY_S, SILENT_S, Lookout
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
        now = asyncio.get_running_loop().time
        node: Any = SimpleNamespace(
            identity=SimpleNamespace(peer_id=ME),
            transport=SimpleNamespace(book=None),
            cache=SimpleNamespace(remember=lambda places: None),
        )
        swarm: Any = SimpleNamespace(
            presence=SimpleNamespace(ask=self._ask),
            membership=SimpleNamespace(islands=self.known, alive=lambda now: ()),
            now=now,
        )
        entrance: Any = SimpleNamespace(visit_seeds=self._visit_seeds)
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
        await scene.look(4 * DISCOVERY_S)
        assert [at for peer, at in scene.asked if peer == ISLAND] == [4 * ANSWER_S]
        assert [at for peer, at in scene.asked if peer == SILENT[0]] == [0.0]
        assert scene.seeds_visited == [0.0, DISCOVERY_S, 2 * DISCOVERY_S, 3 * DISCOVERY_S]

    virtual_time.run(main())


def test_who_did_not_answer_is_asked_again_later() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.look(SILENT_S + 2 * DISCOVERY_S)
        times = [at for peer, at in scene.asked if peer == SILENT[0]]
        assert len(times) == 2
        assert times[1] >= SILENT_S

    virtual_time.run(main())
