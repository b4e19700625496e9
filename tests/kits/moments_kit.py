"""Donors of moments and a newcomer, on a simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from bootstrap.state import Moments, MomentsServer, download_moments, offered_moments
from protocols.errors import RemoteRefused
from protocols.identity import Identity
from protocols.memory import virtual_time
from protocols.memory.transport import Link, MemoryNetwork, MemoryTransport
from protocols.memory.virtual_time import inline
from protocols.messages import MomentsChunk, MomentsOffer

RUN = bytes(range(32))
N = 300_000
Scenario = Callable[["Bench"], Awaitable[None]]


class Bench:
    """Donors that count their copies, and a newcomer."""

    def __init__(
        self, donors: int = 1, run: bytes = RUN, size: int = N, upload: float = 2e6
    ) -> None:
        self.network = MemoryNetwork(link=Link(latency=0.01), upload=upload)
        ids = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, donors + 2)]
        self.me: MemoryTransport = self.network.join(ids[0])
        self.peers = ids[1:]
        self.size, self.run = size, run
        self.copies = [0] * donors
        self.vectors = [honest(size, seed) for seed in range(donors)]
        self.servers = [self._server(number) for number in range(donors)]
        self.refuses: set[int] = set()
        self.silent: set[int] = set()
        self.copy_s = 0.0

    def _server(self, number: int) -> MomentsServer:
        async def copy() -> Moments:
            self.copies[number] += 1
            await asyncio.sleep(1e6 if number in self.silent else self.copy_s)
            if number in self.refuses:
                raise RemoteRefused("none", "its moments are cold themselves")
            return Moments(50 + number, self.vectors[number].clone())

        transport = self.network.join(self.peers[number])
        return MomentsServer(transport, self.run, copy, offload=inline)

    @property
    def keeps(self) -> bool:
        """Whether the first donor holds a copy."""
        return self.servers[0]._kept is not None

    async def offer(
        self, run: bytes = RUN, length: int = 4 * N, timeout: float = 5.0
    ) -> MomentsOffer:
        return await offered_moments(self.me, self.peers[0], run, length, timeout=timeout)

    async def chunk(self, digest: bytes, index: int = 0) -> int:
        """Fetch one; its bytes."""
        header = MomentsChunk(RUN, digest, index).encode()
        async with self.me.pull(
            self.peers[0], "moment", header, max_length=4 * N, timeout=5.0
        ) as incoming:
            return sum([len(piece) async for piece in incoming])

    async def download(self) -> torch.Tensor:
        got = torch.full((self.size,), float("nan"))
        offer = await self.offer()
        await download_moments(self.me, self.peers[0], RUN, offer, [got], offload=inline)
        return got


def honest(size: int, seed: int) -> torch.Tensor:
    """First and second moments of one gradient after another."""
    gradient = torch.randn(size // 2, generator=torch.Generator().manual_seed(seed))
    return torch.cat([0.1 * gradient, 0.05 * gradient.square()])


def run(scenario: Scenario, **options: Any) -> None:
    async def main() -> None:
        await scenario(Bench(**options))

    virtual_time.run(main())
