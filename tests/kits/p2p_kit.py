"""Hosts of hivemind's calls on a simulated network, and what of hivemind their tests use."""

from __future__ import annotations

from typing import Any

from identity_kit import identity

from protocols.memory.transport import Link, MemoryNetwork
from protocols.p2p import P2P, bindings
from protocols.whereabouts import Whereabouts

bindings()  # before the imports below: it puts hivemind's import-time warnings away

from hivemind.dht import DHTNode  # noqa: E402
from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.proto import dht_pb2  # noqa: E402

__all__ = ["DHTID", "DHTNode", "Host", "dht_pb2", "double", "fast_network", "two_hosts"]


def fast_network() -> MemoryNetwork:
    return MemoryNetwork(seed=1, link=Link(latency=0.0005))


class Host:
    """A peer on a memory network."""

    def __init__(self, network: MemoryNetwork, number: int, **options: Any) -> None:
        self.identity = identity(number)
        self.transport = network.join(self.identity.peer_id)
        self.whereabouts = Whereabouts(self.transport, self.identity)
        self.whereabouts.publish([f"192.0.2.{number}:4390"])
        self.p2p = P2P(self.transport, self.whereabouts, **options)
        self.peer_id = self.p2p.peer_id


def two_hosts() -> tuple[Host, Host]:
    network = fast_network()
    return Host(network, 1), Host(network, 2)


async def double(request: Any, context: Any) -> Any:
    """A handler of pings."""
    return dht_pb2.PingResponse(dht_time=2.0, available=request.validate)
