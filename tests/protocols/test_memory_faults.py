"""Faults of the simulated internet: partitions, peers that freeze, die, close or leave."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from memory_kit import MB, PEERS, count, echo, now, pull_zeros, serving, why, zeros

from protocols.errors import LocalProtocolError, RemoteRefused, TransferStalled, Unreachable, Why
from protocols.identity import PeerId
from protocols.memory.transport import Link, MemoryNetwork, MemoryTransport
from protocols.memory.virtual_time import run
from protocols.transport import Incoming

# --- partitions and freezes -----------------------------------------------------------------------


def test_a_partition_parts_and_heals() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        a, b, c, d = serving(network, 4)
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
        a, b = serving(network, 2)
        network.partition({a.peer_id})
        newcomer = network.join(PEERS[5])
        assert await why(newcomer, a.peer_id) is Why.TIMEOUT
        assert await why(newcomer, b.peer_id) is None

    run(main())


def test_an_open_link_that_goes_dark_stalls() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        a, b = serving(network)
        await a.call(b.peer_id, "echo", b"", timeout=1)
        network.freeze(b.peer_id)
        began = now()
        with pytest.raises(TransferStalled):
            await a.call(b.peer_id, "echo", b"", timeout=3)
        assert now() - began == pytest.approx(3)
        with pytest.raises(TransferStalled):
            await a.push(b.peer_id, "take", b"", zeros(10 * MB), timeout=3)
        with pytest.raises(TransferStalled):
            await pull_zeros(a, b.peer_id, 10, timeout=3)

    run(main())


def test_bodies_stall_in_the_middle_and_both_ends_notice() -> None:
    async def main() -> None:
        network = MemoryNetwork(upload=1 * MB)
        a, b = serving(network)
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
            pulling = group.create_task(_stalls(pull_zeros(b, a.peer_id, 20 * MB, timeout=3)))
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
        a, b = serving(network)
        async with asyncio.TaskGroup() as group:
            pushing = group.create_task(a.push(b.peer_id, "take", b"", zeros(10 * MB), timeout=10))
            pulling = group.create_task(pull_zeros(a, b.peer_id, 10 * MB, timeout=10))
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
        a, b, c = serving(network, 3)
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
                    pull_zeros(a, b.peer_id, 50 * MB, timeout=60),
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
        a, b = serving(network)
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


def test_nobody_holds_what_answered_for_a_dead_peer() -> None:
    class Heavy:
        async def answer(self, peer: PeerId, body: bytes) -> bytes:
            return body

    async def main() -> None:
        network = MemoryNetwork()
        a, b = serving(network)
        heavy = Heavy()
        there = weakref.ref(heavy)
        b.on_call("heavy", heavy.answer)
        del heavy
        await a.call(b.peer_id, "heavy", b"", timeout=1)
        network.kill(b.peer_id)
        gc.collect()
        assert there() is None

    run(main())


def test_death_behind_a_partition_is_silent() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        a, b = serving(network)

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
        a, b = serving(network)
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
        a, b = serving(MemoryNetwork())
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
