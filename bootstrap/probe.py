"""How fast a link is, found out by moving some bytes over it: for ``node doctor``.

Every node takes and gives bytes that mean nothing, a bounded number at a time and per minute,
so that nobody can use up its link with questions.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from protocols.bodies import BufferFeed
from protocols.errors import Malformed, RemoteRefused
from protocols.identity import PeerId
from protocols.transport import CHUNK_BYTES, Feed, Incoming, Transport

MAX_BYTES = 8 * 1024 * 1024  # of one body
BYTES_A_MINUTE = 64 * 1024 * 1024  # of all bodies together
FIRST_BYTES = 256 * 1024
WANTED_S = 0.5  # a transfer that takes this long says something about the link
STALL_S = 10.0
# shared by all bodies, so that a slow reader holds no memory; zeros would be packed for a slow link
_NOISE = os.urandom(CHUNK_BYTES)


class ProbeServer:
    """Answers ``probe``: takes bodies and forgets them, gives bodies of noise.

    More than :data:`BYTES_A_MINUTE` are refused as ``busy``.
    """

    def __init__(self, transport: Transport) -> None:
        self._since, self._spent = time.monotonic(), 0
        transport.on_push("probe", self._take, max_length=MAX_BYTES)
        transport.on_pull("probe", self._give)

    async def _take(self, peer: PeerId, header: bytes, incoming: Incoming) -> bytes:
        self._spend(incoming.length)
        async for _ in incoming:
            pass
        return b""

    async def _give(self, peer: PeerId, header: bytes) -> Feed:
        length = int.from_bytes(header[:8], "little")
        if not 0 < length <= MAX_BYTES:
            raise Malformed(f"1 to {MAX_BYTES} bytes")
        self._spend(length)
        return _noise(length)

    def _spend(self, count: int) -> None:
        if (now := time.monotonic()) - self._since >= 60:
            self._since, self._spent = now, 0
        if self._spent + count > BYTES_A_MINUTE:
            raise RemoteRefused("busy", "asked too often; try again in a minute")
        self._spent += count


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes a second to and from a peer."""

    upload: float
    download: float


async def probe(transport: Transport, peer: PeerId) -> Speeds:
    """Move bodies both ways, larger ones until they take long enough to be measured.

    Raises what :meth:`Transport.push` and :meth:`Transport.pull` raise.
    """

    async def send(count: int) -> None:
        await transport.push(peer, "probe", b"", _noise(count), timeout=STALL_S)

    async def receive(count: int) -> None:
        header = count.to_bytes(8, "little")
        async with transport.pull(
            peer, "probe", header, max_length=count, timeout=STALL_S
        ) as incoming:
            async for _ in incoming:
                pass

    return Speeds(await _measured(send), await _measured(receive))


def _noise(length: int) -> Feed:
    whole, rest = divmod(length, len(_NOISE))
    return BufferFeed(*[_NOISE] * whole, memoryview(_NOISE)[:rest])


async def _measured(move: Callable[[int], Awaitable[None]]) -> float:
    loop = asyncio.get_running_loop()
    count = FIRST_BYTES
    while True:
        began = loop.time()
        await move(count)
        took = max(loop.time() - began, 1e-6)
        if took >= WANTED_S / 2 or count == MAX_BYTES:
            return count / took
        count = min(MAX_BYTES, max(2 * count, int(count * WANTED_S / took)))
