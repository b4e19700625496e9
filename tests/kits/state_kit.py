"""Servers of one state, and somebody who wants it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Container
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from bootstrap.state import (
    Download,
    Sources,
    StateServer,
    WantedState,
    download_state,
    state_digest,
)
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import Link, MemoryNetwork, MemoryTransport
from protocols.memory.virtual_time import inline
from protocols.messages import ChunkRequest, StateOffer, StateRequest

RUN = bytes(range(32))
N = 500_003  # elements; 4 MB of state in 62 chunks, one of which spans both vectors
ROUND = 7


def vectors(seed: int = 0, count: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator), torch.randn(count, generator=generator)


@asynccontextmanager
async def free() -> AsyncIterator[None]:
    yield


class Bench:
    """Servers of one state, and somebody who wants it."""

    def __init__(self, identities: list[Identity], uploads: list[float], **options: Any) -> None:
        self.network = MemoryNetwork(link=Link(latency=0.01))
        self.base, self.momentum = vectors()
        self.digest, _ = state_digest([self.base, self.momentum])
        self.round = ROUND
        self.me = self.network.join(identities[0].peer_id)
        self.transports: list[MemoryTransport] = []
        self.servers: list[StateServer] = []
        for identity, upload in zip(identities[1:], uploads, strict=False):
            transport = self.network.join(identity.peer_id, upload=upload)
            self.transports.append(transport)
            self.servers.append(
                StateServer(transport, RUN, self.current, still=free, offload=inline, **options)
            )
        self.peers = [transport.peer_id for transport in self.transports]
        self.got = torch.full((N,), float("nan")), torch.full((N,), float("nan"))

    def current(self, fragment: int) -> tuple[int, bytes, list[Tensor]]:
        return self.round, self.digest, [self.base, self.momentum]

    async def download(
        self,
        *,
        in_office: Container[PeerId] = (),
        first_sources: int = 8,  # else two
        offer_timeout: float = 5.0,
        stall_timeout: float = 2.0,
        **options: Any,
    ) -> Download:
        sources = Sources(
            self.peers,
            in_office,
            first_sources,
            offer_timeout=offer_timeout,
            stall_timeout=stall_timeout,
        )
        wanted = WantedState(RUN, ROUND, self.digest)
        return await download_state(
            self.me, sources, wanted, self.got, **{"offload": inline} | options
        )

    def check(self) -> None:
        assert torch.equal(self.got[0], self.base)
        assert torch.equal(self.got[1], self.momentum)


Identities = Callable[[int], list[Identity]]


def run(identities: Identities, uploads: list[float], scenario: Any, **options: Any) -> None:
    async def main() -> None:
        bench = Bench(identities(len(uploads) + 1), uploads, **options)
        await scenario(bench)

    virtual_time.run(main())


def pinned(server: StateServer) -> list[int]:
    """Rounds of which it holds a copy."""
    return sorted(round_ for _, round_ in server._pins)


def given_up(caplog: pytest.LogCaptureFixture, source: PeerId) -> int:
    """How often a download has said that it takes no more from a source."""
    return sum(f"no more from {source}: " in said for said in caplog.messages)


async def ask(
    bench: Bench, server: int = 0, round_: int = ROUND, by: MemoryTransport | None = None
) -> StateOffer:
    reply = await (by or bench.me).call(
        bench.peers[server], "state", StateRequest(RUN, round_).encode(), timeout=5.0
    )
    offer: StateOffer = StateOffer.decode(reply)
    return offer


async def newest(bench: Bench, transport: MemoryTransport, round_: int = ROUND) -> StateOffer:
    request = StateRequest(RUN, round_, or_newer=True)
    reply = await transport.call(bench.peers[0], "state", request.encode(), timeout=5.0)
    offer: StateOffer = StateOffer.decode(reply)
    return offer


async def chunk_of(bench: Bench, index: int, round_: int = ROUND, run_id: bytes = RUN) -> bytes:
    header = ChunkRequest(run_id, round_, index).encode()
    async with bench.me.pull(
        bench.peers[0], "chunk", header, max_length=8 * N, timeout=5.0
    ) as incoming:
        return b"".join([bytes(piece) async for piece in incoming])
