"""Connections that died without a word, as where a router has forgotten them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from http_kit import QUICK, A, B, address, echo, fake, take, wait_for

from protocols.bodies import BufferFeed, read_into
from protocols.errors import TransferStalled
from protocols.http import client as http_client
from protocols.http.transport import HttpTransport
from protocols.identity import PeerId
from protocols.lanes import client as lane_client
from protocols.tasks import beside
from protocols.transport import Buffer, Feed, Incoming

MANY = 12  # connections
SOON = 0.3  # seconds until a call is given up


class Router:
    """Between callers and a node. What it has forgotten goes nowhere, and nobody is told."""

    def __init__(self, target: HttpTransport) -> None:
        assert target.listening is not None
        self._target = target.listening
        self._forgotten: list[asyncio.Event] = []  # by connection, in their order

    @property
    def opened(self) -> int:
        """How many connections there have been."""
        return len(self._forgotten)

    def forget(self, *which: int) -> None:
        """These connections, or all that there are."""
        for number in which or range(self.opened):
            self._forgotten[number].set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        forgotten = asyncio.Event()
        self._forgotten.append(forgotten)
        theirs, ours = await asyncio.open_connection(*self._target)
        try:
            async with beside(_pass_on(theirs, writer, forgotten)):
                await _pass_on(reader, ours, forgotten)
        finally:
            ours.transport.abort()


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, forgotten: asyncio.Event
) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            if not forgotten.is_set():
                writer.write(data)


class Held:
    """Handlers that answer when they are told to, so that each call has a connection of its own."""

    def __init__(self, transport: HttpTransport) -> None:
        self.begun = 0
        self._gates: dict[bytes, asyncio.Event] = {}
        transport.on_call("echo", echo)
        transport.on_call("held", self.call)
        transport.on_push("take", take, max_length=1000)
        transport.on_push("held", self.push, max_length=1000)
        transport.on_pull("give", _give)

    def gate(self, name: bytes) -> asyncio.Event:
        return self._gates.setdefault(name, asyncio.Event())

    async def call(self, peer: PeerId, body: bytes) -> bytes:
        self.begun += 1
        await self.gate(body).wait()
        return body

    async def push(self, peer: PeerId, header: bytes, body: Incoming) -> bytes:
        self.begun += 1
        await self.gate(b"").wait()
        return await take(peer, header, body)


async def _give(peer: PeerId, header: bytes) -> Feed:
    return BufferFeed(bytes(9))


Between = tuple[HttpTransport, Router, Held]
Use = Callable[[HttpTransport, float], Awaitable[None]]


@pytest.fixture
async def between() -> AsyncIterator[Between]:
    """A caller that has the router's address for A's, the router, and A's handlers."""
    async with HttpTransport(A, listen="127.0.0.1:0", limits=QUICK) as a:
        held, router = Held(a), Router(a)
        async with fake(router.serve, None) as where, HttpTransport(B, limits=QUICK) as b:
            assert where != address(a)
            b.book.add(A.peer_id, where)
            yield b, router, held


@asynccontextmanager
async def all_at_once(held: Held, go_on: asyncio.Event) -> AsyncIterator[asyncio.TaskGroup]:
    """What is begun in the block is under way at one time."""
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        yield group
        await wait_for(lambda: held.begun == MANY)
        go_on.set()


async def many_calls(b: HttpTransport, held: Held) -> None:
    async with all_at_once(held, held.gate(b"")) as group:
        for _ in range(MANY):
            group.create_task(b.call(A.peer_id, "held", b"", timeout=20))


async def many_lanes(b: HttpTransport, held: Held) -> None:
    async with all_at_once(held, held.gate(b"")) as group:
        for _ in range(MANY):
            group.create_task(b.push(A.peer_id, "held", b"", BufferFeed(b"x"), timeout=20))


async def one_call(b: HttpTransport, timeout: float) -> None:
    assert await b.call(A.peer_id, "echo", b"x", timeout=timeout) == b"x"


async def one_push(b: HttpTransport, timeout: float) -> None:
    assert await b.push(A.peer_id, "take", b"", BufferFeed(bytes(9)), timeout=timeout) == b"9"


async def one_pull(b: HttpTransport, timeout: float) -> None:
    async with b.pull(A.peer_id, "give", b"", max_length=9, timeout=timeout) as incoming:
        await read_into(incoming, bytearray(9))


