"""What every transport promises, held against each of them.

A new transport joins by adding a factory to ``NETWORKS``.
"""

from __future__ import annotations

import array
import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any

import pytest

from protocols.bodies import BufferFeed, read_into
from protocols.errors import (
    IdentityMismatch,
    LocalProtocolError,
    Malformed,
    RemoteRefused,
    TransferStalled,
    TransportError,
    Unreachable,
    Why,
)
from protocols.http import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.limits import Limits
from protocols.memory import MemoryNetwork
from protocols.memory_network import Link
from protocols.transport import (
    MAX_CALL_BYTES,
    MAX_HEADER_BYTES,
    Buffer,
    Feed,
    Incoming,
    Outgoing,
    Transport,
)

SOON = 10.0  # seconds; nothing here should take that long


class HttpNet:
    """Real transports on loopback; every one knows where the earlier ones live."""

    def __init__(self, *, tls: bool) -> None:
        self.tls = tls
        self.stack = AsyncExitStack()
        self.members: list[HttpTransport] = []

    async def join(self) -> Transport:
        transport = HttpTransport(
            Identity.generate(), listen="127.0.0.1:0", tls=self.tls, limits=Limits(grace=0.2)
        )
        await self.stack.enter_async_context(transport)
        for other in self.members:
            other.book.add(transport.peer_id, self.address(transport))
            transport.book.add(other.peer_id, self.address(other))
        self.members.append(transport)
        return transport

    def address(self, transport: Any) -> str:
        host, port = transport.listening
        return f"{host}:{port}"

    async def aclose(self) -> None:
        await self.stack.aclose()


class MemoryNet:
    def __init__(self) -> None:
        self.network = MemoryNetwork(seed=1, link=Link(latency=0.001))
        self.members: list[Transport] = []

    async def join(self) -> Transport:
        transport: Transport = self.network.join(Identity.generate().peer_id)
        self.members.append(transport)
        return transport

    def address(self, transport: Any) -> str:
        address: str = transport.address
        return address

    async def aclose(self) -> None:
        for transport in self.members:
            await transport.aclose()


Net = HttpNet | MemoryNet
NETWORKS: dict[str, Callable[[], Net]] = {
    "tls": lambda: HttpNet(tls=True),
    "plain": lambda: HttpNet(tls=False),
    "memory": MemoryNet,
}


@pytest.fixture(params=NETWORKS)
async def net(request: pytest.FixtureRequest) -> AsyncIterator[Net]:
    network = NETWORKS[request.param]()
    yield network
    await asyncio.wait_for(network.aclose(), SOON)


@pytest.fixture
async def pair(net: Net) -> tuple[Transport, Transport]:
    return await net.join(), await net.join()


async def echo(peer: PeerId, body: bytes) -> bytes:
    return peer.encode() + b":" + body


def outgoing(data: bytes, size: int = 100_000) -> Outgoing:
    async def chunks() -> AsyncIterator[Buffer]:
        for start in range(0, len(data), size):
            yield memoryview(data)[start : start + size]

    return Outgoing(len(data), chunks())


