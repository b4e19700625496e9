"""Lanes that are kept for the next transfer, and what ends them."""

from __future__ import annotations

import asyncio
import gc
import select
import threading
import weakref
from typing import Any

import pytest
from http_kit import (
    NOBODY,
    QUICK,
    A,
    B,
    C,
    Hold,
    address,
    closes,
    fake,
    silent,
    ssh,
    take,
    two,
    wait_for,
)

from protocols.bodies import BufferDrain, BufferFeed, read_into
from protocols.errors import IdentityMismatch, RemoteRefused, Unreachable, Why
from protocols.http.transport import HttpTransport
from protocols.identity import PeerId
from protocols.lanes.handle import LaneHandle, Transfer
from protocols.limits import Limits
from protocols.tasks import beside
from protocols.transport import Buffer, Feed, Incoming


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


class _Answered(BufferFeed):
    """A body whose first bytes go out when the other end has answered the head."""

    def __init__(self, size: int) -> None:
        super().__init__(bytes(size))
        self.asked = threading.Event()
        self.link: LaneHandle | None = None
        self.answered = False

    def next(self) -> Buffer:
        if not self.asked.is_set():
            assert self.link is not None
            self.asked.set()
            self.answered = bool(select.select([self.link.lane._sock], [], [], 5)[0])
        return super().next()


async def test_a_refusal_may_come_while_the_body_goes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        HttpTransport(A, listen="127.0.0.1:0", limits=QUICK, tls=False) as a,
        HttpTransport(B, limits=QUICK, tls=False) as b,
    ):
        b.book.add(a.peer_id, address(a))
        a.on_push("take", take, max_length=100)
        assert await b.push(A.peer_id, "take", b"", BufferFeed(bytes(99)), timeout=5) == b"99"
        start = LaneHandle.start_sending

        def begun(link: LaneHandle, head: bytes, feed: Feed | None, **how: Any) -> Transfer:
            if not isinstance(feed, _Answered):
                return start(link, head, feed, **how)
            feed.link = link
            transfer = start(link, head, feed, **how)
            assert feed.asked.wait(5)  # what is posted after this finds the answer there
            return transfer

        monkeypatch.setattr(LaneHandle, "start_sending", begun)
        body = _Answered(3_000_000)
        with pytest.raises(RemoteRefused) as error:
            await b.push(A.peer_id, "take", b"", body, timeout=5)
        assert error.value.code == "too_large"
        assert body.answered


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
        lanes = b._lanes
        assert lanes is not None
        assert len(lanes._places[A.peer_id].idle) == 1
        await wait_for(lambda: not lanes._places)
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


@pytest.mark.parametrize("leaver", ["sender", "receiver"])
async def test_an_end_that_leaves_cuts_its_lanes(leaver: str) -> None:
    async with two() as (a, b):
        hold = Hold()
        a.on_push("hold", hold.push, max_length=10**9)
        feed = BufferFeed(bytes(50_000_000))
        push = asyncio.ensure_future(b.push(A.peer_id, "hold", b"", feed, timeout=20))
        await asyncio.wait_for(hold.begun.wait(), 5)
        await (b if leaver == "sender" else a).aclose()
        with pytest.raises(Unreachable):
            await asyncio.wait_for(push, 5)
        await asyncio.wait_for(hold.ended.wait(), 5)


@pytest.mark.parametrize("length", [0, 10, 50_000_000])
async def test_a_handler_ends_when_its_caller_leaves_before_the_body_is_read(length: int) -> None:
    async with two() as (a, b):
        hold = Hold()
        a.on_push("hold", hold.push, max_length=10**9)
        feed = BufferFeed(bytes(length))
        push = asyncio.ensure_future(b.push(A.peer_id, "hold", b"", feed, timeout=20))
        await asyncio.wait_for(hold.begun.wait(), 5)
        push.cancel()
        await asyncio.wait([push])
        await asyncio.wait_for(hold.ended.wait(), 5)


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


@pytest.mark.usefixtures("quick_resolver")
async def test_reasons_are_told_apart() -> None:
    async with (
        fake(silent, None) as mute,
        fake(ssh, None) as ssh_server,
        fake(closes, None) as closing,
    ):
        for where, why in [
            ("no-such-host.invalid:4390", Why.DNS),
            (NOBODY, Why.REFUSED),
            (mute, Why.TIMEOUT),
            (ssh_server, Why.NOT_ATOLL),
            (closing, Why.RESET),
        ]:
            limits = Limits(grace=0.1, connect=0.5) if why is Why.TIMEOUT else QUICK
            async with HttpTransport(B, limits=limits) as b:
                b.book.add(A.peer_id, where)
                with pytest.raises(Unreachable) as error:
                    await b.push(A.peer_id, "take", b"", BufferFeed(bytes(9)), timeout=5)
            assert error.value.why is why, (where, error.value)


class FullDrain(BufferDrain):
    """Takes ``most`` bytes."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__(bytearray(size))
        self.least = size - most

    def room(self) -> memoryview:
        if len(self._left) < self.least:
            raise RemoteRefused("late", "nobody wants the rest")
        return super().room()


class SpoiltFeed(BufferFeed):
    """Gives ``most`` pieces, of 100,000 bytes each."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__(*[bytes(100_000)] * (size // 100_000))
        self.most = most

    def next(self) -> Buffer:
        if not self.most:
            raise ValueError("the values have changed")
        self.most -= 1
        return super().next()


@pytest.mark.parametrize("fails", ["drain", "feed", "sender", "puller"])
async def test_bodies_that_fail_are_let_go_of_without_the_garbage_collector(fails: str) -> None:
    """Their errors' tracebacks lead to all that waited for them, and so to the bodies."""
    size = 4_000_000
    seen: list[weakref.ref[FullDrain | SpoiltFeed]] = []

    def drain() -> FullDrain:
        found = FullDrain(size, size // 4 if fails in ("drain", "puller") else size)
        seen.append(weakref.ref(found))
        return found

    def feed() -> SpoiltFeed:
        found = SpoiltFeed(size, 20 if fails == "feed" else 40)
        seen.append(weakref.ref(found))
        return found

    async def stored(peer: PeerId, header: bytes, incoming: Incoming) -> bytes:
        begun.set()
        await incoming.into(drain())
        return b""

    async def give(peer: PeerId, header: bytes) -> Feed:
        return feed()

    async def once() -> None:
        if fails == "puller":
            async with b.pull(A.peer_id, "give", b"", max_length=size, timeout=5) as incoming:
                await incoming.into(drain())
        else:
            await b.push(A.peer_id, "store", b"", feed(), timeout=5)

    async with two() as (a, b):
        a.on_push("store", stored, max_length=size)
        a.on_pull("give", give)
        begun = asyncio.Event()
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                if fails == "sender":
                    begun.clear()
                    async with beside(once()):
                        await asyncio.wait_for(begun.wait(), 5)  # and leave
                else:
                    with pytest.raises((RemoteRefused, ValueError)):
                        await once()
            await wait_for(lambda: not any(ref() is not None for ref in seen))
        finally:
            gc.enable()
        assert len(seen) == 6
