"""Newcomers that download the same state at once, and what they give each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from state_kit import ROUND, RUN, N, given_up, vectors
from state_kit import free as still
from torch import Tensor

from bootstrap.state import (
    Download,
    Fellows,
    NoSourceError,
    Sharing,
    Sources,
    StateServer,
    WantedState,
    download_state,
    state_digest,
)
from protocols.bodies import BufferFeed
from protocols.errors import RemoteRefused
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import Link, MemoryNetwork, MemoryTransport
from protocols.memory.virtual_time import inline
from protocols.messages import ChunkRequest, InPlace, InPlaceRequest, StateRequest
from protocols.transport import Feed

RATE = 1e6  # bytes a second, of every link; the state goes out once in 4 s
BYTES = 8 * N
NEWCOMERS = 6

Identities = Callable[[int], list[Identity]]


@dataclass
class Newcomer:
    transport: MemoryTransport
    sharing: Sharing | None
    got: tuple[Tensor, Tensor]
    download: Download | None = None
    took: float = 0.0
    told: list[tuple[float, float]] = field(default_factory=list)  # when, and what share had come


class Crowd:
    """One that has the state, and many who want it, each by a link of its own."""

    def __init__(
        self, identities: Sequence[Identity], *, shares: bool = True, count: int = N
    ) -> None:
        self.network = MemoryNetwork(link=Link(latency=0.02))
        self.state = vectors(count=count)
        self.digest, _ = state_digest(self.state)
        first, *others = identities
        self.source = self.network.join(first.peer_id, upload=RATE, download=RATE)
        StateServer(
            self.source,
            RUN,
            lambda fragment: (ROUND, self.digest, self.state),
            still=still,
            offload=inline,
        )
        self.newcomers = []
        for identity in others:
            transport = self.network.join(identity.peer_id, upload=RATE, download=RATE)
            got = torch.full((count,), float("nan")), torch.full((count,), float("nan"))
            sharing = Sharing(transport, RUN) if shares else None
            self.newcomers.append(Newcomer(transport, sharing, got))

    async def fetch(self, one: Newcomer, *, after: float = 0.0) -> None:
        async def introduce(peer: PeerId) -> None:
            return None

        await asyncio.sleep(after)
        now = asyncio.get_running_loop().time
        began = now()
        one.download = await download_state(
            one.transport,
            Sources([self.source.peer_id], stall_timeout=15.0),
            WantedState(RUN, ROUND, self.digest),
            one.got,
            offload=inline,
            came=lambda share: one.told.append((now() - began, share)),
            fellows=one.sharing and Fellows(one.sharing, introduce),
        )
        one.took = now() - began

    async def fetch_all(self, *, apart: float = 0.0) -> None:
        async with asyncio.TaskGroup() as group:
            for number, one in enumerate(self.newcomers):
                group.create_task(self.fetch(one, after=number * apart))
        for one in self.newcomers:
            assert torch.equal(one.got[0], self.state[0])
            assert torch.equal(one.got[1], self.state[1])


@pytest.mark.parametrize("apart", [0.0, 0.7])
def test_many_have_it_hardly_later_than_one_would(identities: Identities, apart: float) -> None:
    async def main() -> None:
        alone = Crowd(identities(NEWCOMERS + 1), shares=False)
        await alone.fetch_all(apart=apart)
        together = Crowd(identities(NEWCOMERS + 1))
        await together.fetch_all(apart=apart)
        once = BYTES / RATE
        assert max(one.took for one in alone.newcomers) > 0.8 * (NEWCOMERS - apart) * once
        assert max(one.took for one in together.newcomers) < 2.2 * once
        from_fellows = 0
        for one in together.newcomers:
            assert one.download is not None
            sources = one.download.sources
            from_fellows += sum(n.bytes for p, n in sources.items() if p != together.source.peer_id)
        assert from_fellows > 0.6 * NEWCOMERS * BYTES

    virtual_time.run(main())


def test_what_has_come_tells_when_the_rest_will(identities: Identities) -> None:
    """A small state is nearly all on its way when the first of its few chunks is in place."""

    async def main() -> None:
        crowd = Crowd(identities(4), count=40_000)  # five chunks
        await crowd.fetch_all()
        for one in crowd.newcomers:
            assert one.told[-1][1] == 1.0
            assert all(0.5 < at / share / one.took < 2.0 for at, share in one.told)

    virtual_time.run(main())


def test_who_begins_a_little_later_is_asked_again(identities: Identities) -> None:
    """It was named by whoever has the state, and answers that it downloads nothing yet."""

    async def main() -> None:
        crowd = Crowd(identities(3))
        one, other = crowd.newcomers
        request = StateRequest(RUN, ROUND)
        await other.transport.call(
            crowd.source.peer_id, "state", request.encode(), timeout=5.0, max_reply=2**20
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(crowd.fetch(one))
            group.create_task(crowd.fetch(other, after=0.5))
        for mine, theirs in ((one, other), (other, one)):
            assert mine.download is not None
            assert mine.download.sources[theirs.transport.peer_id].bytes > 0.1 * BYTES

    virtual_time.run(main())


def test_who_leaves_in_the_middle_holds_nobody_up(identities: Identities) -> None:
    async def main() -> None:
        crowd = Crowd(identities(NEWCOMERS + 1))
        *there, leaver = crowd.newcomers
        async with asyncio.TaskGroup() as group:
            for one in there:
                group.create_task(crowd.fetch(one))
            leaving = group.create_task(crowd.fetch(leaver))
            await asyncio.sleep(2.0)
            leaving.cancel()
            crowd.network.kill(leaver.transport.peer_id)
        assert all(torch.equal(one.got[1], crowd.state[1]) for one in there)
        assert max(one.took for one in there) < 3.0 * BYTES / RATE

    virtual_time.run(main())


def test_wrong_chunks_of_a_fellow_are_noticed(
    identities: Identities, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        crowd = Crowd(identities(3))
        one, liar = crowd.newcomers
        assert liar.sharing is not None
        with liar.sharing.open(0, ROUND, _Full(crowd.digest)):
            async with asyncio.TaskGroup() as group:
                group.create_task(crowd.fetch(one))
                await asyncio.sleep(0.1)
                asked = InPlaceRequest(RUN, ROUND, crowd.digest)
                await liar.transport.call(
                    one.transport.peer_id, "fellow", asked.encode(), timeout=5.0
                )
        assert one.download is not None
        assert given_up(caplog, liar.transport.peer_id) == 1
        assert "another hash" in one.download.sources[liar.transport.peer_id].dropped
        assert one.download.sources[liar.transport.peer_id].bytes == 0
        assert torch.equal(one.got[0], crowd.state[0])

    virtual_time.run(main())


def test_what_is_not_downloaded_is_not_shared(identities: Identities) -> None:
    async def main() -> None:
        crowd = Crowd(identities(3))
        one, other = crowd.newcomers
        peer, ask = one.transport.peer_id, other.transport

        async def refused(request: InPlaceRequest) -> None:
            with pytest.raises(RemoteRefused):
                await ask.call(peer, "fellow", request.encode(), timeout=5.0)

        right = InPlaceRequest(RUN, ROUND, crowd.digest)
        await refused(right)  # not yet
        async with asyncio.TaskGroup() as group:
            fetching = group.create_task(crowd.fetch(one))
            await asyncio.sleep(1.0)
            reply = InPlace.decode(await ask.call(peer, "fellow", right.encode(), timeout=5.0))
            assert 0 < sum(byte.bit_count() for byte in reply.chunks) < BYTES // (64 * 1024)
            await refused(InPlaceRequest(RUN, ROUND + 1, crowd.digest))
            await refused(InPlaceRequest(RUN, ROUND, b"d" * 32))
            await refused(InPlaceRequest(RUN, ROUND, crowd.digest, fragment=1))
            missing = next(
                8 * at + bit
                for at, byte in enumerate(reply.chunks)
                for bit in range(8)
                if not byte >> bit & 1
            )
            for index in (missing, 2**40):
                header = ChunkRequest(RUN, ROUND, index).encode()
                with pytest.raises(RemoteRefused):
                    async with ask.pull(peer, "shared", header, max_length=2**20, timeout=5.0):
                        pass
            await fetching
        await refused(right)  # no more

    virtual_time.run(main())


def test_fellows_alone_are_no_source(identities: Identities) -> None:
    """Where all who have the state are gone it is said, though others still wait for it."""

    async def main() -> None:
        crowd = Crowd(identities(3))
        fetching = [asyncio.ensure_future(crowd.fetch(one)) for one in crowd.newcomers]
        await asyncio.sleep(1.0)
        crowd.network.kill(crowd.source.peer_id)
        for error in await asyncio.gather(*fetching, return_exceptions=True):
            assert isinstance(error, NoSourceError)

    virtual_time.run(main())


class _Full:
    """What a liar shares: everything, and all of it wrong."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest

    def in_place(self) -> bytes:
        count = -(-BYTES // (64 * 1024))
        return bytes([255] * (count // 8)) + bytes([(1 << count % 8) - 1])

    def chunk_in_place(self, index: int, used: Callable[[], None]) -> Feed:
        return BufferFeed(bytes(64 * 1024))

    def is_shared_by(self, peer: PeerId) -> None:
        return None
