"""What tests of the transports' contract share; ``NETWORKS`` names the transports held to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any
from unittest.mock import patch

from protocols.http.transport import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.lanes.handle import LaneHandle
from protocols.lanes.packing import Packer
from protocols.limits import Limits
from protocols.memory.network import Link
from protocols.memory.transport import MemoryNetwork
from protocols.transport import (
    Buffer,
    Incoming,
    Outgoing,
    Transport,
)

SOON = 10.0  # seconds; nothing here should take that long


class HttpNet:
    """Real transports on loopback; every one knows where the earlier ones live."""

    def __init__(self, *, tls: bool, host: str = "127.0.0.1", packed: bool = False) -> None:
        self.tls = tls
        self.host = host  # by which members are dialled: a name is always dialled by TCP
        self.stack = AsyncExitStack()
        if packed:  # as on a slow link, which loopback is not
            self.stack.enter_context(patch.object(LaneHandle, "packer", lambda *_: Packer()))
        self.members: list[HttpTransport] = []

    async def join(self) -> Transport:
        transport = HttpTransport(
            Identity.generate(), listen="127.0.0.1:0", tls=self.tls, limits=Limits(grace=0.2)
        )
        await self.stack.enter_async_context(transport)
        for other in self.members:
            other.book.add(transport.peer_id, self.address(transport))
            transport.book.add(other.peer_id, self.address(other))
        self.members.append(transport)
        return transport

    def address(self, transport: Any) -> str:
        return f"{self.host}:{transport.listening[1]}"

    async def aclose(self) -> None:
        await self.stack.aclose()


class MemoryNet:
    def __init__(self) -> None:
        self.network = MemoryNetwork(seed=1, link=Link(latency=0.001))
        self.members: list[Transport] = []

    async def join(self) -> Transport:
        transport: Transport = self.network.join(Identity.generate().peer_id)
        self.members.append(transport)
        return transport

    def address(self, transport: Any) -> str:
        address: str = transport.address
        return address

    async def aclose(self) -> None:
        for transport in self.members:
            await transport.aclose()


Net = HttpNet | MemoryNet
NETWORKS: dict[str, Callable[[], Net]] = {
    "tls": lambda: HttpNet(tls=True),
    "plain": lambda: HttpNet(tls=False),
    "tls by tcp": lambda: HttpNet(tls=True, host="localhost"),
    "plain by tcp": lambda: HttpNet(tls=False, host="localhost"),
    "packed": lambda: HttpNet(tls=True, packed=True),
    "packed plain": lambda: HttpNet(tls=False, packed=True),
    "memory": MemoryNet,
}


async def echo(peer: PeerId, body: bytes) -> bytes:
    return peer.encode() + b":" + body


def outgoing(data: bytes, size: int = 100_000) -> Outgoing:
    async def chunks() -> AsyncIterator[Buffer]:
        for start in range(0, len(data), size):
            yield memoryview(data)[start : start + size]

    return Outgoing(len(data), chunks())


class Sink:
    """A push handler that keeps what it gets, and says how it ended."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.header = b""
        self.peer = ""
        self.length = -1
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self.complete = False

    async def __call__(self, peer: PeerId, header: bytes, body: Incoming) -> bytes:
        self.peer, self.header, self.length = peer, header, body.length
        try:
            async for chunk in body:
                self.begun.set()
                self.data += chunk
            self.complete = True
            return b"taken"
        finally:
            self.ended.set()


async def endless(closed: asyncio.Event, data: bytes = b"") -> AsyncIterator[Buffer]:
    """Some bytes, and then nothing for ever."""
    try:
        if data:
            yield data
        await asyncio.Event().wait()
        yield b""
    finally:
        closed.set()


async def within(awaitable: Awaitable[Any], seconds: float = SOON) -> Any:
    return await asyncio.wait_for(awaitable, seconds)


async def collect(pull: AbstractAsyncContextManager[Incoming], into: bytearray) -> int:
    """Read a pull to its end; returns the announced length."""
    async with pull as incoming:
        async for chunk in incoming:
            into += chunk
        return incoming.length
