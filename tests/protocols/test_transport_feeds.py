"""What every transport promises of bodies that go from and into memory without the event loop."""

from __future__ import annotations

import array
import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from contract_kit import SOON, echo, within

from protocols.bodies import BufferFeed, read_into
from protocols.errors import (
    LocalProtocolError,
    Malformed,
    RemoteRefused,
    TransferStalled,
)
from protocols.identity import PeerId
from protocols.transport import (
    Buffer,
    Feed,
    Incoming,
    Transport,
)


class Source:
    """A feed of ``data`` in pieces that has nothing now and then, and is woken from a thread.

    ``short`` bytes are missing at the end, ``extra`` more come than announced.
    """

    def __init__(
        self, data: bytes, *, size: int = 70_000, pause: int = 0, short: int = 0, extra: int = 0
    ) -> None:
        self.length = len(data)
        self.data = memoryview(data + bytes(extra))[: len(data) + extra - short]
        self.size = size
        self.pause = pause  # every so many pieces
        self.asked = 0
        self.at = 0
        self.wake: Callable[[], None] = lambda: None
        self.rested = False

    def attach(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def next(self) -> Buffer | None:
        self.asked += 1
        if self.pause and self.asked % self.pause == 0 and not self.rested:
            self.rested = True
            threading.Timer(0.01, self.wake).start()
            return None
        self.rested = False
        piece = self.data[self.at : self.at + self.size]
        self.at += len(piece)
        return piece


class Stuck(Source):
    """A feed that never has the rest."""

    def next(self) -> Buffer | None:
        return super().next() if self.at < len(self.data) // 2 else None


class Basin:
    """A drain of ``length`` bytes with room for ``size`` at a time, emptied by a thread."""

    def __init__(self, length: int, *, size: int = 50_000, rest: bool = False) -> None:
        self.data = bytearray()
        self.length = length
        self.buffer = memoryview(bytearray(size))
        self.rest = rest
        self.full = False
        self.fails = -1
        self.begun = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.wake: Callable[[], None] = lambda: None

    def attach(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def room(self) -> memoryview | None:
        return None if self.full else self.buffer

    def took(self, count: int) -> None:
        assert 0 < count <= len(self.buffer)
        self.data += self.buffer[:count]
        self.loop.call_soon_threadsafe(self.begun.set)
        if 0 <= self.fails <= len(self.data):
            raise Malformed("not a number")
        if self.rest:
            self.full = True
            threading.Timer(0.005, self.empty).start()

    def empty(self) -> None:
        self.full = False
        self.wake()


def into(basin: Basin) -> Callable[[PeerId, bytes, Incoming], Awaitable[bytes]]:
    async def handler(peer: PeerId, header: bytes, body: Incoming) -> bytes:
        await body.into(basin)
        return str(body.length).encode()

    return handler


@pytest.mark.parametrize("length", [0, 1, 5_000_001])
@pytest.mark.parametrize("rest", [False, True])
async def test_a_feed_arrives_in_a_drain(
    pair: tuple[Transport, Transport], length: int, rest: bool
) -> None:
    a, b = pair
    data = os.urandom(length)
    pushed, pulled = Basin(length, size=500_000, rest=rest), Basin(length, size=500_000, rest=rest)
    b.on_push("take", into(pushed), max_length=length)

    async def handler(peer: PeerId, header: bytes) -> Feed:
        return Source(data, pause=20 if rest else 0)

    b.on_pull("give", handler)
    feed = Source(data, pause=20 if rest else 0)
    assert await a.push(b.peer_id, "take", b"", feed, timeout=SOON) == str(length).encode()
    assert pushed.data == data
    async with a.pull(b.peer_id, "give", b"", max_length=length, timeout=SOON) as incoming:
        assert incoming.length == length
        await incoming.into(pulled)
    assert pulled.data == data


async def test_whole_buffers_go_and_come(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    floats = array.array("f", range(300_000))
    target = array.array("f", bytes(4 * len(floats)))
    wrong: list[Exception] = []

    async def take(peer: PeerId, header: bytes, body: Incoming) -> bytes:
        try:
            await read_into(body, bytearray(5))
        except Malformed as error:
            wrong.append(error)
        await read_into(body, memoryview(target))
        return b""

    b.on_push("take", take, max_length=2_000_000)
    head, rest = memoryview(floats)[:1000], memoryview(floats)[1000:]
    await a.push(b.peer_id, "take", b"", BufferFeed(head, b"", rest), timeout=SOON)
    assert target == floats
    assert len(wrong) == 1


@pytest.mark.parametrize("wrong", [{"short": 1}, {"short": 300_000}, {"extra": 1}])
async def test_a_feed_of_another_length_never_completes(
    pair: tuple[Transport, Transport], wrong: dict[str, int]
) -> None:
    a, b = pair
    basin = Basin(500_000)
    ended = asyncio.Event()
    begun = complete = False

    async def take(peer: PeerId, header: bytes, body: Incoming) -> bytes:
        nonlocal begun, complete
        begun = True
        try:
            await body.into(basin)
            complete = True
        finally:
            ended.set()
        return b""

    b.on_push("take", take, max_length=1_000_000)
    b.on_call("echo", echo)
    feed = Source(os.urandom(500_000), size=450_000, **wrong)
    with pytest.raises(LocalProtocolError):
        await within(a.push(b.peer_id, "take", b"", feed, timeout=SOON))
    if begun:
        await within(ended.wait())
    assert not complete
    assert await a.call(b.peer_id, "echo", b"", timeout=SOON)


async def test_what_a_feed_raises_is_the_pushs_own(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    basin = Basin(500_000)
    b.on_push("take", into(basin), max_length=1_000_000)

    class Broken(Source):
        def next(self) -> Buffer | None:
            if self.at > 200_000:
                raise ValueError("the disk is gone")
            return super().next()

    with pytest.raises(ValueError, match="the disk is gone"):
        await within(a.push(b.peer_id, "take", b"", Broken(bytes(500_000)), timeout=SOON))
    assert await a.push(b.peer_id, "take", b"", Source(bytes(9)), timeout=SOON) == b"9"


async def test_what_a_drain_raises_is_what_into_raises(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    basin = Basin(5_000_000)
    basin.fails = 100_000
    b.on_push("take", into(basin), max_length=5_000_000)
    with pytest.raises(RemoteRefused) as error:
        await within(a.push(b.peer_id, "take", b"", Source(bytes(5_000_000)), timeout=SOON))
    assert (error.value.code, error.value.detail) == ("protocol", "not a number")
    assert len(basin.data) < 200_000

    async def give(peer: PeerId, header: bytes) -> Feed:
        return Source(bytes(5_000_000))

    b.on_pull("give", give)
    pulled = Basin(5_000_000)
    pulled.fails = 100_000
    with pytest.raises(Malformed, match="not a number"):
        async with a.pull(b.peer_id, "give", b"", max_length=5_000_000, timeout=SOON) as incoming:
            await incoming.into(pulled)
    basin.fails = -1
    basin.data.clear()
    assert await a.push(b.peer_id, "take", b"", Source(bytes(9)), timeout=SOON) == b"9"


async def test_a_feed_that_never_wakes_stalls(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    ended = asyncio.Event()

    async def take(peer: PeerId, header: bytes, body: Incoming) -> bytes:
        try:
            await body.into(Basin(500_000))
        finally:
            ended.set()
        return b""

    async def give(peer: PeerId, header: bytes) -> Feed:
        return Stuck(bytes(500_000))

    b.on_push("take", take, max_length=500_000)
    b.on_pull("give", give)
    with pytest.raises(TransferStalled):
        await within(a.push(b.peer_id, "take", b"", Stuck(bytes(500_000)), timeout=0.3), 3)
    await within(ended.wait())
    with pytest.raises(TransferStalled):
        async with a.pull(b.peer_id, "give", b"", max_length=500_000, timeout=0.3) as incoming:
            await within(incoming.into(Basin(500_000)), 3)


async def test_a_drain_without_room_holds_the_sender_back(
    pair: tuple[Transport, Transport],
) -> None:
    a, b = pair
    basin = Basin(60_000_000, size=1000, rest=True)
    basin.empty = lambda: None  # type: ignore[method-assign]
    b.on_push("take", into(basin), max_length=60_000_000)
    feed = Source(os.urandom(60_000_000))
    with pytest.raises(TransferStalled):
        await within(a.push(b.peer_id, "take", b"", feed, timeout=0.5), 5)
    assert len(basin.data) == 1000
    assert feed.at < 40_000_000


async def test_after_a_cancelled_push_its_feed_is_left_alone(
    pair: tuple[Transport, Transport],
) -> None:
    a, b = pair
    basin = Basin(50_000_000, rest=True)
    ended = asyncio.Event()

    async def take(peer: PeerId, header: bytes, body: Incoming) -> bytes:
        try:
            await body.into(basin)
        finally:
            ended.set()
        return b""

    b.on_push("take", take, max_length=50_000_000)
    feed = Source(os.urandom(50_000_000))
    task = asyncio.ensure_future(a.push(b.peer_id, "take", b"", feed, timeout=SOON))
    await within(basin.begun.wait())
    task.cancel()
    await within(asyncio.wait([task]))
    assert task.cancelled()
    asked = feed.asked
    feed.wake()
    await within(ended.wait())
    assert feed.asked == asked
    assert len(basin.data) < 50_000_000


async def test_after_a_cancelled_into_its_drain_is_left_alone(
    pair: tuple[Transport, Transport],
) -> None:
    a, b = pair

    async def give(peer: PeerId, header: bytes) -> Feed:
        return Source(os.urandom(50_000_000))

    b.on_pull("give", give)
    basin = Basin(50_000_000)

    async def pull() -> None:
        async with a.pull(b.peer_id, "give", b"", max_length=50_000_000, timeout=SOON) as incoming:
            await incoming.into(basin)

    task = asyncio.ensure_future(pull())
    await within(basin.begun.wait())
    task.cancel()
    await within(asyncio.wait([task]))
    assert task.cancelled()
    size = len(basin.data)
    basin.wake()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(basin.data) == size < 50_000_000


async def test_posted_calls_run_in_order_beside_no_feed(
    pair: tuple[Transport, Transport],
) -> None:
    a, b = pair
    seen: list[int] = []
    threads: set[int] = set()
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    b.on_push("take", into(Basin(10)), max_length=10)

    class Telling(Source):
        def next(self) -> Buffer | None:
            threads.add(threading.get_ident())
            return super().next()

    def note(number: int) -> None:
        threads.add(threading.get_ident())
        seen.append(number)

    await a.push(b.peer_id, "take", b"", Telling(bytes(10)), timeout=SOON)
    for number in range(100):
        a.post(partial(note, number))

    def finish() -> None:
        loop.call_soon_threadsafe(done.set)

    a.post(finish)
    await within(done.wait())
    assert seen == list(range(100))
    assert len(threads) == 1
