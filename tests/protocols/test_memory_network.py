"""The simulated internet: chance that a seed decides, repeatability, and what the model costs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
from collections.abc import AsyncIterator

import pytest
from memory_kit import MB, PEERS, now, pull_zeros, serving, why, zeros

from protocols.errors import TransferStalled, Unreachable, Why
from protocols.identity import PeerId
from protocols.memory.transport import Link, MemoryNetwork, MemoryTransport, TraceEvent
from protocols.memory.virtual_time import run
from protocols.transport import Buffer, Incoming, Outgoing

# --- chance ---------------------------------------------------------------------------------------


def test_dropped_exchanges_break_before_or_after_the_handler() -> None:
    async def main() -> None:
        network = MemoryNetwork(seed=5, link=Link(drop=0.3))
        a, b = serving(network)
        served = 0

        async def counted(peer: PeerId, data: bytes) -> bytes:
            nonlocal served
            served += 1
            return data

        b.on_call("echo", counted)
        results = [await why(a, b.peer_id) for _ in range(400)]
        failed = results.count(Why.RESET)
        assert 80 < failed < 160
        assert results.count(None) == 400 - failed
        assert 400 - failed < served < 400  # some replies were lost after the work was done
        broken = 0
        for _ in range(40):
            try:
                await a.push(b.peer_id, "take", b"", zeros(MB), timeout=5)
                await pull_zeros(a, b.peer_id, MB)
            except Unreachable:
                broken += 1
        assert 8 < broken < 32

    run(main())


def test_loss_delays_and_never_breaks() -> None:
    async def main(loss: float) -> list[float]:
        a, b = serving(MemoryNetwork(seed=1, link=Link(latency=0.01, loss=loss)))
        times = []
        for _ in range(300):
            began = now()
            await a.call(b.peer_id, "echo", b"x", timeout=60)
            times.append(now() - began)
        await a.push(b.peer_id, "take", b"", zeros(5 * MB), timeout=60)
        return times

    clean, lossy = run(main(0.0)), run(main(0.05))
    assert statistics.median(lossy) == pytest.approx(0.02)
    assert max(clean) < 0.05  # the first one connects
    assert max(lossy) > 0.2
    assert 10 < sum(t > 0.2 for t in lossy) < 60  # about one in ten, each way counted


def test_jitter_does_not_reorder_a_body() -> None:
    async def main() -> None:
        network = MemoryNetwork(seed=9, link=Link(latency=0.001, jitter=0.5))
        a, b = serving(network)
        data = b"".join(bytes([i]) * 1000 for i in range(250))

        async def chunks() -> AsyncIterator[Buffer]:
            for start in range(0, len(data), 1000):
                yield data[start : start + 1000]

        async def take(peer: PeerId, header: bytes, incoming: Incoming) -> bytes:
            assert b"".join([bytes(chunk) async for chunk in incoming]) == data
            return b"ok"

        b.on_push("ordered", take, max_length=len(data))
        outgoing = Outgoing(len(data), chunks())
        assert await a.push(b.peer_id, "ordered", b"", outgoing, timeout=5) == b"ok"

    run(main())


def test_a_link_of_its_own() -> None:
    async def main() -> None:
        network = MemoryNetwork(link=Link(latency=0.01))
        a, b, c = serving(network, 3)
        network.set_link(a.peer_id, b.peer_id, Link(latency=0.5))
        network.set_link(a.peer_id, c.peer_id, Link(latency=0.25), both=False)
        for peer, trip in [(b.peer_id, 1.0), (c.peer_id, 0.26)]:
            await a.call(peer, "echo", b"", timeout=5)
            began = now()
            await a.call(peer, "echo", b"", timeout=5)
            assert now() - began == pytest.approx(trip)

    run(main())


def test_tampering_reaches_every_kind_of_bytes() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        a, b = serving(network)
        seen = set()

        def flip(source: PeerId, target: PeerId, name: str, data: bytes) -> bytes:
            seen.add((source, target, name))
            return bytes(byte ^ 1 for byte in data)

        got = []

        async def take(peer: PeerId, header: bytes, incoming: Incoming) -> bytes:
            got.append(header)
            got.extend([bytes(chunk) async for chunk in incoming])
            return b"done"

        async def one(data: bytes) -> AsyncIterator[Buffer]:
            yield data

        b.on_push("taken", take, max_length=10)
        network.tamper = flip
        assert await a.call(b.peer_id, "echo", b"ab", timeout=5) == b"ab"  # twice flipped
        reply = await a.push(b.peer_id, "taken", b"hh", Outgoing(2, one(b"xy")), timeout=5)
        assert (got, reply) == ([b"ii", b"yx"], bytes(byte ^ 1 for byte in b"done"))
        assert seen >= {(a.peer_id, b.peer_id, "taken"), (b.peer_id, a.peer_id, "echo")}

    run(main())


# --- repeatability and cost -----------------------------------------------------------------------


async def traffic(network: MemoryNetwork, seconds: float, number: int = 64) -> int:
    """Every peer calls a few others each second, now and then sends a body, some die or freeze."""
    members = serving(network, number)
    calls = 0

    async def peer(index: int, me: MemoryTransport) -> None:
        nonlocal calls
        turn = 0
        while now() < seconds:
            for step in (1, 7, 19):
                other = members[(index + step * (turn + 1)) % number]
                if other is me:
                    continue
                try:
                    calls += 1
                    await me.call(other.peer_id, "echo", b"x" * 400, timeout=2)
                except (Unreachable, TransferStalled):
                    continue
            if turn % 20 == index % 20:
                with contextlib.suppress(Unreachable, TransferStalled):
                    await me.push(members[index - 1].peer_id, "take", b"", zeros(MB), timeout=5)
            turn += 1
            await asyncio.sleep(1)

    async def trouble() -> None:
        await asyncio.sleep(seconds / 4)
        network.kill(PEERS[3])
        network.freeze(PEERS[5])
        await asyncio.sleep(seconds / 4)
        network.thaw(PEERS[5])
        network.partition(set(PEERS[: number // 3]))
        await asyncio.sleep(seconds / 8)
        network.heal()

    async with asyncio.TaskGroup() as group:
        group.create_task(trouble())
        for index, member in enumerate(members):
            group.create_task(peer(index, member))
    return calls


WORLD = Link(latency=0.03, jitter=0.02, loss=0.01, drop=0.002)


def test_one_seed_gives_one_history() -> None:
    def history(seed: int) -> list[TraceEvent]:
        trace: list[TraceEvent] = []
        network = MemoryNetwork(seed, link=WORLD, upload=5 * MB, download=20 * MB, trace=trace)
        run(traffic(network, 20, number=16))
        return trace

    first, again, other = history(1), history(1), history(2)
    assert len(first) > 1000
    assert first == again
    assert first != other
    assert {event.event for event in first} >= {"connect", "call", "push", "reply", "reset"}
    assert [event.time for event in first] == sorted(event.time for event in first)


def test_64_peers_call_each_other_for_minutes() -> None:
    network = MemoryNetwork(3, link=WORLD, upload=12.5 * MB, download=12.5 * MB)
    assert run(traffic(network, 120)) > 15_000


def test_unlimited_and_instant_links_work() -> None:
    async def main() -> None:
        network = MemoryNetwork(link=Link(latency=0.0), upload=math.inf, download=math.inf)
        a, b = serving(network)
        assert await a.push(b.peer_id, "take", b"", zeros(50 * MB), timeout=5) == b"50000000"
        assert await pull_zeros(a, b.peer_id, 50 * MB) == 50 * MB
        assert now() == 0.0

    run(main())
