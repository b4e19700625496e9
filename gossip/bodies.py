"""Encoded parts on their way: out of memory, into memory, and checked before anyone relies on them.

A part counts as held only when its bytes match the digest *and* decode: what a majority has voted
for must be applicable everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3

from gossip.merging import as_bytes
from protocols.codecs import RangeCodec
from protocols.errors import Malformed
from protocols.identity import Identity, PeerId
from protocols.messages import PartRequest, PartResult
from protocols.transport import CHUNK_BYTES, Buffer, Incoming, Outgoing, Transport

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass
class Wiring:
    """What every exchange of a node shares."""

    transport: Transport
    identity: Identity
    run: bytes
    codec: RangeCodec
    spawn: Spawn
    offload: Callable[[Callable[[], Any]], Awaitable[Any]]
    now: Callable[[], float]


def check_part(codec: RangeCodec, result: PartResult, data: torch.Tensor) -> None:
    """Raise RemoteProtocolError unless ``data`` is what the result says, and can be applied."""
    if blake3(as_bytes(data)).digest() != result.digest:
        raise Malformed("the part does not match its digest")
    for chunk in codec.chunks(result.start, result.stop):
        values = torch.empty(chunk.stop - chunk.start)
        codec.decode_chunk(chunk, data[chunk.offset : chunk.offset + chunk.size], values)


async def pull_part(
    wiring: Wiring, peer: PeerId, result: PartResult, timeout: float
) -> torch.Tensor:
    """The encoded bytes of a merged part, checked. Raises TransportError or RemoteProtocolError."""
    header = PartRequest(
        wiring.run, result.fragment, result.round, result.start, result.stop, result.digest
    )
    size = wiring.codec.encoded_size(result.start, result.stop)
    async with wiring.transport.pull(
        peer, "part", header.encode(), max_length=size, timeout=timeout
    ) as incoming:
        data = await read_exactly(incoming, size, lambda: None)
    await wiring.offload(lambda: check_part(wiring.codec, result, data))
    return data


async def read_exactly(incoming: Incoming, size: int, moved: Callable[[], None]) -> torch.Tensor:
    """A body of exactly ``size`` bytes as a uint8 tensor; raises :class:`Malformed`."""
    if incoming.length != size:
        raise Malformed(f"{incoming.length} bytes where {size} belong")
    data = torch.empty(size, dtype=torch.uint8)
    view, at = as_bytes(data), 0
    async for chunk in incoming:
        view[at : at + len(chunk)] = chunk
        at += len(chunk)
        moved()
    return data


def outgoing(data: torch.Tensor) -> Outgoing:
    """A uint8 tensor as a body, in chunks that share its memory."""
    view = as_bytes(data)

    async def chunks() -> AsyncIterator[Buffer]:
        for at in range(0, len(view), CHUNK_BYTES):
            yield view[at : at + CHUNK_BYTES]

    return Outgoing(len(view), chunks())
