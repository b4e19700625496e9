"""The state download on the simulated network: sources that die, lie, crawl or have moved on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from blake3 import blake3
from torch import Tensor

from bootstrap.manifest import Manifest, SignedManifest
from bootstrap.state import (
    BlobServer,
    Download,
    NoSourceError,
    StateServer,
    chunk_size,
    download_state,
    fetch_blob,
    fetch_manifest,
    state_digest,
)
from bootstrap.state.digest import StateBytes, root
from protocols import virtual_time
from protocols.errors import (
    BadSignature,
    LocalProtocolError,
    RemoteRefused,
    TransportError,
    Unreachable,
)
from protocols.identity import Identity, PeerId
from protocols.memory import Link, MemoryNetwork, MemoryTransport
from protocols.messages import ChunkRequest, ManifestRequest, StateOffer, StateRequest

RUN = bytes(range(32))
N = 500_003  # elements; 4 MB of state in 62 chunks, one of which spans both vectors
ROUND = 7


def vectors(seed: int = 0, count: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator), torch.randn(count, generator=generator)


async def inline(work: Callable[[], Any]) -> Any:
    await asyncio.sleep(0)
    return work()


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

    def current(self, fragment: int) -> tuple[int, list[Tensor]]:
        return self.round, [self.base, self.momentum]

    async def download(self, **options: Any) -> Download:
        arguments = {"stall_timeout": 2.0, "offer_timeout": 5.0, "offload": inline} | options
        return await download_state(
            self.me, self.peers, RUN, ROUND, self.digest, self.got, **arguments
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


def test_two_sources_share_the_work_by_their_speed(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        seen: list[tuple[int, int, int]] = []
        report = await bench.download(progress=lambda *at: seen.append(at))
        bench.check()
        fast, slow = (report.sources[peer].bytes for peer in bench.peers)
        assert fast + slow == report.length == 8 * N
        assert 2 < fast / slow < 5  # the links stand 3 to 1
        assert [at[0] for at in seen] == sorted(at[0] for at in seen)
        assert seen[-1] == (8 * N, 8 * N, 2)
        assert asyncio.get_running_loop().time() < 1.4 * 8 * N / 4e6

    run(identities, [3e6, 1e6], scenario)


def test_a_source_that_dies_half_way_is_replaced(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        killed: list[int] = []

        def progress(done: int, total: int, sources: int) -> None:
            if done > total / 2 and not killed:
                killed.append(done)
                bench.network.kill(bench.peers[0])

        report = await bench.download(progress=progress)
        bench.check()
        assert killed
        assert report.sources[bench.peers[0]].dropped
        assert not report.sources[bench.peers[1]].failures

    run(identities, [2e6, 2e6], scenario)


def test_a_frozen_source_does_not_hold_up_the_end(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        def progress(done: int, total: int, sources: int) -> None:
            if done > total / 2:
                bench.network.freeze(bench.peers[0])

        await bench.download(progress=progress, stall_timeout=1000.0)
        bench.check()
        assert asyncio.get_running_loop().time() < 20  # the freeze itself lasts for ever

    run(identities, [2e6, 2e6], scenario)


def test_a_slow_source_does_not_hold_up_the_end(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        report = await bench.download()
        bench.check()
        assert asyncio.get_running_loop().time() < 5  # a single chunk takes the slow one 16 s
        assert report.sources[bench.peers[1]].bytes == 0

    run(identities, [2e6, 4e3], scenario)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_corrupt_chunks_are_refused_and_their_sender_dropped(
    identities: Identities, victim: int
) -> None:
    async def scenario(bench: Bench) -> None:
        liar, lies = bench.peers[victim], 0

        def tamper(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
            nonlocal lies
            if sender == liar and name == "chunk" and len(data) > 1000:
                lies += 1
                return data[:500] + bytes([data[500] ^ 1]) + data[501:]
            return data

        bench.network.tamper = tamper
        report = await bench.download()
        bench.check()
        assert lies
        assert 1 <= report.sources[liar].wrong <= 2  # at most once per stream
        assert report.sources[liar].bytes == 0
        assert report.sources[liar].dropped
        assert all(not report.sources[p].wrong for p in bench.peers if p != liar)

    run(identities, [2e6, 2e6, 2e6], scenario)


def test_a_source_that_has_moved_on_is_passed_over(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        other = bench.network.join(Identity.from_seed(b"m" * 32).peer_id)
        StateServer(
            other, RUN, lambda fragment: (ROUND + 1, vectors(1)), still=free, offload=inline
        )
        bench.peers.insert(0, other.peer_id)
        report = await bench.download()
        bench.check()
        assert "gone" in report.sources[other.peer_id].dropped

    run(identities, [2e6], scenario)


def test_a_source_whose_state_differs_is_dropped_before_a_byte_is_pulled(
    identities: Identities,
) -> None:
    async def scenario(bench: Bench) -> None:
        other = bench.network.join(Identity.from_seed(b"m" * 32).peer_id)
        StateServer(other, RUN, lambda fragment: (ROUND, vectors(1)), still=free, offload=inline)
        bench.peers.insert(0, other.peer_id)
        report = await bench.download()
        bench.check()
        assert report.sources[other.peer_id].wrong == 1
        assert "another state" in report.sources[other.peer_id].dropped

    run(identities, [2e6], scenario)


@pytest.mark.parametrize("change", ["length", "chunk", "hashes", "short", "garbage"])
def test_forged_offers_are_refused(identities: Identities, change: str) -> None:
    async def scenario(bench: Bench) -> None:
        chunk = chunk_size(8 * N)
        _, hashes = state_digest([bench.base, bench.momentum])
        offer = {
            "length": StateOffer(ROUND, bench.digest, 2**50, chunk, hashes),
            "chunk": StateOffer(ROUND, bench.digest, 8 * N, 1, hashes),
            "hashes": StateOffer(ROUND, bench.digest, 8 * N, chunk, bytes(len(hashes))),
            "short": StateOffer(ROUND, bench.digest, 8 * N, chunk, hashes[:-1]),
        }.get(change)
        forged = b"\xff" * 20 if offer is None else offer.encode()

        async def lie(peer: PeerId, body: bytes) -> bytes:
            return forged

        bench.transports[0].on_call("state", lie)
        with pytest.raises(NoSourceError):
            await bench.download()
        assert bench.got[0].isnan().all()

    # a transport refuses a second handler of a name: this peer has no StateServer
    async def main() -> None:
        bench = Bench(identities(1), [])
        bench.transports = [bench.network.join(Identity.from_seed(b"m" * 32).peer_id)]
        bench.peers = [bench.transports[0].peer_id]
        await scenario(bench)

    virtual_time.run(main())


def test_without_any_source_it_says_why(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        for peer in bench.peers:
            bench.network.kill(peer)
        with pytest.raises(NoSourceError, match="round 7"):
            await bench.download()
        bench.peers = []
        with pytest.raises(NoSourceError, match="none given"):
            await bench.download()

    run(identities, [2e6, 2e6], scenario)


@pytest.mark.parametrize("seed", range(8))
def test_random_faults_never_yield_a_wrong_state(identities: Identities, seed: int) -> None:
    """Kills, freezes and lies at random: the state is right, or the download says it failed."""

    async def scenario(bench: Bench) -> None:
        rng = random.Random(seed)
        liars = {peer for peer in bench.peers if rng.random() < 0.3}

        def tamper(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
            if sender in liars and name == "chunk" and len(data) > 1000 and rng.random() < 0.3:
                return bytes(len(data))
            return data

        bench.network.tamper = tamper

        def progress(done: int, total: int, sources: int) -> None:
            if rng.random() < 0.08:
                rng.choice([bench.network.kill, bench.network.freeze])(rng.choice(bench.peers))

        try:
            await bench.download(progress=progress)
        except NoSourceError:
            return
        bench.check()

    run(identities, [2e6, 1e6, 5e5, 2e6], scenario)


async def test_with_real_threads(identities: Identities) -> None:
    bench = Bench(identities(3), [1e9, 1e9])
    await asyncio.wait_for(bench.download(offload=asyncio.to_thread), 30)
    bench.check()


# --- the serving side --------------------------------------------------------------------------


async def ask(bench: Bench, server: int = 0, round_: int = ROUND) -> StateOffer:
    reply = await bench.me.call(
        bench.peers[server], "state", StateRequest(RUN, round_).encode(), timeout=5.0
    )
    offer: StateOffer = StateOffer.decode(reply)
    return offer


async def chunk_of(bench: Bench, index: int, round_: int = ROUND, run_id: bytes = RUN) -> bytes:
    header = ChunkRequest(run_id, round_, index).encode()
    async with bench.me.pull(
        bench.peers[0], "chunk", header, max_length=8 * N, timeout=5.0
    ) as incoming:
        return b"".join([bytes(piece) async for piece in incoming])


def test_training_goes_on_while_the_copy_is_served(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        before = bench.base.clone()
        offer = await ask(bench)
        bench.base += 1
        bench.round += 1
        size = offer.chunk
        assert await chunk_of(bench, 1) == before.numpy().tobytes()[size : 2 * size]
        assert (await ask(bench)).digest == offer.digest  # still pinned, though it is past
        with pytest.raises(RemoteRefused, match="gone"):
            await ask(bench, round_=ROUND - 1)

    run(identities, [2e6], scenario)


def test_no_outer_step_is_applied_while_the_copy_is_taken(identities: Identities) -> None:
    async def main() -> None:
        bench = Bench(identities(1), [])
        held: list[str] = []

        @asynccontextmanager
        async def still() -> AsyncIterator[None]:
            held.append("still")
            yield
            held.append("free")

        async def offload(work: Callable[[], Any]) -> Any:
            held.append("work")
            return work()

        transport = bench.network.join(Identity.from_seed(b"s" * 32).peer_id)
        StateServer(transport, RUN, bench.current, still=still, offload=offload)
        bench.peers = [transport.peer_id]
        offers = await asyncio.gather(*(ask(bench) for _ in range(5)))
        assert held == ["still", "work", "free", "work"]  # one copy for all five; hashed after
        assert {offer.digest for offer in offers} == {bench.digest}

    virtual_time.run(main())


def test_copies_are_few_and_given_up_when_idle(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        server = bench.servers[0]
        await ask(bench)
        bench.round += 1
        await ask(bench, round_=ROUND + 1)
        bench.round += 1
        with pytest.raises(RemoteRefused, match="busy"):
            await ask(bench, round_=ROUND + 2)
        await asyncio.sleep(12)
        await chunk_of(bench, 0)  # keeps the first one
        await ask(bench, round_=ROUND + 2)
        assert server.pinned == [ROUND, ROUND + 2]
        for _ in range(10):
            await asyncio.sleep(20)
            await chunk_of(bench, 0)
        assert server.pinned == [ROUND]
        await asyncio.sleep(61)
        assert server.pinned == []
        with pytest.raises(RemoteRefused, match="gone"):
            await chunk_of(bench, 0)

    run(identities, [1e9], scenario)


def test_close_gives_all_up(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        await ask(bench)
        bench.servers[0].close()
        assert bench.servers[0].pinned == []

    run(identities, [1e9], scenario)


def test_requests_beyond_the_state_or_of_another_run_are_refused(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        await ask(bench)
        last = len((await ask(bench)).hashes) // 32
        assert len(await chunk_of(bench, last - 1)) == 8 * N % chunk_size(8 * N)
        refused: list[Awaitable[Any]] = [
            chunk_of(bench, last),
            chunk_of(bench, 2**62),
            chunk_of(bench, 0, run_id=bytes(32)),
            bench.me.call(
                bench.peers[0], "state", StateRequest(bytes(32), ROUND).encode(), timeout=5
            ),
        ]
        for request in refused:
            with pytest.raises(RemoteRefused, match="protocol"):
                await request

    run(identities, [1e9], scenario)


# --- digests -----------------------------------------------------------------------------------


def test_digest_is_of_the_bytes_chunk_by_chunk() -> None:
    base, momentum = vectors()
    data = base.numpy().tobytes() + momentum.numpy().tobytes()
    for chunk in (64 * 1024, 4 * 1024 * 1024):
        expected = b"".join(
            blake3(data[at : at + chunk]).digest() for at in range(0, len(data), chunk)
        )
        digest, hashes = state_digest([base, momentum], chunk)
        assert hashes == expected
        assert digest == root(len(data), chunk, expected)
    assert state_digest([base, momentum]) == state_digest([base, momentum], chunk_size(len(data)))


def test_every_bit_and_the_shape_count() -> None:
    base, momentum = vectors(count=40_000)
    digests = {state_digest([base, momentum])[0], state_digest([momentum, base])[0]}
    for place in (0, 39_999):
        for vector in (base, momentum):
            bits = vector.view(torch.int32)
            bits[place] ^= 1
            digests.add(state_digest([base, momentum])[0])
            bits[place] ^= 1
    digests.add(state_digest([base, momentum], 2**20)[0])
    digests.add(state_digest([base[:-1], momentum[:-1]])[0])
    assert len(digests) == 8


@pytest.mark.parametrize("lengths", [(40_000,), (40_000, 40_000), (9, 16_400, 16_400, 1)])
def test_a_state_has_as_many_vectors_as_its_outer_optimizer_wants(lengths: tuple[int, ...]) -> None:
    parts = [torch.randn(length) for length in lengths]
    data = b"".join(part.numpy().tobytes() for part in parts)
    state = StateBytes(parts)
    assert state.length == len(data)
    for start, stop in ((0, len(data)), (30, 40), (36, 65_600), (len(data) - 5, len(data))):
        assert b"".join(state.pieces(start, stop)) == data[start:stop]
    copy = [torch.zeros(length) for length in lengths]
    for at in range(0, len(data), 60_000):
        StateBytes(copy).write(at, memoryview(data)[at : at + 60_000])
    assert all(a.equal(b) for a, b in zip(copy, parts, strict=True))
    assert state_digest(copy) == state_digest(parts)


@pytest.mark.parametrize(
    ("length", "chunk"),
    [(8, 2**16), (2**22, 2**16), (2**22 + 8, 2**17), (2**28, 2**22), (2**40, 2**22)],
)
def test_chunks_grow_with_the_state(length: int, chunk: int) -> None:
    assert chunk_size(length) == chunk


@pytest.mark.parametrize(
    "bad",
    [
        (torch.zeros(0), torch.zeros(0)),
        (),
        (torch.zeros(4, dtype=torch.float64), torch.zeros(4)),
        (torch.zeros(8)[::2], torch.zeros(4)),
    ],
)
def test_other_vectors_are_our_own_bug(bad: tuple[Tensor, ...]) -> None:
    with pytest.raises(LocalProtocolError):
        state_digest(bad)


# --- blobs -------------------------------------------------------------------------------------


def blob_bench(identities: Identities) -> tuple[MemoryNetwork, Any, list[PeerId], SignedManifest]:
    me, one, two = identities(3)
    network = MemoryNetwork()
    signed = SignedManifest.create(Manifest(), one)
    mine, peers = network.join(me.peer_id), []
    for identity in (one, two):
        transport = network.join(identity.peer_id)
        BlobServer(transport, signed.run_id, manifest=signed.data, blobs=[b"shard" * 100_000])
        peers.append(transport.peer_id)
    return network, mine, peers, signed


def test_blobs_and_the_manifest_arrive(identities: Identities) -> None:
    async def main() -> None:
        _, mine, peers, signed = blob_bench(identities)
        blob = b"shard" * 100_000
        digest = blake3(blob).digest()
        assert await fetch_blob(mine, peers, signed.run_id, digest, max_bytes=10**6) == blob
        assert (await fetch_manifest(mine, peers, signed.run_id)).manifest == signed.manifest
        with pytest.raises(RemoteRefused, match="gone"):
            await fetch_blob(mine, peers, signed.run_id, bytes(32), max_bytes=10**6)
        with pytest.raises(RemoteRefused, match="protocol"):
            await fetch_blob(mine, peers, bytes(32), digest, max_bytes=10**6)
        with pytest.raises(RemoteRefused, match="protocol"):
            await fetch_manifest(mine, peers, bytes(32))
        with pytest.raises(TransportError):  # more than I am ready to take
            await fetch_blob(mine, peers, signed.run_id, digest, max_bytes=1000)
        with pytest.raises(Unreachable):
            await fetch_blob(mine, [], signed.run_id, digest, max_bytes=1000)
        assert len(ManifestRequest(signed.run_id).encode()) < 64

    virtual_time.run(main())


def test_the_next_peer_is_asked_when_one_lies_or_is_down(identities: Identities) -> None:
    async def main() -> None:
        network, mine, peers, signed = blob_bench(identities)
        blob = b"shard" * 100_000
        digest = blake3(blob).digest()

        def tamper(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
            return bytes(len(data)) if sender == peers[0] and len(data) > 100 else data

        network.tamper = tamper
        assert await fetch_blob(mine, peers, signed.run_id, digest, max_bytes=10**6) == blob
        assert (await fetch_manifest(mine, peers, signed.run_id)).data == signed.data
        with pytest.raises(BadSignature, match="another hash"):
            await fetch_blob(mine, peers[:1], signed.run_id, digest, max_bytes=10**6)
        network.kill(peers[0])
        assert await fetch_blob(mine, peers, signed.run_id, digest, max_bytes=10**6) == blob

    virtual_time.run(main())
