"""Lanes among friends: pace, figures, large bodies, the upload limit, memory."""

from __future__ import annotations

import asyncio
import gc
import os
import time
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from blake3 import blake3
from http_kit import QUICK, A, B, address, chunks_of, echo, take, two, wait_for

from protocols.bodies import BufferDrain, BufferFeed
from protocols.bucket import Bucket
from protocols.errors import RemoteRefused, TransferStalled
from protocols.http.transport import HttpTransport
from protocols.identity import PeerId
from protocols.limits import Limits
from protocols.transport import Buffer, Incoming, Outgoing


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


async def test_a_body_may_stand_still_for_as_long_as_its_receiver_bears() -> None:
    async with two(Limits(grace=0.1, stall=0.2)) as (a, b):

        async def patient(peer: PeerId, header: bytes, body: Incoming) -> bytes:
            target = bytearray(body.length)
            await body.into(BufferDrain(target), stall=float(header))
            return bytes(target)

        async def halting() -> AsyncIterator[Buffer]:
            yield b"first"
            await asyncio.sleep(1.0)
            yield b"last"

        a.on_push("patient", patient, max_length=10)
        body = Outgoing(9, halting())
        assert await b.push(A.peer_id, "patient", b"5", body, timeout=5) == b"firstlast"
        with pytest.raises(RemoteRefused, match="stalled"):
            await b.push(A.peer_id, "patient", b"0", Outgoing(9, halting()), timeout=5)


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
        # a server counts on its own thread, a little after the last byte is there
        await wait_for(lambda: a.stats.out_by_name["give"] == len(data))
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


# --- the upload limit ---------------------------------------------------------------------------


async def test_the_upload_limit_holds_is_smooth_and_fair(monkeypatch: pytest.MonkeyPatch) -> None:
    rate, size = 4e6, 2_000_000
    async with (
        HttpTransport(A, listen="127.0.0.1:0", limits=QUICK) as a,
        HttpTransport(B, limits=QUICK, max_upload=rate) as b,
    ):
        b.book.add(A.peer_id, address(a))
        a.on_call("echo", echo)
        arrived: list[tuple[float, str, int]] = []
        sent: list[tuple[float, int]] = []
        gave = b._reactor.gave

        def gives(lane: Any, count: int) -> None:
            gave(lane, count)
            sent.append((b._reactor.bucket._at, count))  # when it was granted

        monkeypatch.setattr(b._reactor, "gave", gives)

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
        assert seconds > (2 * size + 50_000) / rate * 0.95
        both = max(min(at for at, name, _ in arrived if name == which) for which in "12")
        half = (both + began + seconds) / 2
        first, second = (
            sum(n for at, name, n in arrived if name == which and both <= at < half)
            for which in "12"
        )
        assert 0.7 < first / second < 1.4
    assert sum(count for _, count in sent) > 2 * size
    # in no window of time more than its length allows and what 50 ms do; by the time of the grants,
    # since a thread that stood still for a moment has more at once than it was granted at once
    level, most, at = 0.0, 0.0, sent[0][0]
    for now, count in sent:
        level = max(0.0, level - rate * (now - at)) + count
        most, at = max(most, level), now
    assert most <= rate * 0.05


@pytest.mark.parametrize("each", [1_000, 50_000, 1 << 20])
def test_messages_leave_room_for_bodies(each: int) -> None:
    """Ten times the limit in answers to whoever asks for them: bodies go on at a quarter."""
    now = 0.0
    bucket = Bucket(1e6, clock=lambda: now)
    sent, spent, longest, last = 0, 0, 0.0, 0.0
    for step in range(20_000):
        now = step / 1000
        while spent < 1e7 * now:
            bucket.spend(each)
            spent += each
        while count := bucket.take(1 << 20):
            sent, longest, last = sent + count, max(longest, now - last), now
    assert 0.2 < sent / 20e6 < 0.26
    assert longest < 2.5


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