class Sink:
    """A push handler that keeps what it gets, and says how it ended."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.header = b""
        self.peer = ""
        self.length = -1
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self.complete = False

    async def __call__(self, peer: PeerId, header: bytes, body: Incoming) -> bytes:
        self.peer, self.header, self.length = peer, header, body.length
        try:
            async for chunk in body:
                self.begun.set()
                self.data += chunk
            self.complete = True
            return b"taken"
        finally:
            self.ended.set()


async def endless(closed: asyncio.Event, data: bytes = b"") -> AsyncIterator[Buffer]:
    """Some bytes, and then nothing for ever."""
    try:
        if data:
            yield data
        await asyncio.Event().wait()
        yield b""
    finally:
        closed.set()


async def within(awaitable: Awaitable[Any], seconds: float = SOON) -> Any:
    return await asyncio.wait_for(awaitable, seconds)


# --- calls ------------------------------------------------------------------------------------


async def test_a_call_carries_the_callers_identity(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    b.on_call("echo", echo)
    assert await a.call(b.peer_id, "echo", b"hello", timeout=SOON) == f"{a.peer_id}:hello".encode()
    a.on_call("echo", echo)
    assert await b.call(a.peer_id, "echo", b"", timeout=SOON) == f"{b.peer_id}:".encode()


async def test_parallel_calls_get_their_own_answers(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    b.on_call("echo", echo)
    bodies = [str(i).encode() for i in range(32)]
    replies = await asyncio.gather(
        *(a.call(b.peer_id, "echo", body, timeout=SOON) for body in bodies)
    )
    assert replies == [a.peer_id.encode() + b":" + body for body in bodies]


async def test_unknown_names_are_refused(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    with pytest.raises(RemoteRefused) as call:
        await a.call(b.peer_id, "nobody", b"", timeout=SOON)
    with pytest.raises(RemoteRefused) as push:
        await a.push(b.peer_id, "nobody", b"", outgoing(b"x" * 3_000_000), timeout=SOON)
    with pytest.raises(RemoteRefused) as pull:
        async with a.pull(b.peer_id, "nobody", b"", max_length=10, timeout=SOON):
            pytest.fail("an unknown name was served")
    assert [e.value.code for e in (call, push, pull)] == ["unknown"] * 3


@pytest.mark.parametrize(
    ("raised", "code", "detail"),
    [
        (RemoteRefused("busy", "come back"), "busy", "come back"),
        (Malformed("not a greeting"), "protocol", "not a greeting"),
        (RuntimeError("password 1234"), "internal", ""),
    ],
)
async def test_what_a_handler_raises_reaches_the_caller_as_a_code(
    pair: tuple[Transport, Transport], raised: Exception, code: str, detail: str
) -> None:
    a, b = pair

    async def call(peer: PeerId, body: bytes) -> bytes:
        raise raised

    async def push(peer: PeerId, header: bytes, body: Incoming) -> bytes:
        async for _ in body:
            break
        raise raised

    async def pull(peer: PeerId, header: bytes) -> Outgoing:
        raise raised

    b.on_call("fail", call)
    b.on_push("fail", push, max_length=10_000_000)
    b.on_pull("fail", pull)
    b.on_call("echo", echo)
    with pytest.raises(RemoteRefused) as from_call:
        await a.call(b.peer_id, "fail", b"", timeout=SOON)
    with pytest.raises(RemoteRefused) as from_push:
        await a.push(b.peer_id, "fail", b"", outgoing(os.urandom(5_000_000)), timeout=SOON)
    with pytest.raises(RemoteRefused) as from_pull:
        async with a.pull(b.peer_id, "fail", b"", max_length=10, timeout=SOON):
            pytest.fail("a failed handler served")
    for error in (from_call, from_push, from_pull):
        assert (error.value.code, error.value.detail) == (code, detail)
    assert await a.call(b.peer_id, "echo", b"", timeout=SOON)  # the link survives


async def test_large_calls_are_refused_unseen(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    seen: list[int] = []

    async def count(peer: PeerId, body: bytes) -> bytes:
        seen.append(len(body))
        return b""

    b.on_call("small", count, max_body=100)
    b.on_call("large", count, max_body=300_000)
    with pytest.raises(RemoteRefused) as error:
        await a.call(b.peer_id, "small", b"x" * 101, timeout=SOON)
    assert error.value.code == "too_large"
    await a.call(b.peer_id, "small", b"x" * 100, timeout=SOON)
    await a.call(b.peer_id, "large", b"x" * 300_000, timeout=SOON)
    assert seen == [100, 300_000]


async def test_a_larger_reply_than_allowed_is_refused(pair: tuple[Transport, Transport]) -> None:
    a, b = pair

    async def talk(peer: PeerId, body: bytes) -> bytes:
        return bytes(MAX_CALL_BYTES + 1)

    b.on_call("talk", talk)
    with pytest.raises(RemoteRefused) as error:
        await a.call(b.peer_id, "talk", b"", timeout=SOON)
    assert error.value.code == "too_large"
    reply = await a.call(b.peer_id, "talk", b"", timeout=SOON, max_reply=MAX_CALL_BYTES + 1)
    assert len(reply) == MAX_CALL_BYTES + 1


async def test_a_call_without_an_answer_ends_in_time(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    cancelled = asyncio.Event()

    async def sleep(peer: PeerId, body: bytes) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    b.on_call("sleep", sleep)
    b.on_call("echo", echo)
    with pytest.raises(TransferStalled):
        await within(a.call(b.peer_id, "sleep", b"", timeout=0.2), 3)
    await within(cancelled.wait())  # nobody waits for that handler any more
    assert await a.call(b.peer_id, "echo", b"", timeout=SOON)


async def test_a_peer_without_an_address_is_unreachable(pair: tuple[Transport, Transport]) -> None:
    a, _ = pair
    with pytest.raises(Unreachable) as error:
        await a.call(Identity.generate().peer_id, "echo", b"", timeout=SOON)
    assert error.value.why is Why.NO_ADDRESS


async def test_a_peer_that_has_gone_is_unreachable(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    b.on_call("echo", echo)
    await a.call(b.peer_id, "echo", b"", timeout=SOON)
    await b.aclose()
    with pytest.raises(Unreachable):
        await a.call(b.peer_id, "echo", b"", timeout=SOON)


# --- pushes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 70_000, 5_000_001])
async def test_a_push_arrives_whole(pair: tuple[Transport, Transport], length: int) -> None:
    a, b = pair
    sink = Sink()
    b.on_push("take", sink, max_length=length)
    data = os.urandom(length)
    assert await a.push(b.peer_id, "take", b"head", outgoing(data), timeout=SOON) == b"taken"
    assert sink.peer == a.peer_id
    assert (sink.header, sink.length) == (b"head", length)
    assert sink.data == data


async def test_chunks_of_any_shape_are_sent(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    sink = Sink()
    b.on_push("take", sink, max_length=10_000_000)
    floats = array.array("f", range(200_000))

    async def chunks() -> AsyncIterator[Buffer]:
        yield b""
        yield b"bytes"
        yield bytearray(b"bytearray")
        yield memoryview(floats)

    body = Outgoing(14 + 800_000, chunks())
    await a.push(b.peer_id, "take", bytes(MAX_HEADER_BYTES), body, timeout=SOON)
    assert sink.data == b"bytesbytearray" + floats.tobytes()
    assert sink.header == bytes(MAX_HEADER_BYTES)


async def test_parallel_pushes_do_not_mix(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    sinks = [Sink() for _ in range(4)]
    for number, sink in enumerate(sinks):
        (a, b)[number % 2].on_push(f"take{number}", sink, max_length=4_000_000)
    data = [os.urandom(4_000_000) for _ in sinks]
    async with asyncio.TaskGroup() as group:
        for number, body in enumerate(data):
            sender, receiver = (b, a) if number % 2 == 0 else (a, b)
            group.create_task(
                sender.push(receiver.peer_id, f"take{number}", b"", outgoing(body), timeout=SOON)
            )
    assert [bytes(sink.data) for sink in sinks] == data


async def test_a_long_push_is_refused_before_its_handler_runs(
    pair: tuple[Transport, Transport],
) -> None:
    a, b = pair
    sink = Sink()
    b.on_push("take", sink, max_length=1000)
    for length in (1001, 3_000_000):
        with pytest.raises(RemoteRefused) as error:
            await a.push(b.peer_id, "take", b"", outgoing(bytes(length)), timeout=SOON)
        assert error.value.code == "too_large"
    assert sink.length == -1


async def test_a_header_over_the_bound_is_our_own_mistake(
    pair: tuple[Transport, Transport],
) -> None:
    a, b = pair
    header = bytes(MAX_HEADER_BYTES + 1)
    with pytest.raises(LocalProtocolError):
        await a.push(b.peer_id, "take", header, outgoing(b""), timeout=SOON)
    with pytest.raises(LocalProtocolError):
        async with a.pull(b.peer_id, "give", header, max_length=1, timeout=SOON):
            pytest.fail("an oversized header was sent")


@pytest.mark.parametrize("missing", [-1, 1])
async def test_a_body_that_does_not_add_up_never_completes(
    pair: tuple[Transport, Transport], missing: int
) -> None:
    a, b = pair
    sink = Sink()
    b.on_push("take", sink, max_length=1_000_000)
    data = outgoing(bytes(500_000))
    with pytest.raises(LocalProtocolError):
        await a.push(b.peer_id, "take", b"", Outgoing(500_000 + missing, data.chunks), timeout=SOON)
    if sink.length >= 0:
        await within(sink.ended.wait())
    assert not sink.complete


async def test_an_error_of_the_bodys_source_is_the_pushs_own(
    pair: tuple[Transport, Transport],
) -> None:
    a, b = pair
    sink = Sink()
    b.on_push("take", sink, max_length=1_000_000)

    async def chunks() -> AsyncIterator[Buffer]:
        yield bytes(100_000)
        await sink.begun.wait()
        raise ValueError("the disk is gone")

    with pytest.raises(ValueError, match="the disk is gone"):
        await within(a.push(b.peer_id, "take", b"", Outgoing(900_000, chunks()), timeout=SOON))
    await within(sink.ended.wait())
    assert not sink.complete


async def test_a_push_without_progress_stalls(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    sink, closed = Sink(), asyncio.Event()
    b.on_push("take", sink, max_length=1_000_000)
    body = Outgoing(900_000, endless(closed, bytes(100_000)))
    with pytest.raises(TransferStalled):
        await within(a.push(b.peer_id, "take", b"", body, timeout=0.2), 3)
    assert closed.is_set()
    await within(sink.ended.wait())
    assert not sink.complete


async def test_a_slow_push_with_progress_does_not_stall(
    pair: tuple[Transport, Transport],
) -> None:
    a, b = pair
    sink = Sink()
    b.on_push("take", sink, max_length=1_000_000)

    async def chunks() -> AsyncIterator[Buffer]:
        for _ in range(12):
            await asyncio.sleep(0.1)  # a slow source, not a wait
            yield bytes(1000)

    body = Outgoing(12_000, chunks())
    assert await a.push(b.peer_id, "take", b"", body, timeout=1.0) == b"taken"


async def test_a_handler_may_answer_before_the_body_ends(
    pair: tuple[Transport, Transport],
) -> None:
    a, b = pair

    async def enough(peer: PeerId, header: bytes, body: Incoming) -> bytes:
        return b"enough"

    b.on_push("take", enough, max_length=10_000_000)
    b.on_call("echo", echo)
    data = outgoing(bytes(5_000_000))
    assert await within(a.push(b.peer_id, "take", b"", data, timeout=SOON)) == b"enough"
    assert await a.call(b.peer_id, "echo", b"", timeout=SOON)


async def test_a_cancelled_push_ends_at_both_ends(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    sink, closed = Sink(), asyncio.Event()
    b.on_push("take", sink, max_length=1_000_000)
    b.on_call("echo", echo)
    body = Outgoing(900_000, endless(closed, bytes(100_000)))
    task = asyncio.ensure_future(a.push(b.peer_id, "take", b"", body, timeout=SOON))
    await within(sink.begun.wait())
    task.cancel()
    await within(asyncio.wait([task]))
    assert task.cancelled()
    assert closed.is_set()
    await within(sink.ended.wait())
    assert not sink.complete
    assert await a.call(b.peer_id, "echo", b"", timeout=SOON)


async def collect(pull: AbstractAsyncContextManager[Incoming], into: bytearray) -> int:
    """Read a pull to its end; returns the announced length."""
    async with pull as incoming:
        async for chunk in incoming:
            into += chunk
        return incoming.length


# --- pulls ------------------------------------------------------------------------------------


def give(data: bytes) -> Callable[[PeerId, bytes], Awaitable[Outgoing]]:
    async def handler(peer: PeerId, header: bytes) -> Outgoing:
        return outgoing(peer.encode() + header + data)

    return handler


@pytest.mark.parametrize("length", [0, 1, 5_000_001])
async def test_a_pull_arrives_whole(pair: tuple[Transport, Transport], length: int) -> None:
    a, b = pair
    data = os.urandom(length)
    b.on_pull("give", give(data))
    expected = a.peer_id.encode() + b"head" + data
    got = bytearray()
    pull = a.pull(b.peer_id, "give", b"head", max_length=len(expected), timeout=SOON)
    assert await collect(pull, got) == len(expected)
    assert got == expected


async def test_an_empty_pull_has_no_chunks(pair: tuple[Transport, Transport]) -> None:
    a, b = pair

    async def nothing(peer: PeerId, header: bytes) -> Outgoing:
        return outgoing(b"")

    b.on_pull("give", nothing)
    async with a.pull(b.peer_id, "give", b"", max_length=0, timeout=SOON) as incoming:
        assert incoming.length == 0
        assert [chunk async for chunk in incoming] == []


async def test_a_pull_longer_than_wanted_is_refused(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    b.on_pull("give", give(bytes(3_000_000)))
    with pytest.raises(RemoteRefused) as error:
        async with a.pull(b.peer_id, "give", b"", max_length=1000, timeout=SOON):
            pytest.fail("an oversized body was let in")
    assert error.value.code == "too_large"


async def test_leaving_a_pull_early_stops_its_source(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    closed = asyncio.Event()

    async def handler(peer: PeerId, header: bytes) -> Outgoing:
        return Outgoing(900_000, endless(closed, bytes(100_000)))

    b.on_pull("give", handler)
    b.on_call("echo", echo)
    async with a.pull(b.peer_id, "give", b"", max_length=1_000_000, timeout=SOON) as incoming:
        async for _ in incoming:
            break
    await within(closed.wait())
    assert await a.call(b.peer_id, "echo", b"", timeout=SOON)


async def test_a_pull_without_progress_stalls(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    closed = asyncio.Event()

    async def handler(peer: PeerId, header: bytes) -> Outgoing:
        return Outgoing(900_000, endless(closed, bytes(100_000)))

    b.on_pull("give", handler)
    got = bytearray()
    with pytest.raises(TransferStalled):
        await collect(a.pull(b.peer_id, "give", b"", max_length=1_000_000, timeout=0.2), got)
    assert got == bytes(100_000)
    await within(closed.wait())


async def test_a_pull_whose_source_fails_breaks_off(pair: tuple[Transport, Transport]) -> None:
    a, b = pair

    async def chunks() -> AsyncIterator[Buffer]:
        yield bytes(100_000)
        raise ValueError("the disk is gone")

    async def handler(peer: PeerId, header: bytes) -> Outgoing:
        return Outgoing(900_000, chunks())

    b.on_pull("give", handler)
    got = bytearray()
    with pytest.raises(TransportError):
        await collect(a.pull(b.peer_id, "give", b"", max_length=1_000_000, timeout=SOON), got)
    assert len(got) <= 100_000


async def test_a_pulls_user_keeps_its_own_errors(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    b.on_pull("give", give(bytes(3_000_000)))

    async def user() -> None:
        async with a.pull(b.peer_id, "give", b"", max_length=4_000_000, timeout=SOON) as incoming:
            async for _ in incoming:
                raise KeyError("mine")

    with pytest.raises(KeyError):
        await user()


async def test_a_cancelled_pull_ends_at_both_ends(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    closed, begun = asyncio.Event(), asyncio.Event()

    async def handler(peer: PeerId, header: bytes) -> Outgoing:
        return Outgoing(900_000, endless(closed, bytes(100_000)))

    async def pull() -> None:
        async with a.pull(b.peer_id, "give", b"", max_length=1_000_000, timeout=SOON) as incoming:
            async for _ in incoming:
                begun.set()

    b.on_pull("give", handler)
    task = asyncio.ensure_future(pull())
    await within(begun.wait())
    task.cancel()
    await within(asyncio.wait([task]))
    assert task.cancelled()
    await within(closed.wait())


# --- links ------------------------------------------------------------------------------------


async def test_a_dial_tells_who_answers(net: Net) -> None:
    a, b = await net.join(), await net.join()
    assert await a.dial(net.address(b)) == b.peer_id
    assert await a.dial(net.address(b), b.peer_id) == b.peer_id
    stranger = Identity.generate().peer_id
    with pytest.raises(IdentityMismatch) as error:
        await a.dial(net.address(b), stranger)
    assert (error.value.expected, error.value.got) == (stranger, b.peer_id)


async def test_a_dial_to_nobody_is_refused(net: Net) -> None:
    a, b = await net.join(), await net.join()
    address = net.address(b)
    await b.aclose()
    with pytest.raises(Unreachable) as error:
        await a.dial(address)
    assert error.value.why is Why.REFUSED


async def test_closing_ends_open_transfers_within_two_seconds(
    pair: tuple[Transport, Transport],
) -> None:
    a, b = pair
    sink, closed = Sink(), asyncio.Event()
    b.on_push("take", sink, max_length=1_000_000)

    async def handler(peer: PeerId, header: bytes) -> Outgoing:
        return Outgoing(900_000, endless(closed, bytes(100_000)))

    async def pull(begun: asyncio.Event) -> None:
        async with a.pull(b.peer_id, "give", b"", max_length=1_000_000, timeout=SOON) as incoming:
            async for _ in incoming:
                begun.set()

    b.on_pull("give", handler)
    begun, source = asyncio.Event(), asyncio.Event()
    body = Outgoing(900_000, endless(source, bytes(100_000)))
    tasks = [
        asyncio.ensure_future(a.push(b.peer_id, "take", b"", body, timeout=SOON)),
        asyncio.ensure_future(pull(begun)),
    ]
    await within(asyncio.gather(sink.begun.wait(), begun.wait()))
    await within(b.aclose(), 2)
    assert sink.ended.is_set()
    assert closed.is_set()
    results = await within(asyncio.gather(*tasks, return_exceptions=True))
    assert all(isinstance(result, TransportError) for result in results), results
    await within(a.aclose(), 2)
    assert source.is_set()
    with pytest.raises(Unreachable):
        await a.call(b.peer_id, "echo", b"", timeout=SOON)


async def test_closing_twice_is_fine(pair: tuple[Transport, Transport]) -> None:
    a, _ = pair
    await a.aclose()
    await a.aclose()


# --- feeds and drains -------------------------------------------------------------------------


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
    feed = Source(bytes(60_000_000))
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
    feed = Source(bytes(50_000_000))
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
        return Source(bytes(50_000_000))

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
