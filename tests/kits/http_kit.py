"""What the tests of the HTTP transport share: two ends, and servers that answer by hand."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from protocols.bodies import read_into
from protocols.connections import tls
from protocols.http.transport import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.limits import Limits
from protocols.transport import Buffer, Incoming

A, B, C = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
QUICK = Limits(grace=0.1)
NOBODY = "127.0.0.1:1"  # listens there, and no test beside this one is given a port so low
Connection = AbstractAsyncContextManager[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def address(transport: HttpTransport) -> str:
    assert transport.listening is not None
    host, port = transport.listening
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@asynccontextmanager
async def two(
    limits: Limits = QUICK, *, known: bool = True
) -> AsyncIterator[tuple[HttpTransport, HttpTransport]]:
    """A listens, B dials only; ``known``: and knows where A is."""
    async with (
        HttpTransport(A, listen="127.0.0.1:0", limits=limits) as a,
        HttpTransport(B, limits=limits) as b,
    ):
        if known:
            b.book.add(a.peer_id, address(a))
        a.on_call("echo", echo)
        yield a, b


async def echo(peer: PeerId, body: bytes) -> bytes:
    return body


async def take(peer: PeerId, header: bytes, body: Incoming) -> bytes:
    """Read all of it and say how much it was."""
    target = bytearray(body.length)
    await read_into(body, target)
    return str(len(target)).encode()


@asynccontextmanager
async def fake(serve: Serve, context: ssl.SSLContext | None) -> AsyncIterator[str]:
    """A server of the test's own; yields its address."""

    async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(quiet, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that says nothing."""
    await reader.read()


async def ssh(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that speaks first, and something else."""
    writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    await reader.read()


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that hangs up at the first byte."""
    await reader.read(1)


async def throw(connection: Connection, data: bytes) -> None:
    """Send bytes and take what comes back, until the other end has had enough."""
    async with connection as (reader, writer), asyncio.timeout(10):
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            while await reader.read(10_000):
                pass


async def undisturbed(
    a: HttpTransport, b: HttpTransport, *trouble: Coroutine[Any, Any, None]
) -> None:
    """Calls of ``b`` are answered by ``a`` as long as there is trouble."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in trouble]
        while not all(task.done() for task in tasks):
            assert await b.call(a.peer_id, "echo", b"x", timeout=5) == b"x"


class Hold:
    """A handler that begins and does not end by itself; ``whole``: it reads the body before."""

    def __init__(self, *, whole: bool = False) -> None:
        self.begun, self.ended = asyncio.Event(), asyncio.Event()
        self.whole = whole

    async def push(self, peer: PeerId, header: bytes, body: Incoming) -> bytes:
        if self.whole:
            await read_into(body, bytearray(body.length))
        return await self.call(peer, header)

    async def call(self, peer: PeerId, body: bytes) -> bytes:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        return b""


@asynccontextmanager
async def raw(
    target: HttpTransport, identity: Identity | None = C
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to the port: through TLS as ``identity``, or bare."""
    assert target.listening is not None
    context = tls.client_context(identity) if identity else None
    reader, writer = await asyncio.open_connection(
        *target.listening,
        ssl=context,
        server_hostname=tls.server_name(target.peer_id) if context else None,
    )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def post(path: str, *headers: str, body: bytes = b"", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {size}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def request(reader: asyncio.StreamReader) -> bytes:
    """Read one request with its body; returns the request line."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if b"content-length" in line
    )
    await reader.readexactly(length)
    return head.split(b"\r\n")[0]


def answer(body: bytes, *headers: str, status: str = "200 OK", length: int = -1) -> bytes:
    size = len(body) if length < 0 else length
    lines = [f"HTTP/1.1 {status}", "Server: atoll/1", f"Content-Length: {size}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def wait_for(condition: Callable[[], bool]) -> None:
    """For what has no event to wait on; bounded."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("it never came true")


async def chunks_of(data: bytes | memoryview) -> AsyncIterator[Buffer]:
    view = memoryview(data)
    for start in range(0, len(view), 1 << 20):
        yield view[start : start + (1 << 20)]
