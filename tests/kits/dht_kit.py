"""A run's directory over hivemind's DHT, on a memory network."""

from __future__ import annotations

import time
from typing import Any

import pytest
from identity_kit import identity

from bootstrap.dht import Dht
from protocols.memory.transport import Link, MemoryNetwork, MemoryTransport
from protocols.p2p import bindings
from protocols.tasks import Background
from protocols.whereabouts import Whereabouts

RUN = bytes(range(32))


def keep_hiveminds_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it back after a test, whose directories give hivemind their own."""
    bindings()  # first: it puts hivemind's import-time warnings away
    for module in ("utils.timed_storage", "dht.protocol", "dht.routing", "dht.node"):
        monkeypatch.setattr(f"hivemind.{module}.get_dht_time", time.time)


class Swarm:
    """Nodes on a memory network; the first is everybody's seed."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(seed=3, link=Link(latency=0.0005))
        self.dhts: list[Dht] = []
        self.whereabouts: list[Whereabouts] = []
        self.transports: list[MemoryTransport] = []
        self.upkeep = Background()

    async def add(self, run: bytes = RUN, refresh: float = 60.0, **options: Any) -> Dht:
        who = identity(len(self.dhts) + 1)
        transport = self.network.join(who.peer_id)
        whereabouts = Whereabouts(transport, who)
        whereabouts.publish([f"192.0.2.{len(self.dhts) + 1}:4390"])
        seeds = [self.transports[0].peer_id] if self.transports else []
        dht = await Dht.start(transport, whereabouts, seeds, run, **options)
        self.upkeep.spawn(dht.maintain(refresh))
        self.dhts.append(dht)
        self.whereabouts.append(whereabouts)
        self.transports.append(transport)
        return dht

    async def grow(self, count: int) -> None:
        for _ in range(count):
            await self.add()

    def record(self, index: int) -> bytes:
        own = self.whereabouts[index].own
        assert own is not None
        return own.data
