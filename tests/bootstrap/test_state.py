"""The state download on the simulated network: sources that die, lie, crawl or have moved on."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from state_kit import ROUND, RUN, Bench, Identities, N, free, given_up, run, vectors

from bootstrap.state import (
    NoSourceError,
    StateServer,
    chunk_size,
    state_digest,
)
from bootstrap.state.chunks import LATE_S
from bootstrap.state.download import DARK_S
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import Link
from protocols.memory.virtual_time import inline
from protocols.messages import StateOffer, StateRequest


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


@pytest.mark.parametrize(("latency", "least", "most"), [(0.01, 2, 2), (0.05, 5, 6)])
def test_a_source_that_is_far_away_is_asked_for_more_at_once(
    identities: Identities, latency: float, least: int, most: int
) -> None:
    """Over a long way one connection carries little: as many as the round trip asks for."""

    async def scenario(bench: Bench) -> None:
        (peer,) = bench.peers
        bench.network.set_link(bench.me.peer_id, peer, Link(latency=latency))
        report = await bench.download()
        bench.check()
        assert report.sources[peer].round_trip >= 2 * latency
        assert least <= report.sources[peer].streams <= most

    run(identities, [2e6], scenario)


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

    run(identities, [2e5, 2e5], scenario)


@pytest.mark.parametrize("away_s", [0.0, 2.5])
def test_a_source_whose_link_breaks_now_and_then_is_kept(
    identities: Identities, away_s: float
) -> None:
    """Each time all that was under way breaks; it is tried again, after a pause."""

    async def scenario(bench: Bench) -> None:
        [peer] = bench.peers
        broken: list[int] = []
        breaking: list[asyncio.Task[None]] = []

        async def interrupt() -> None:
            bench.network.kill(peer)
            await asyncio.sleep(away_s)
            transport = bench.network.join(peer, upload=2e6)
            server = StateServer(transport, RUN, bench.current, still=free, offload=inline)
            await server._on_state(bench.me.peer_id, StateRequest(RUN, ROUND).encode())

        def progress(done: int, total: int, sources: int) -> None:
            if done > total * (len(broken) + 1) / 8 and all(task.done() for task in breaking):
                broken.append(done)
                breaking.append(asyncio.create_task(interrupt()))

        report = await bench.download(progress=progress)
        bench.check()
        assert len(broken) >= 5
        assert not report.sources[peer].dropped

    run(identities, [2e6], scenario)


@pytest.mark.parametrize("breaks", [False, True])
def test_what_has_come_outlives_a_link_that_is_down_for_a_while(
    identities: Identities, breaks: bool
) -> None:
    """Connections stand still, or break and cannot be opened."""

    async def scenario(bench: Bench) -> None:
        down: list[asyncio.Task[None]] = []

        async def lose_link() -> None:
            for peer in bench.peers:
                bench.network.cut(bench.me.peer_id, peer)
            await asyncio.sleep(90.0)
            for peer in bench.peers:
                bench.network.splice(bench.me.peer_id, peer)

        def progress(done: int, total: int, sources: int) -> None:
            if done > total / 2 and not down:
                down.append(asyncio.create_task(lose_link()))

        # a link that is down says so at once, or nothing
        report = await bench.download(progress=progress, stall_timeout=0.1 if breaks else 15.0)
        bench.check()
        assert down
        assert sum(one.bytes for one in report.sources.values()) == report.length
        assert asyncio.get_running_loop().time() < 90 + 30

    run(identities, [2e6, 1e6], scenario)


def test_a_link_that_stays_down_ends_the_download(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        def progress(done: int, total: int, sources: int) -> None:
            if done > total / 2:
                for peer in bench.peers:
                    bench.network.cut(bench.me.peer_id, peer)

        with pytest.raises(NoSourceError, match="round 7"):
            await bench.download(progress=progress)
        assert DARK_S < asyncio.get_running_loop().time() < DARK_S + 60

    run(identities, [2e6, 1e6], scenario)


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


def test_two_slow_sources_at_one_chunk_do_not_hold_up_the_end(identities: Identities) -> None:
    """The only chunk takes them a minute, and they are at it when the third source is free."""

    async def scenario(bench: Bench) -> None:
        bench.base, bench.momentum = vectors(count=2000)
        bench.digest, _ = state_digest([bench.base, bench.momentum])
        bench.got = torch.empty(2000), torch.empty(2000)
        bench.network.set_link(bench.me.peer_id, bench.peers[2], Link(latency=2.0))  # it comes last
        await bench.download(stall_timeout=100.0, offer_timeout=60.0)
        bench.check()
        assert asyncio.get_running_loop().time() < LATE_S + 15

    run(identities, [250.0, 250.0, 2e6], scenario)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_corrupt_chunks_are_refused_and_their_sender_dropped(
    identities: Identities, victim: int, caplog: pytest.LogCaptureFixture
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
        assert 1 <= given_up(caplog, liar) <= 2  # at most once per stream
        assert report.sources[liar].bytes == 0
        assert "another hash" in report.sources[liar].dropped
        assert all(not report.sources[p].dropped for p in bench.peers if p != liar)

    run(identities, [2e6, 2e6, 2e6], scenario)


def test_a_source_that_has_moved_on_is_passed_over(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        other = bench.network.join(Identity.from_seed(b"m" * 32).peer_id)
        StateServer(
            other, RUN, lambda fragment: (ROUND + 1, b"", vectors(1)), still=free, offload=inline
        )
        bench.peers.insert(0, other.peer_id)
        report = await bench.download()
        bench.check()
        assert "gone" in report.sources[other.peer_id].dropped

    run(identities, [2e6], scenario)


def test_a_source_whose_state_differs_is_dropped_before_a_byte_is_pulled(
    identities: Identities, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(bench: Bench) -> None:
        other = bench.network.join(Identity.from_seed(b"m" * 32).peer_id)
        StateServer(
            other, RUN, lambda fragment: (ROUND, b"", vectors(1)), still=free, offload=inline
        )
        bench.peers.insert(0, other.peer_id)
        report = await bench.download()
        bench.check()
        assert given_up(caplog, other.peer_id) == 1
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
