"""Lanes among friends: reuse, pace, figures, large bodies, the upload limit."""

from __future__ import annotations

import asyncio
import os

import pytest
from blake3 import blake3
from http_kit import QUICK, A, B, address, chunks_of, echo, two

from protocols.errors import TransferStalled
from protocols.http import HttpTransport
from protocols.identity import PeerId
from protocols.limits import Limits
from protocols.transport import Incoming, Outgoing


async def test_calls_do_not_wait_behind_long_bodies() -> None:
    limits = Limits(grace=0.1, per_peer=2)
    async with two(limits) as (a, b):
        gate = asyncio.Event()

        async def slow(peer: PeerId, header: bytes, body: Incoming) -> bytes:
            await gate.wait()
            async for _ in body:
                pass
            return b""

        a.on_push("slow", slow, max_length=10_000_000)
        data = bytes(3_000_000)
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                body = Outgoing(len(data), chunks_of(data))
                group.create_task(b.push(A.peer_id, "slow", b"", body, timeout=20))
            for _ in range(10):
                assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
            gate.set()


async def test_a_receiver_that_is_slow_but_alive_is_waited_for() -> None:
    async with two() as (a, b):
        got = 0

        async def slow(peer: PeerId, header: bytes, body: Incoming) -> bytes:
            nonlocal got
            async for chunk in body:
                got += len(chunk)
                await asyncio.sleep(0.02)  # a slow handler, not a wait
            return b"done"

        a.on_push("slow", slow, max_length=40_000_000)
        data = bytes(16 << 20)
        body = Outgoing(len(data), chunks_of(data))
        assert await b.push(A.peer_id, "slow", b"", body, timeout=1.0) == b"done"
        assert got == len(data)


async def test_a_receiver_that_stops_reading_stalls_the_push() -> None:
    async with two() as (a, b):
        gate, ended = asyncio.Event(), asyncio.Event()
        complete = False

        async def stuck(peer: PeerId, header: bytes, body: Incoming) -> bytes:
            nonlocal complete
            try:
                await gate.wait()
                async for _ in body:
                    pass
                complete = True
            finally:
                ended.set()
            return b""

        a.on_push("stuck", stuck, max_length=100_000_000)
        data = bytes(32 << 20)
        with pytest.raises(TransferStalled):
            await b.push(A.peer_id, "stuck", b"", Outgoing(len(data), chunks_of(data)), timeout=0.5)
        gate.set()
        await asyncio.wait_for(ended.wait(), 5)
        assert not complete


async def test_bytes_and_speeds_are_counted() -> None:
    async with two() as (a, b):
        data = os.urandom(4 << 20)

        async def take(peer: PeerId, header: bytes, body: Incoming) -> bytes:
            async for _ in body:
                pass
            return b"ok"

        async def give(peer: PeerId, header: bytes) -> Outgoing:
            return Outgoing(len(data), chunks_of(data))

        async def nap(peer: PeerId, body: bytes) -> bytes:
            await asyncio.sleep(0.1)  # the handler's time, which is not the link's
            return b""

        a.on_push("take", take, max_length=len(data))
        a.on_pull("give", give)
        a.on_call("nap", nap)
        await b.call(A.peer_id, "echo", b"12345", timeout=5)
        await b.call(A.peer_id, "nap", b"", timeout=5)
        await b.push(A.peer_id, "take", b"head", Outgoing(len(data), chunks_of(data)), timeout=5)
        async with b.pull(A.peer_id, "give", b"", max_length=len(data), timeout=5) as incoming:
            async for _ in incoming:
                pass
        assert b.stats.out_by_name == {"echo": 5, "take": len(data) + 4, "give": 0}
        assert b.stats.in_by_name == {"echo": 5, "take": 2, "give": len(data)}
        assert a.stats.in_by_name["take"] == len(data) + 4
        assert a.stats.out_by_name["give"] == len(data)
        assert a.stats.requests_by_name == {"echo": 1, "nap": 1, "take": 1, "give": 1}
        ours, theirs = b.stats.peer(A.peer_id), a.stats.peer(B.peer_id)
        assert ours.bytes_out == theirs.bytes_in == len(data) + 9
        assert ours.bytes_in == theirs.bytes_out == len(data) + 7
        assert ours.round_trip is not None
        assert 0 < ours.round_trip < 0.08
        assert ours.upload is not None
        assert ours.upload > 1e6
        assert ours.download is not None
        assert ours.download > 1e6
        assert theirs.download is not None
        assert theirs.download > 1e6


@pytest.mark.parametrize("secure", [True, False])
async def test_64_mib_there_and_back_with_calls_between(secure: bool) -> None:
    size = 64 << 20
    data = memoryview(os.urandom(1 << 20) * 64)
    wanted = blake3(data).digest()
    async with (
        HttpTransport(A, listen="127.0.0.1:0", limits=QUICK, tls=secure) as a,
        HttpTransport(B, limits=QUICK, tls=secure) as b,
    ):
        b.book.add(A.peer_id, address(a))
        a.on_call("echo", echo)

        async def take(peer: PeerId, header: bytes, body: Incoming) -> bytes:
            digest = blake3()
            async for chunk in body:
                digest.update(chunk)
            return digest.digest()

        async def give(peer: PeerId, header: bytes) -> Outgoing:
            return Outgoing(size, chunks_of(data))

        async def pull() -> bytes:
            digest = blake3()
            async with b.pull(A.peer_id, "give", b"", max_length=size, timeout=10) as incoming:
                async for chunk in incoming:
                    digest.update(chunk)
            return digest.digest()

        a.on_push("take", take, max_length=size)
        a.on_pull("give", give)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    b.push(A.peer_id, "take", b"", Outgoing(size, chunks_of(data)), timeout=10)
                ),
                group.create_task(pull()),
            ]
            while not all(task.done() for task in tasks):
                assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
        assert [task.result() for task in tasks] == [wanted, wanted]