def a_while_is(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for module in (http_client, lane_client):
        monkeypatch.setattr(module, "SHORT", seconds)


@pytest.mark.parametrize("what", [one_push, one_pull, one_call])
@pytest.mark.parametrize("first", [one_call, one_push, one_pull])
async def test_of_many_connections_that_died_one_is_tried(
    between: Between, first: Use, what: Use
) -> None:
    """Also where it was one for calls, and the next is one for bodies."""
    b, router, held = between
    await many_calls(b, held)
    held.begun = 0
    held.gate(b"").clear()
    await many_lanes(b, held)
    assert router.opened == 2 * MANY
    router.forget()
    with pytest.raises(TransferStalled):
        await first(b, SOON)
    await what(b, 10)
    assert router.opened == 2 * MANY + 1


async def left(between: Between, what: Use) -> tuple[HttpTransport, Router]:
    """A router has forgotten all connections that were kept, and a caller has left over it."""
    b, router, held = between
    await (many_calls if what is one_call else many_lanes)(b, held)
    router.forget()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(SOON):
            await what(b, 20)
    return b, router


@pytest.mark.parametrize("what", [one_push, one_pull, one_call])
async def test_a_caller_who_leaves_after_a_while_has_found_it_out_too(
    between: Between, what: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_while_is(monkeypatch, SOON / 2)
    b, router = await left(between, what)
    await what(b, 10)
    assert router.opened == MANY + 1


@pytest.mark.parametrize("what", [one_push, one_pull, one_call])
async def test_a_caller_who_leaves_at_once_has_found_out_nothing(
    between: Between, what: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_while_is(monkeypatch, 3600)
    b, router = await left(between, what)
    with pytest.raises(TransferStalled):
        await what(b, SOON)
    await what(b, 10)
    assert router.opened == MANY + 1


class Waiting:
    """A body that has only its beginning for now."""

    length = 100

    def __init__(self) -> None:
        self._begun = False

    def attach(self, wake: Callable[[], None]) -> None:
        """Nothing more comes."""

    def next(self) -> Buffer | None:
        if self._begun:
            return None
        self._begun = True
        return bytes(9)


@pytest.mark.parametrize(
    ("upload", "body"),
    [(1e6, lambda: BufferFeed(bytes(5_000_000))), (1e6, Waiting), (None, Waiting)],
)
async def test_a_body_that_is_cut_short_says_nothing_of_others(
    body: Callable[[], Feed], upload: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no answer before its end, however well it was taken."""
    a_while_is(monkeypatch, SOON / 2)
    async with HttpTransport(A, listen="127.0.0.1:0", limits=QUICK) as a:
        held = Held(a)
        a.on_push("take", take, max_length=5_000_000)
        async with HttpTransport(B, limits=QUICK, max_upload=upload) as b:
            b.book.add(A.peer_id, address(a))
            await many_lanes(b, held)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(SOON):
                    await b.push(A.peer_id, "take", b"", body(), timeout=20)
            held.begun = 0
            held.gate(b"").clear()
            await many_lanes(b, held)
            assert a.stats.connections == MANY + 1


async def test_a_connection_that_was_used_meanwhile_stays(between: Between) -> None:
    """The other end is slow, and not gone."""
    b, router, held = between
    await many_calls(b, held)
    held.begun = 0
    held.gate(b"").clear()
    async with asyncio.TaskGroup() as group:
        slow = group.create_task(_stalls(b))
        await wait_for(lambda: held.begun == 1)
        await one_call(b, 10)
        await slow
    await one_call(b, 10)
    assert router.opened == MANY


async def _stalls(b: HttpTransport) -> None:
    with pytest.raises(TransferStalled):
        await b.call(A.peer_id, "held", b"", timeout=SOON)


async def test_a_new_connection_without_an_answer_says_nothing_of_others(between: Between) -> None:
    b, router, held = between
    async with asyncio.TaskGroup() as group:
        group.create_task(b.call(A.peer_id, "held", b"", timeout=20))
        await wait_for(lambda: held.begun == 1)
        await one_push(b, 10)
        with pytest.raises(TransferStalled):
            await b.call(A.peer_id, "held", b"never", timeout=SOON)
        held.gate(b"").set()
    await one_push(b, 10)
    assert router.opened == 3


async def test_the_connection_that_served_last_serves_next(between: Between) -> None:
    b, router, held = between
    async with asyncio.TaskGroup() as group:
        calls = []
        for number, name in enumerate((b"first", b"last"), 1):
            calls.append(group.create_task(b.call(A.peer_id, "held", name, timeout=20)))
            await wait_for(lambda number=number: held.begun == number)
        for name, call in zip((b"first", b"last"), calls, strict=True):
            held.gate(name).set()
            await call
    router.forget(0)
    await one_call(b, 10)
    await one_call(b, 10)
    assert router.opened == 2
