"""Hosts that greet each other over a network in memory."""

from __future__ import annotations

from typing import Any

import pytest
from identity_kit import identity

from bootstrap.handshake import Gate, Greeting, greet
from protocols.errors import OperatorError, RemoteRefused
from protocols.memory.transport import Link, MemoryNetwork
from protocols.messages import Hello
from protocols.whereabouts import Whereabouts

RUN, OTHER = b"\x01" * 32, b"\x02" * 32


class Host:
    def __init__(self, network: MemoryNetwork, number: int) -> None:
        self.identity = identity(number)
        self.peer = self.identity.peer_id
        self.transport = network.join(self.peer)
        self.whereabouts = Whereabouts(self.transport, self.identity)
        self.whereabouts.publish([f"192.0.2.{number}:4390"])

    def gate(self, **options: Any) -> Gate:
        options = {"software": "0.1.0", "run": lambda: RUN} | options
        return Gate(self.transport, self.whereabouts, **options)

    async def greet(self, other: Host, **options: Any) -> Greeting:
        options = {"software": "0.2.0"} | options
        return await greet(self.transport, self.whereabouts, other.peer, **options)


async def refused(code: str, caller: Host, other: Host, **options: Any) -> OperatorError:
    with pytest.raises(OperatorError) as raised:
        await caller.greet(other, **options)
    assert raised.value.code == code
    return raised.value


async def refusal_of(hello: Hello, caller: Host, other: Host) -> str:
    with pytest.raises(RemoteRefused) as raised:
        await caller.transport.call(other.peer, "hello", hello.encode(), timeout=5)
    return raised.value.code


def two_hosts() -> tuple[Host, Host]:
    network = MemoryNetwork(seed=1, link=Link(latency=0.001))
    return Host(network, 1), Host(network, 2)
