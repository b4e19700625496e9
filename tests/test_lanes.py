"""Lanes among friends: reuse, pace, figures, large bodies, the upload limit."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable

import pytest
from blake3 import blake3
from http_kit import QUICK, A, B, C, address, chunks_of, echo, fake, two, wait_for

from protocols.bodies import BufferDrain, BufferFeed, read_into
from protocols.bucket import Bucket
from protocols.errors import IdentityMismatch, RemoteRefused, TransferStalled, Unreachable, Why
from protocols.http import HttpTransport
from protocols.identity import PeerId
from protocols.limits import Limits
from protocols.transport import Buffer, Feed, Incoming, Outgoing


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


# --- reuse ------------------------------------------------------------------------------------


async def take(peer: PeerId, header: bytes, body: Incoming) -> bytes:
    """Read all of it and say how much it was."""
    target = bytearray(body.length)
    await read_into(body, target)
    return str(len(target)).encode()


async def test_a_lane_is_used_again_and_again() -> None:
    async with two() as (a, b):
        a.on_push("take", take, max_length=1_000_000)

        async def give(peer: PeerId, header: bytes) -> Feed:
            return BufferFeed(bytes(500_000))

        a.on_pull("give", give)
        for _ in range(20):
            assert await b.push(A.peer_id, "take", b"", BufferFeed(bytes(9)), timeout=5) == b"9"
            async with b.pull(A.peer_id, "give", b"", max_length=500_000, timeout=5) as incoming:
                await read_into(incoming, bytearray(500_000))
        assert a.stats.connections == 1


async def test_a_refused_body_that_was_sent_leaves_the_lane_whole() -> None:
    async with two() as (a, b):
        a.on_push("take", take, max_length=100)
        for _ in range(5):
            with pytest.raises(RemoteRefused) as error:
                await b.push(A.peer_id, "take", b"", BufferFeed(bytes(101)), timeout=5)
            assert error.value.code == "too_large"
            assert await b.push(A.peer_id, "take", b"", BufferFeed(bytes(99)), timeout=5) == b"99"
        assert a.stats.connections == 1
        assert a.stats.refused_requests == 5


async def test_transfers_at_one_time_have_lanes_of_their_own_up_to_a_bound() -> None:
    async with two(Limits(grace=0.1, per_peer=3)) as (a, b):
        gate, running, most = asyncio.Event(), 0, 0

        async def hold(peer: PeerId, header: bytes, body: Incoming) -> bytes:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await gate.wait()
            running -= 1
            return await take(peer, header, body)

        a.on_push("hold", hold, max_length=10)
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(b.push(A.peer_id, "hold", b"", BufferFeed(bytes(10)), timeout=20))
            await wait_for(lambda: running == 3)
            gate.set()
        assert most == 3
        assert a.stats.connections == 3


async def test_idle_lanes_end() -> None:
    limits = Limits(grace=0.1, idle_client=0.2)
    async with two(limits) as (a, b):
        a.on_push("take", take, max_length=10)
        await b.push(A.peer_id, "take", b"", BufferFeed(bytes(9)), timeout=5)
        assert b._lanes is not None
        assert b._lanes.drop(A.peer_id) == 1
        await b.push(A.peer_id, "take", b"", BufferFeed(bytes(9)), timeout=5)
        await wait_for(lambda: b.drop(A.peer_id) == 0)
        assert await b.push(A.peer_id, "take", b"", BufferFeed(bytes(9)), timeout=5) == b"9"
    assert "atoll-lanes" not in [thread.name for thread in threading.enumerate()]


async def test_a_restarted_peer_is_found_again() -> None:
    async with two() as (a, b):
        where = address(a)
        a.on_push("take", take, max_length=10)
        await b.push(A.peer_id, "take", b"", BufferFeed(bytes(9)), timeout=5)
        await a.aclose()
        lanes = b._lanes
        assert lanes is not None
        await wait_for(lambda: not lanes._places)  # the idle lane has been told
        async with HttpTransport(A, listen=where, limits=QUICK) as again:
            again.on_push("take", take, max_length=10)
            assert await b.push(A.peer_id, "take", b"", BufferFeed(bytes(9)), timeout=5) == b"9"


@pytest.mark.parametrize("dropper", ["sender", "receiver"])
async def test_dropping_a_peer_cuts_its_lanes(dropper: str) -> None:
    async with two() as (a, b):
        begun, ended = asyncio.Event(), asyncio.Event()

        async def hold(peer: PeerId, header: bytes, body: Incoming) -> bytes:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return b""

        a.on_push("hold", hold, max_length=10**9)
        feed = BufferFeed(bytes(50_000_000))
        push = asyncio.ensure_future(b.push(A.peer_id, "hold", b"", feed, timeout=20))
        await asyncio.wait_for(begun.wait(), 5)
        assert (b.drop(A.peer_id) if dropper == "sender" else a.drop(B.peer_id)) == 1
        with pytest.raises(Unreachable):
            await asyncio.wait_for(push, 5)
        await asyncio.wait_for(ended.wait(), 5)


@pytest.mark.parametrize("length", [0, 10, 50_000_000])
async def test_a_handler_ends_when_its_caller_leaves_before_the_body_is_read(length: int) -> None:
    async with two() as (a, b):
        begun, ended = asyncio.Event(), asyncio.Event()

        async def hold(peer: PeerId, header: bytes, body: Incoming) -> bytes:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return b""

        a.on_push("hold", hold, max_length=10**9)
        feed = BufferFeed(bytes(length))
        push = asyncio.ensure_future(b.push(A.peer_id, "hold", b"", feed, timeout=20))
        await asyncio.wait_for(begun.wait(), 5)
        push.cancel()
        await asyncio.wait([push])
        await asyncio.wait_for(ended.wait(), 5)


async def test_strangers_are_refused_on_lanes_too() -> None:
    async with two() as (a, b):
        a.on_push("take", take, max_length=10)
        a.admit(lambda peer, name: False)
        with pytest.raises(RemoteRefused) as error:
            await b.push(A.peer_id, "take", b"", BufferFeed(bytes(9)), timeout=5)
        assert error.value.code == "stranger"


async def test_another_peer_at_the_address_is_a_mismatch() -> None:
    for secure in (True, False):
        async with (
            HttpTransport(A, listen="127.0.0.1:0", limits=QUICK, tls=secure) as a,
            HttpTransport(B, limits=QUICK, tls=secure) as b,
        ):
            a.on_push("take", take, max_length=10)
            b.book.add(C.peer_id, address(a))
            with pytest.raises(IdentityMismatch) as error:
                await b.push(C.peer_id, "take", b"", BufferFeed(bytes(9)), timeout=5)
            assert error.value.got == A.peer_id


async def test_reasons_are_told_apart() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def ssh(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        await reader.read()

    async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{unused.getsockname()[1]}"
    async with (
        HttpTransport(B, limits=Limits(grace=0.1, connect=0.5)) as b,
        fake(silent, None) as mute,
        fake(ssh, None) as ssh_server,
        fake(closes, None) as closing,
    ):
        for where, why in [
            ("no-such-host.invalid:4390", Why.DNS),
            (nobody, Why.REFUSED),
            (mute, Why.TIMEOUT),
            (ssh_server, Why.NOT_ATOLL),
            (closing, Why.RESET),
        ]:
            b.book.forget(A.peer_id)
            b.book.add(A.peer_id, where)
            with pytest.raises(Unreachable) as error:
                await b.push(A.peer_id, "take", b"", BufferFeed(bytes(9)), timeout=5)
            assert error.value.why is why, (where, error.value)


# --- the upload limit ---------------------------------------------------------------------------


async def test_the_upload_limit_holds_is_smooth_and_fair() -> None:
    rate, size = 4e6, 2_000_000
    async with (
        HttpTransport(A, listen="127.0.0.1:0", limits=QUICK) as a,
        HttpTransport(B, limits=QUICK, max_upload=rate) as b,
    ):
        b.book.add(A.peer_id, address(a))
        a.on_call("echo", echo)
        arrived: list[tuple[float, str, int]] = []

        class Noting(BufferDrain):
            def __init__(self, name: str) -> None:
                super().__init__(bytearray(size))
                self.name = name

            def took(self, count: int) -> None:
                super().took(count)
                arrived.append((time.monotonic(), self.name, count))

        async def note(peer: PeerId, header: bytes, body: Incoming) -> bytes:
            await body.into(Noting(header.decode()))
            return b""

        a.on_push("note", note, max_length=size)
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for name in (b"1", b"2"):
                feed = BufferFeed(bytes(size))
                group.create_task(b.push(A.peer_id, "note", name, feed, timeout=5))
            assert await b.call(A.peer_id, "echo", b"x" * 50_000, timeout=5)  # it does not wait
        seconds = time.monotonic() - began
        assert (2 * size + 50_000) / rate * 0.95 < seconds < 2 * size / rate * 1.5
        half = began + seconds / 2
        first, second = (
            sum(n for at, name, n in arrived if name == which and at < half) for which in "12"
        )
        assert 0.7 < first / second < 1.4
        assert max(count for _, _, count in arrived) <= rate * 0.05


def test_a_bucket_is_never_more_than_50_ms_ahead() -> None:
    now = 0.0
    bucket = Bucket(1e6, clock=lambda: now)
    now, got, sent = 5.0, 0, []  # idle for long: nothing much is saved up
    for _ in range(2000):
        while count := bucket.take(1 << 20):
            got += count
            sent.append((now, count))
        assert got <= 1e6 * (now - 5.0) + 50_000
        assert bucket.wait() > 0
        now += 0.001
    assert got >= 1e6 * (now - 5.0)
    bucket.spend(100_000)
    assert bucket.take(1) == 0
    assert 0.09 < bucket.wait() < 0.13
    assert Bucket(None).take(1 << 20) == 1 << 20
    with pytest.raises(ValueError, match="limit"):
        Bucket(0)


# --- the data thread ----------------------------------------------------------------------------


async def test_one_transfers_bug_is_no_other_ones(caplog: pytest.LogCaptureFixture) -> None:
    async with two() as (a, b):
        a.on_push("take", take, max_length=10_000_000)

        class Broken(BufferFeed):
            def next(self) -> Buffer:
                raise OSError("the disk is gone")

        def bug() -> None:
            raise RuntimeError("posted")

        good = BufferFeed(bytes(10_000_000))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(b.push(A.peer_id, "take", b"", good, timeout=5))
            b.post(bug)
            with pytest.raises(OSError, match="the disk is gone"):
                await b.push(A.peer_id, "take", b"", Broken(bytes(9)), timeout=5)
        assert task.result() == b"10000000"
    assert "posted" in caplog.text


async def test_bodies_need_memory_for_a_few_chunks_only() -> None:
    async with two() as (a, b):
        size = 64 << 20
        block = memoryview(bytearray(1 << 20))

        class Same:
            length = size

            def attach(self, wake: Callable[[], None]) -> None:
                pass

            def next(self) -> Buffer:
                return block

        class Hole:
            got = 0

            def attach(self, wake: Callable[[], None]) -> None:
                pass

            def room(self) -> memoryview:
                return block

            def took(self, count: int) -> None:
                self.got += count

        hole = Hole()

        async def drop(peer: PeerId, header: bytes, body: Incoming) -> bytes:
            await body.into(hole)
            return b""

        a.on_push("drop", drop, max_length=size)
        tracemalloc.start()
        try:
            await b.push(A.peer_id, "drop", b"", Same(), timeout=20)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert hole.got == size
        assert peak < 1 << 20


async def test_bodies_are_let_go_of_without_the_garbage_collector() -> None:
    """What they refer to may be as large as the vector."""
    async with two() as (a, b):
        seen: list[weakref.ref[BufferDrain | BufferFeed]] = []

        async def take(peer: PeerId, header: bytes, body: Incoming) -> bytes:
            drain = BufferDrain(memoryview(bytearray(body.length)))
            seen.append(weakref.ref(drain))
            await body.into(drain)
            return b""

        a.on_push("body", take, max_length=10_000_000)
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                feed = BufferFeed(bytes(3_000_000))
                seen.append(weakref.ref(feed))
                await b.push(A.peer_id, "body", b"", feed, timeout=20)
                del feed
            await wait_for(lambda: not any(ref() is not None for ref in seen))
        finally:
            gc.enable()
        assert len(seen) == 6
