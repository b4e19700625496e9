"""Faults of the simulated internet, chance that a seed decides, and what the model costs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import time
from collections.abc import AsyncIterator

import pytest

from protocols.errors import LocalProtocolError, RemoteRefused, TransferStalled, Unreachable, Why
from protocols.identity import Identity, PeerId
from protocols.memory import Link, MemoryNetwork, MemoryTransport, TraceEvent
from protocols.transport import CHUNK_BYTES, Buffer, Incoming, Outgoing
from protocols.virtual_time import run

MB = 1_000_000
PEERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, 65)]


def now() -> float:
    return asyncio.get_running_loop().time()


def zeros(length: int) -> Outgoing:
    block = bytes(CHUNK_BYTES)

    async def chunks() -> AsyncIterator[Buffer]:
        for start in range(0, length, CHUNK_BYTES):
            yield memoryview(block)[: min(CHUNK_BYTES, length - start)]

    return Outgoing(length, chunks())


async def echo(peer: PeerId, data: bytes) -> bytes:
    return data


async def count(peer: PeerId, header: bytes, incoming: Incoming) -> bytes:
    return str(sum([len(chunk) async for chunk in incoming])).encode()


async def give(peer: PeerId, header: bytes) -> Outgoing:
    return zeros(int(header))


async def pull(transport: MemoryTransport, peer: PeerId, length: int, *, timeout: float = 5) -> int:
    header = str(length).encode()
    async with transport.pull(peer, "give", header, max_length=length, timeout=timeout) as incoming:
        return sum([len(chunk) async for chunk in incoming])


def join(network: MemoryNetwork, number: int = 2) -> list[MemoryTransport]:
    """Peers that answer ``echo``, ``take`` and ``give``."""
    members = [network.join(peer) for peer in PEERS[:number]]
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


# --- partitions and freezes -----------------------------------------------------------------------


def test_a_partition_parts_and_heals() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        a, b, c, d = join(network, 4)
        network.partition({a.peer_id, b.peer_id}, {c.peer_id})
        assert await why(a, b.peer_id) is None
        assert await why(a, c.peer_id) is Why.TIMEOUT
        assert await why(c, d.peer_id) is Why.TIMEOUT  # who is not named is in one more group
        assert await why(d, a.peer_id) is Why.TIMEOUT
        network.partition({a.peer_id, c.peer_id})
        assert await why(a, c.peer_id) is None
        assert await why(b, d.peer_id) is None
        network.heal()
        assert [await why(a, x.peer_id) for x in (b, c, d)] == [None] * 3

    run(main())


def test_a_newcomer_is_outside_every_group() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        a, b = join(network, 2)
        network.partition({a.peer_id})
        newcomer = network.join(PEERS[5])
        assert await why(newcomer, a.peer_id) is Why.TIMEOUT
        assert await why(newcomer, b.peer_id) is None

    run(main())


def test_an_open_link_that_goes_dark_stalls() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        a, b = join(network)
        await a.call(b.peer_id, "echo", b"", timeout=1)
        network.freeze(b.peer_id)
        began = now()
        with pytest.raises(TransferStalled):
            await a.call(b.peer_id, "echo", b"", timeout=3)
        assert now() - began == pytest.approx(3)
        with pytest.raises(TransferStalled):
            await a.push(b.peer_id, "take", b"", zeros(10 * MB), timeout=3)
        with pytest.raises(TransferStalled):
            await pull(a, b.peer_id, 10, timeout=3)

    run(main())


def test_bodies_stall_in_the_middle_and_both_ends_notice() -> None:
    async def main() -> None:
        network = MemoryNetwork(upload=1 * MB)
        a, b = join(network)
        ended: list[str] = []

        async def take(peer: PeerId, header: bytes, incoming: Incoming) -> bytes:
            try:
                return await count(peer, header, incoming)
            except TransferStalled:
                ended.append("stalled")
                raise

        b.on_push("watched", take, max_length=1000 * MB)
        async with asyncio.TaskGroup() as group:
            pushing = group.create_task(
                _stalls(a.push(b.peer_id, "watched", b"", zeros(20 * MB), timeout=3))
            )
            pulling = group.create_task(_stalls(pull(b, a.peer_id, 20 * MB, timeout=3)))
            await asyncio.sleep(5)
            network.freeze(a.peer_id)
        assert 8 <= pushing.result() < 11  # the sender's own buffers fill first
        assert 7 < pulling.result() <= 8
        await asyncio.sleep(60)
        assert ended == ["stalled"]

    async def _stalls(transfer: object) -> float:
        with pytest.raises(TransferStalled):
            await transfer  # type: ignore[misc]
        return now()

    run(main())


@pytest.mark.parametrize("fault", ["freeze", "partition"])
def test_a_short_darkness_only_delays(fault: str) -> None:
    async def main() -> None:
        network = MemoryNetwork(seed=2, link=Link(jitter=0.03), upload=2 * MB, download=3 * MB)
        a, b = join(network)
        async with asyncio.TaskGroup() as group:
            pushing = group.create_task(a.push(b.peer_id, "take", b"", zeros(10 * MB), timeout=10))
            pulling = group.create_task(pull(a, b.peer_id, 10 * MB, timeout=10))
            for _ in range(3):
                await asyncio.sleep(1)
                if fault == "freeze":
                    network.freeze(b.peer_id)
                    await asyncio.sleep(4)
                    network.thaw(b.peer_id)
                else:
                    network.partition({a.peer_id})
                    await asyncio.sleep(4)
                    network.heal()
        assert pushing.result() == b"10000000"
        assert pulling.result() == 10 * MB
        assert 14 < now() < 22

    run(main())


# --- death ----------------------------------------------------------------------------------------


def test_death_resets_everything_and_cancels_handlers() -> None:
    async def main() -> None:
        network = MemoryNetwork(upload=1 * MB)
        a, b, c = join(network, 3)
        ended: list[str] = []

        async def hang(peer: PeerId, data: bytes) -> bytes:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                ended.append("hang")
            return b""

        async def watched(peer: PeerId, header: bytes, incoming: Incoming) -> bytes:
            try:
                return await count(peer, header, incoming)
            finally:
                ended.append("push")

        b.on_call("hang", hang)
        c.on_push("watched", watched, max_length=1000 * MB)

        async def broken(transfer: object) -> float:
            with pytest.raises(Unreachable) as error:
                await transfer  # type: ignore[misc]
            assert error.value.why is Why.RESET
            return now()

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(broken(x))
                for x in (
                    a.call(b.peer_id, "hang", b"", timeout=60),
                    a.push(b.peer_id, "take", b"", zeros(50 * MB), timeout=60),
                    pull(a, b.peer_id, 50 * MB, timeout=60),
                    b.push(c.peer_id, "watched", b"", zeros(50 * MB), timeout=60),
                )
            ]
            await asyncio.sleep(3)
            tasks.append(group.create_task(broken(b.call(c.peer_id, "echo", b"", timeout=60))))
            await asyncio.sleep(0.001)
            network.kill(b.peer_id)
        assert all(task.result() < 3.1 for task in tasks)
        assert sorted(ended) == ["hang", "push"]
        assert await why(a, b.peer_id) is Why.REFUSED
        assert await why(b, a.peer_id) is Why.RESET
        assert await why(a, c.peer_id) is None

    run(main())


def test_a_killed_peer_can_come_back_empty() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        a, b = join(network)
        await a.call(b.peer_id, "echo", b"", timeout=1)
        with pytest.raises(LocalProtocolError):
            network.join(b.peer_id)
        network.kill(b.peer_id)
        again = network.join(b.peer_id)
        assert again.address == b.address
        with pytest.raises(RemoteRefused, match="unknown"):
            await a.call(b.peer_id, "echo", b"", timeout=1)
        again.on_call("echo", echo)
        assert await a.call(b.peer_id, "echo", b"new", timeout=1) == b"new"

    run(main())


def test_death_behind_a_partition_is_silent() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        a, b = join(network)

        async def hang(peer: PeerId, data: bytes) -> bytes:
            await asyncio.get_running_loop().create_future()
            return b""

        b.on_call("hang", hang)
        async with asyncio.TaskGroup() as group:
            calling = group.create_task(_outcome(a.call(b.peer_id, "hang", b"", timeout=30)))
            await asyncio.sleep(1)
            network.partition({a.peer_id})
            network.kill(b.peer_id)
            await asyncio.sleep(9)
            assert not calling.done()
            network.heal()
        assert calling.result() == pytest.approx(10.02)  # the reset comes through at last

    async def _outcome(call: object) -> float:
        with pytest.raises(Unreachable):
            await call  # type: ignore[misc]
        return now()

    run(main())


def test_closing_waits_for_handlers_and_refuses_afterwards() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        a, b = join(network)
        ended: list[float] = []

        async def slow_to_leave(peer: PeerId, data: bytes) -> bytes:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                await asyncio.sleep(2)
                ended.append(now())
            return b""

        b.on_call("hang", slow_to_leave)
        async with asyncio.TaskGroup() as group:
            failing = group.create_task(why_hang(a, b.peer_id))
            await asyncio.sleep(1)
            await b.aclose()
            assert ended == [3.0]
        assert failing.result() is Why.RESET
        assert await why(a, b.peer_id) is Why.REFUSED
        await b.aclose()

    async def why_hang(transport: MemoryTransport, peer: PeerId) -> Why:
        with pytest.raises(Unreachable) as error:
            await transport.call(peer, "hang", b"", timeout=30)
        return error.value.why

    run(main())


def test_a_caller_that_leaves_ends_the_handler() -> None:
    async def main() -> None:
        a, b = join(MemoryNetwork())
        ended: list[float] = []

        async def hang(peer: PeerId, data: bytes) -> bytes:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                ended.append(now())
            return b""

        b.on_call("hang", hang)
        with pytest.raises(TransferStalled):
            await a.call(b.peer_id, "hang", b"", timeout=2)
        await asyncio.sleep(1)
        assert ended == [pytest.approx(2.02)]
        async with a.pull(b.peer_id, "give", b"100000000", max_length=100 * MB, timeout=5) as body:
            async for _ in body:
                break
        await asyncio.sleep(1)
        assert not b.exchanges
        assert not a.exchanges

    run(main())


# --- chance ---------------------------------------------------------------------------------------


def test_dropped_exchanges_break_before_or_after_the_handler() -> None:
    async def main() -> None:
        network = MemoryNetwork(seed=5, link=Link(drop=0.3))
        a, b = join(network)
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
                await pull(a, b.peer_id, MB)
            except Unreachable:
                broken += 1
        assert 8 < broken < 32

    run(main())


def test_loss_delays_and_never_breaks() -> None:
    async def main(loss: float) -> list[float]:
        a, b = join(MemoryNetwork(seed=1, link=Link(latency=0.01, loss=loss)))
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
        a, b = join(network)
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
        a, b, c = join(network, 3)
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
        a, b = join(network)
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
    members = join(network, number)
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


def test_64_peers_for_minutes_cost_little() -> None:
    network = MemoryNetwork(3, link=WORLD, upload=12.5 * MB, download=12.5 * MB)
    began = time.process_time()
    calls = run(traffic(network, 120))
    spent = time.process_time() - began
    assert calls > 15_000
    assert spent < 20  # about 2 s on an idle core of 2024


def test_unlimited_and_instant_links_work() -> None:
    async def main() -> None:
        network = MemoryNetwork(link=Link(latency=0.0), upload=math.inf, download=math.inf)
        a, b = join(network)
        assert await a.push(b.peer_id, "take", b"", zeros(50 * MB), timeout=5) == b"50000000"
        assert await pull(a, b.peer_id, 50 * MB) == 50 * MB
        assert now() == 0.0

    run(main())
