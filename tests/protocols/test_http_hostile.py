"""The HTTP transport among strangers: what they send, what it costs them, and that nobody notices.

Raw requests go in by hand, through TLS with a key of their own where they need to get that far.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import ssl

import pytest
from http_kit import (
    A,
    B,
    C,
    address,
    answer,
    echo,
    fake,
    post,
    raw,
    request,
    throw,
    two,
    undisturbed,
    wait_for,
)

from protocols.addresses import source_of
from protocols.connections import tls
from protocols.errors import IdentityMismatch, RemoteRefused, TransferStalled, Unreachable, Why
from protocols.http.transport import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.limits import Limits
from protocols.tasks import beside

STRICT = Limits(grace=0.1, handshake=1.0, stall=0.5, min_rate=2000.0, per_ip=20)


async def ask(target: HttpTransport, data: bytes, identity: Identity | None = C) -> bytes:
    """Send bytes, return all that comes back until the other end closes or is done."""
    async with raw(target, identity) as (reader, writer), asyncio.timeout(10):
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        return head.lower()


class Takes:
    """Handlers that count what reached them."""

    def __init__(self, transport: HttpTransport) -> None:
        self.runs = 0
        transport.on_call("call", self.call)
        transport.on_call("small", self.call, max_body=1000)
        transport.on_call("large", self.call, max_body=10**9)

    async def call(self, peer: PeerId, body: bytes) -> bytes:
        self.runs += 1
        return body


# --- strangers at the port --------------------------------------------------------------------


async def test_garbage_is_counted_and_nobody_else_notices() -> None:
    async with two(STRICT) as (a, b):
        hello = tls.client_context(C)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        half = hello.wrap_bio(incoming, outgoing, server_hostname=tls.ANYONE)
        with pytest.raises(ssl.SSLWantReadError):
            half.do_handshake()
        client_hello = outgoing.read()
        garbage = [
            os.urandom(3000),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"SSH-2.0-x\r\n",
            b"\x16\x03\x01\xff\xff" + os.urandom(100),
            client_hello[:50],  # half a handshake, then silence
            client_hello,
            b"",
        ]

        await undisturbed(a, b, *(throw(raw(a, None), data) for data in garbage))
        assert a.stats.garbage_connections == len(garbage)
        assert a.stats.refused_handshakes == 0
        assert a.stats.connections == 1


async def test_refused_identities_are_counted_apart() -> None:
    async with two(STRICT) as (a, b):
        naked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        naked.check_hostname = False
        naked.verify_mode = ssl.CERT_NONE
        assert a.listening is not None
        reader, writer = await asyncio.open_connection(*a.listening, ssl=naked)
        writer.write(post("/call/echo", body=b"x"))
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 5)
        writer.transport.abort()
        await wait_for(lambda: a.stats.refused_handshakes == 1)
        assert a.stats.garbage_connections == 0
        assert a.stats.requests_by_name["echo"] == 0
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"


async def test_connections_of_one_address_are_bounded_before_tls() -> None:
    async with two(Limits(grace=0.1, per_ip=3)) as (a, b):
        await b.call(A.peer_id, "echo", b"", timeout=5)
        async with raw(a, None), raw(a, None):
            async with raw(a, None) as (reader, _):
                assert await asyncio.wait_for(reader.read(), 5) == b""
            assert a.stats.capped_connections == 1
            assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"  # the pooled one

        async def connects() -> bool:
            try:
                return await b.dial(address(a)) == A.peer_id
            except Unreachable:
                return False

        for _ in range(500):
            if await connects():
                break
        else:
            pytest.fail("the places were never given back")


def test_one_household_is_one_source() -> None:
    """It has a /56 of IPv6, that is 256 networks; an IPv4 address counts alone, however written."""
    assert source_of("2001:db8:7:ab00::1") == source_of("2001:db8:7:abff:1::2%eth0")
    assert source_of("2001:db8:7:ab00::1") != source_of("2001:db8:7:ac00::1")
    assert source_of("::ffff:192.0.2.1") == source_of("192.0.2.1") != source_of("192.0.2.2")
    assert source_of("64:ff9b::192.0.2.1") == source_of("192.0.2.1"), "behind NAT64"


async def test_a_claimed_identity_counts_only_without_tls() -> None:
    async with two(STRICT) as (a, _):
        seen: list[PeerId] = []

        async def who(peer: PeerId, body: bytes) -> bytes:
            seen.append(peer)
            return b""

        a.on_call("who", who)
        await ask(a, post("/call/who", f"Atoll-Peer: {B.peer_id}"))
        assert seen == [C.peer_id]


async def test_without_tls_an_identity_must_at_least_be_claimed_and_kept() -> None:
    async with HttpTransport(A, listen="127.0.0.1:0", limits=STRICT, tls=False) as a:
        a.on_call("echo", echo)
        for header in ("X: y", "Atoll-Peer: nobody", "Atoll-Peer: "):
            assert b" 400 " in await ask(a, post("/call/echo", header), None)
        assert b" 200 " in await ask(a, post("/call/echo", f"Atoll-Peer: {B.peer_id}"), None)
        async with raw(a, None) as (reader, writer):
            for peer, status in ((B, b" 200 "), (C, b" 400 ")):
                writer.write(post("/call/echo", f"Atoll-Peer: {peer.peer_id}"))
                assert status in await reader.readuntil(b"\r\n\r\n")
        assert a.stats.requests_by_name["echo"] == 2


async def test_garbage_without_tls_is_answered_and_counted() -> None:
    async with HttpTransport(A, listen="127.0.0.1:0", limits=STRICT, tls=False) as a:
        assert b" 400 " in await ask(a, b"\x16\x03\x01 hello\r\n\r\n", None)
        assert a.stats.garbage_connections == 1


# --- requests ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/hello",
        "/call",
        "/call/",
        "/call/none",
        "/CALL/call",
        "/call/call/",
        "//call/call",
        "/pull/../call/call",
        "/pull/..%2f..%2f..%2fetc%2fpasswd",
        "/pull/%2e%2e/%2e%2e/etc/passwd",
        "/pull/....//....//etc/passwd",
        "/call/call%00",
        "/call/call?x=1/../../etc/passwd",
        "/push/call",
        "/pull/call",
        "/static/../../../etc/passwd",
    ],
)
async def test_other_paths_are_unknown(path: str) -> None:
    async with two(STRICT) as (a, _):
        takes = Takes(a)
        head = await ask(a, post(path))
        query = "?" in path  # a query is not part of the name
        assert (b" 200 " if query else b" 404 ") in head
        assert takes.runs == int(query)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post("/call/small", length=10**15), b"413"),
        (post("/call/large", length=10**15), b"413"),
        (post("/call/small", body=bytes(1001)), b"413"),
        (post("/call/large", length=10**30), b"400"),
        (post("/call/large", length=-1), b"400"),
        (b"POST /call/call HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (
            b"POST /call/large HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"5\r\nhello\r\n0\r\n\r\n",
            b"400",
        ),
        (post("/call/call", "Content-Encoding: gzip", body=gzip.compress(bytes(9999))), b"400"),
        (post("/call/large", "Content-Encoding: deflate", body=b"x" * 100), b"400"),
        (post("/call/call", "X: " + "x" * 5000), b"400"),
        (post("/call/" + "x" * 5000), b"400"),
        (post("/call/call", *(f"X-{i}: x" for i in range(500))), b"400"),
        (b"PUT /call/call HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", b"404"),
        (b"nonsense\r\n\r\n", b"400"),
    ],
)
async def test_bad_requests_are_refused_before_any_handler(data: bytes, status: bytes) -> None:
    async with two(STRICT) as (a, b):
        takes = Takes(a)
        head = await ask(a, data)
        assert head.split()[1].startswith(status), head
        assert takes.runs == 0
        assert await b.call(A.peer_id, "call", b"x", timeout=5) == b"x"


async def test_a_slow_head_and_an_idle_connection_end() -> None:
    limits = Limits(grace=0.1, idle_server=0.3, idle_client=0.1)
    async with two(limits) as (a, _):
        for start in (b"", b"POST /call/ec"):
            async with raw(a) as (reader, writer):
                writer.write(start)
                assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_a_failing_handler_is_logged_here_and_not_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with two(STRICT) as (a, _):

        async def fail(peer: PeerId, body: bytes) -> bytes:
            raise KeyError("/home/alice/secret")

        a.on_call("fail", fail)
        async with raw(a) as (reader, writer), asyncio.timeout(5):
            writer.write(post("/call/fail", "Connection: close"))
            reply = await reader.read()
        assert b" 500 " in reply
        assert b"secret" not in reply
        assert b"Traceback" not in reply
        assert b"Python" not in reply
        assert b"aiohttp" not in reply
    assert "secret" in caplog.text


@pytest.mark.parametrize(("before", "pause"), [(4, 0.02), (4, 60.0), (100_000, 0.02)])
async def test_a_slow_or_silent_sender_is_cut(before: int, pause: float) -> None:
    """50 bytes a second are progress, but fewer than allowed; 60 s without a byte are none."""
    async with two(STRICT) as (a, b):
        takes = Takes(a)
        async with raw(a) as (reader, writer), asyncio.timeout(10):
            writer.write(post("/call/large", length=1_000_000, body=bytes(before)))

            async def drip() -> None:
                while True:
                    writer.write(b"x")
                    await asyncio.sleep(pause)

            async with beside(drip()):
                head = await reader.readuntil(b"\r\n\r\n")
        assert b" 408 " in head
        assert takes.runs == 0
        assert a.stats.stalled_bodies == 1
        assert await b.call(A.peer_id, "call", b"x", timeout=5) == b"x"


# --- hostile servers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (answer(b"", length=10**15), RemoteRefused),
        (answer(b"ok", "Content-Encoding: gzip"), Unreachable),
        (answer(b"ok", "Content-Encoding: br"), Unreachable),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", Unreachable),
        (b"HTTP/1.1 200 OK\r\nServer: atoll/1\r\nTransfer-Encoding: chunked\r\n\r\n", Unreachable),
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\nContent-Length: 0\r\n\r\n",
            Unreachable,
        ),
        (b"nonsense\r\n\r\n", Unreachable),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", Unreachable),
        (answer(b"", "Atoll-Error: busy", status="409 Conflict", length=10**9), RemoteRefused),
        (answer(b"\xff\xfe", "Atoll-Error: busy", status="409 Conflict"), RemoteRefused),
        (answer(b"o", length=2), Unreachable),
    ],
)
async def test_what_a_hostile_server_answers_is_a_transport_error(
    reply: bytes, error: type[Exception]
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(reply)
        await writer.drain()

    async with fake(serve, tls.server_context(A)) as where, HttpTransport(B, limits=STRICT) as b:
        b.book.add(A.peer_id, where)
        with pytest.raises(error):
            await b.call(A.peer_id, "x", b"", timeout=5)


@pytest.mark.parametrize("took", ["", "-5", "nan", "9" * 300, "١٢", "1e9", "99999999"])
async def test_a_lie_about_time_spent_does_no_harm(took: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(answer(b"ok", f"Atoll-Took: {took}"))
        await reader.read()

    async with fake(serve, tls.server_context(A)) as where, HttpTransport(B, limits=STRICT) as b:
        b.book.add(A.peer_id, where)
        assert await b.call(A.peer_id, "x", b"", timeout=5) == b"ok"
        trip = b.stats.peer(A.peer_id).round_trip
        assert trip is not None
        assert 0 <= trip < 5


async def test_without_tls_another_claimed_identity_is_a_mismatch() -> None:
    async with (
        HttpTransport(A, listen="127.0.0.1:0", limits=STRICT, tls=False) as a,
        HttpTransport(B, limits=STRICT, tls=False) as b,
    ):
        a.on_call("echo", echo)
        b.book.add(C.peer_id, address(a))
        with pytest.raises(IdentityMismatch) as error:
            await b.call(C.peer_id, "echo", b"", timeout=5)
        assert error.value.got == A.peer_id


async def test_a_server_that_trickles_its_answer_is_left() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(answer(b"", length=1_000_000))
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with fake(serve, tls.server_context(A)) as where, HttpTransport(B, limits=STRICT) as b:
        b.book.add(A.peer_id, where)
        with pytest.raises(TransferStalled):
            await b.call(A.peer_id, "x", b"", timeout=0.5, max_reply=10**6)


async def test_a_peer_that_refuses_our_identity_is_told_apart() -> None:
    """With TLS 1.3 a server looks at the client's certificate after the client's handshake."""
    picky = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    picky.verify_mode = ssl.CERT_REQUIRED  # and trusts no authority at all
    tls.load_chain(picky, tls.certificate(A), A.key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with fake(serve, picky) as where, HttpTransport(B, limits=STRICT) as b:
        b.book.add(A.peer_id, where)
        with pytest.raises(Unreachable) as error:
            await b.call(A.peer_id, "x", b"", timeout=5)
        assert error.value.why in (Why.TLS, Why.RESET)
