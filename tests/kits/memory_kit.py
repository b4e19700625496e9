"""Peers of the simulated internet, and what they say and do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from protocols.errors import Unreachable, Why
from protocols.identity import Identity, PeerId
from protocols.memory.transport import MemoryNetwork, MemoryTransport
from protocols.transport import CHUNK_BYTES, Buffer, Incoming, Outgoing

MB = 1_000_000
PEERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, 65)]


def now() -> float:
    return asyncio.get_running_loop().time()


def join(network: MemoryNetwork, count: int = 2) -> list[MemoryTransport]:
    return [network.join(peer) for peer in PEERS[:count]]


def body(data: bytes, step: int = 100_000) -> Outgoing:
    async def chunks() -> AsyncIterator[Buffer]:
        for start in range(0, len(data), step):
            yield memoryview(data)[start : start + step]

    return Outgoing(len(data), chunks())


def zeros(length: int) -> Outgoing:
    block = bytes(CHUNK_BYTES)

    async def chunks() -> AsyncIterator[Buffer]:
        for start in range(0, length, CHUNK_BYTES):
            yield memoryview(block)[: min(CHUNK_BYTES, length - start)]

    return Outgoing(length, chunks())


async def echo(peer: PeerId, data: bytes) -> bytes:
    return data


async def collect(peer: PeerId, header: bytes, incoming: Incoming) -> bytes:
    """Read a body and answer with it."""
    return b"".join([bytes(chunk) async for chunk in incoming])


async def count(peer: PeerId, header: bytes, incoming: Incoming) -> bytes:
    """Read a body and answer with its length."""
    return str(sum([len(chunk) async for chunk in incoming])).encode()


async def give(peer: PeerId, header: bytes) -> Outgoing:
    return zeros(int(header))


async def pull(
    transport: MemoryTransport, peer: PeerId, name: str, *, limit: int = 1 << 40, timeout: float = 5
) -> bytes:
    async with transport.pull(peer, name, b"", max_length=limit, timeout=timeout) as incoming:
        return b"".join([bytes(chunk) async for chunk in incoming])


async def pull_zeros(
    transport: MemoryTransport, peer: PeerId, length: int, *, timeout: float = 5
) -> int:
    header = str(length).encode()
    async with transport.pull(peer, "give", header, max_length=length, timeout=timeout) as incoming:
        return sum([len(chunk) async for chunk in incoming])


def serving(network: MemoryNetwork, number: int = 2) -> list[MemoryTransport]:
    """Peers that answer ``echo``, ``take`` and ``give``."""
    members = join(network, number)
    for member in members:
        member.on_call("echo", echo)
        member.on_push("take", count, max_length=1000 * MB)
        member.on_pull("give", give)
    return members


async def why(transport: MemoryTransport, peer: PeerId, *, timeout: float = 2) -> Why | None:
    """How a call fails; None if it does not."""
    try:
        await transport.call(peer, "echo", b"x", timeout=timeout)
    except Unreachable as error:
        return error.why
    return None
