"""What the tests of the HTTP transport share: two ends, and servers that answer by hand."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from protocols.bodies import read_into
from protocols.http import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.limits import Limits
from protocols.transport import Buffer, Incoming

A, B, C = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
QUICK = Limits(grace=0.1)
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def address(transport: HttpTransport) -> str:
    assert transport.listening is not None
    host, port = transport.listening
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@asynccontextmanager
async def two(limits: Limits = QUICK) -> AsyncIterator[tuple[HttpTransport, HttpTransport]]:
    """A listens, B dials only."""
    async with (
        HttpTransport(A, listen="127.0.0.1:0", limits=limits) as a,
        HttpTransport(B, limits=limits) as b,
    ):
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
