"""Bandwidth on the simulated internet: shared fairly, never the same as a stall."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from memory_kit import MB, PEERS, body, count, echo, join, now, pull, zeros

from protocols.identity import PeerId
from protocols.memory.transport import Link, MemoryNetwork, MemoryTransport
from protocols.memory.virtual_time import run
from protocols.transport import CHUNK_BYTES, Buffer, Incoming, Outgoing


def test_a_body_takes_the_time_of_the_slower_end() -> None:
    async def main() -> None:
        network = MemoryNetwork(link=Link(latency=0.05))
        a = network.join(PEERS[0], upload=10 * MB)
        b = network.join(PEERS[1], download=2 * MB)
        b.on_push("take", count, max_length=100 * MB)
        await a.push(b.peer_id, "take", b"", zeros(20 * MB), timeout=5)
        assert now() == pytest.approx(10, rel=0.05)
        assert a.stats.peer(b.peer_id).upload == pytest.approx(2 * MB, rel=0.05)

    run(main())


def test_transfers_share_an_uplink_fairly() -> None:
    async def main() -> list[float]:
        network = MemoryNetwork(link=Link(latency=0.01))
        a = network.join(PEERS[0], upload=8 * MB)
        others = [network.join(peer) for peer in PEERS[1:5]]
        ends = []

        async def one(target: MemoryTransport) -> None:
            target.on_push("take", count, max_length=100 * MB)
            await a.push(target.peer_id, "take", b"", zeros(8 * MB), timeout=5)
            ends.append(now())

        async with asyncio.TaskGroup() as group:
            for other in others:
                group.create_task(one(other))
        return ends

    assert run(main()) == pytest.approx([4.0] * 4, rel=0.05)


def test_transfers_share_a_downlink_fairly() -> None:
    async def main() -> list[float]:
        network = MemoryNetwork(link=Link(latency=0.01), upload=50 * MB)
        target = network.join(PEERS[0], download=8 * MB)
        target.on_push("take", count, max_length=100 * MB)
        ends = []

        async def one(source: MemoryTransport) -> None:
            await source.push(target.peer_id, "take", b"", zeros(8 * MB), timeout=5)
            ends.append(now())

        async with asyncio.TaskGroup() as group:
            for peer in PEERS[1:5]:
                group.create_task(one(network.join(peer)))
        return ends

    assert run(main()) == pytest.approx([4.0] * 4, rel=0.1)


def test_latency_does_not_throttle_a_fast_link() -> None:
    async def main() -> None:
        network = MemoryNetwork(link=Link(latency=0.15), upload=100 * MB, download=100 * MB)
        a, b = join(network)
        b.on_push("take", count, max_length=1000 * MB)
        await a.push(b.peer_id, "take", b"", zeros(200 * MB), timeout=5)
        assert now() == pytest.approx(2 + 4 * 0.15, rel=0.1)

    run(main())


def test_a_small_message_does_not_wait_for_a_tensor() -> None:
    async def main() -> None:
        network = MemoryNetwork(link=Link(latency=0.01), upload=1 * MB, download=1 * MB)
        a, b = join(network)
        b.on_push("take", count, max_length=100 * MB)
        b.on_call("echo", echo)
        async with asyncio.TaskGroup() as group:
            group.create_task(a.push(b.peer_id, "take", b"", zeros(10 * MB), timeout=5))
            await asyncio.sleep(2)
            began = now()
            await a.call(b.peer_id, "echo", b"quick", timeout=1)
            assert now() - began < 0.1
        assert now() == pytest.approx(10, rel=0.1)

    run(main())


def test_a_slow_link_is_not_a_stalled_one() -> None:
    async def main() -> None:
        a, b = join(MemoryNetwork(upload=10_000))
        b.on_push("take", count, max_length=MB)
        await a.push(b.peer_id, "take", b"", zeros(MB), timeout=2)
        assert now() == pytest.approx(100, rel=0.05)

        async def give(peer: PeerId, header: bytes) -> Outgoing:
            return zeros(MB)

        b.on_pull("give", give)
        assert len(await pull(a, b.peer_id, "give", timeout=2)) == MB

    run(main())


def test_a_reader_that_waits_holds_the_sender_back() -> None:
    async def main() -> None:
        a, b = join(MemoryNetwork(link=Link(latency=0.0), upload=100 * MB))
        produced = 0
        go = asyncio.Event()

        async def chunks() -> AsyncIterator[Buffer]:
            nonlocal produced
            for _ in range(100):
                produced += 1
                yield bytes(CHUNK_BYTES)

        async def lazy(peer: PeerId, header: bytes, incoming: Incoming) -> bytes:
            await go.wait()
            return await count(peer, header, incoming)

        b.on_push("take", lazy, max_length=100 * CHUNK_BYTES)
        async with asyncio.TaskGroup() as group:
            pushing = group.create_task(
                a.push(b.peer_id, "take", b"", Outgoing(100 * CHUNK_BYTES, chunks()), timeout=60)
            )
            await asyncio.sleep(30)
            assert produced < 10
            go.set()
        assert pushing.result() == str(100 * CHUNK_BYTES).encode()

    run(main())


def test_a_chunk_that_is_kept_turns_to_garbage() -> None:
    async def main() -> None:
        a, b = join(MemoryNetwork())
        kept: list[Any] = []

        async def keep(peer: PeerId, header: bytes, incoming: Incoming) -> bytes:
            async for chunk in incoming:
                kept.append((chunk, memoryview(chunk)[:4]))
            return b""

        b.on_push("take", keep, max_length=100)
        await a.push(b.peer_id, "take", b"", body(b"x" * 20, 10), timeout=5)
        assert bytes(kept[0][1]) == b"\xdb" * 4
        with pytest.raises(ValueError, match="released"):
            bytes(kept[0][0])

    run(main())
