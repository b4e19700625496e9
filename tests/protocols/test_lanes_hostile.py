"""Lanes among strangers: what they send, what it costs them, and that nobody else notices."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import count

import pytest
from http_kit import A, B, C, Hold, throw, two, undisturbed, wait_for
from lane_kit import STRICT, Takes, bare, lane, push, reply

from protocols.bodies import BufferDrain, BufferFeed
from protocols.errors import RemoteRefused, TransferStalled, Unreachable
from protocols.http.transport import HttpTransport
from protocols.identity import PeerId
from protocols.lanes.lane import Lane
from protocols.lanes.socket import Filled, fill
from protocols.lanes.wire import PREAMBLE, PULL, PUSH, Request, claim
from protocols.limits import Limits
from protocols.tasks import beside
from protocols.transport import Buffer, Incoming, Outgoing

# --- strangers at the port ----------------------------------------------------------------------


async def test_garbage_is_counted_and_nobody_else_notices() -> None:
    async with two(STRICT) as (a, b):
        takes = Takes(a)
        garbage = [
            PREAMBLE[True][:1],  # half a preamble, then silence
            PREAMBLE[True],  # and no handshake behind it
            PREAMBLE[False] + claim(C.peer_id),  # no TLS
            PREAMBLE[True] + os.urandom(3000),
            PREAMBLE[True][:4] + os.urandom(3000),
            PREAMBLE[True] + b"POST /call/echo HTTP/1.1\r\n\r\n",
            PREAMBLE[True] + push("push", 10, bytes(10)),
        ]

        await undisturbed(a, b, *(throw(bare(a), data) for data in garbage))
        assert a.stats.garbage_connections == len(garbage)
        assert takes.runs == 0
        assert await b.push(A.peer_id, "push", b"", BufferFeed(bytes(9)), timeout=5) == b"ok"


async def test_without_a_certificate_nobody_gets_a_lane() -> None:
    async with two(STRICT) as (a, _):
        takes = Takes(a)
        naked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        naked.check_hostname = False
        naked.verify_mode = ssl.CERT_NONE
        async with bare(a) as (reader, writer):
            writer.write(PREAMBLE[True])
            await writer.start_tls(naked)
            writer.write(push("push", 10, bytes(10)))
            with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        await wait_for(lambda: a.stats.refused_handshakes == 1)
        assert a.stats.garbage_connections == 0
        assert takes.runs == 0


async def test_lanes_of_one_address_are_bounded() -> None:
    async with two(Limits(grace=0.1, per_ip=3)) as (a, b):
        Takes(a)
        async with bare(a) as (_, first), bare(a) as (_, second):
            for writer in (first, second):
                writer.write(PREAMBLE[True])
            async with lane(a), bare(a) as (reader, writer):
                writer.write(PREAMBLE[True])
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
            assert a.stats.capped_connections == 1

        async def pushes() -> bool:
            try:
                await b.push(A.peer_id, "push", b"", BufferFeed(bytes(9)), timeout=5)
            except Unreachable:
                return False
            return True

        for _ in range(500):
            if await pushes():
                break
        else:
            pytest.fail("the places were never given back")


async def test_a_wrong_claim_without_tls_is_refused() -> None:
    async with HttpTransport(A, listen="127.0.0.1:0", limits=STRICT, tls=False) as a:
        Takes(a)
        for claimed in (b"\x00", b"\xff" + bytes(255), b"\x06nobody", b"\x03\xff\xfe\xfd"):
            async with bare(a) as (reader, writer):
                writer.write(PREAMBLE[False] + claimed)
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
        assert a.stats.garbage_connections == 4
        async with bare(a) as (reader, writer):
            writer.write(PREAMBLE[False] + claim(B.peer_id))
            assert await reader.readexactly(len(claim(A.peer_id))) == claim(A.peer_id)
            writer.write(push("push", 3, b"abc"))
            assert (await reply(reader)).detail == b"ok"


# --- requests -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        os.urandom(5000),
        b"\x00" * 100,
        Request(4, "push", b"", 0).encode(),
        Request(PUSH, "", b"", 0).encode(),
        Request(PUSH, "x" * 129, b"", 0).encode(),
        Request(PUSH, "push", bytes(64 * 1024 + 1), 0).encode(),
        Request(PUSH, "push", b"", 1 << 63).encode(),
        Request(PUSH, "push", b"", 0).encode().replace(b"push", b"pu\xffh"),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
async def test_what_is_no_request_ends_the_lane(data: bytes) -> None:
    async with two(STRICT) as (a, b):
        takes = Takes(a)
        async with lane(a) as (reader, writer):
            writer.write(data)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        await wait_for(lambda: a.stats.garbage_connections == 1)
        assert takes.runs == 0
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (push("push", 10**15), "too_large"),
        (push("large", 10**15), "too_large"),
        (push("push", 1001, bytes(1001)), "too_large"),
        (push("none", 10), "unknown"),
        (push("../../etc/passwd", 10), "unknown"),
        (push("pull", 10), "unknown"),
        (Request(PULL, "push", b"", 10).encode(), "unknown"),
        (Request(PULL, "pull", b"", 10).encode(), "too_large"),
    ],
)
async def test_bad_requests_are_refused_before_any_handler(data: bytes, code: str) -> None:
    async with two(STRICT) as (a, b):
        takes = Takes(a)
        async with lane(a) as (reader, writer):
            writer.write(data)
            assert (await reply(reader)).code == code
        assert takes.runs == int(code == "too_large" and data[0] == PULL)
        assert await b.push(A.peer_id, "push", b"", BufferFeed(bytes(9)), timeout=5) == b"ok"


async def test_names_that_nothing_answers_to_are_not_kept() -> None:
    async with two(STRICT) as (a, _):
        async with lane(a) as (reader, writer):
            for number in range(100):
                writer.write(push(f"made-up-{number}", 0))
                assert (await reply(reader)).code == "unknown"
        stats = a.stats
        assert len(stats.in_by_name) + len(stats.out_by_name) + len(stats.requests_by_name) <= 2


async def test_a_huge_header_is_not_waited_for() -> None:
    async with two(STRICT) as (a, _):
        async with lane(a) as (reader, writer):
            writer.write(bytes([PUSH, 4]) + (10**9).to_bytes(4, "big") + bytes(8) + b"push")
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        await wait_for(lambda: a.stats.garbage_connections == 1)


# --- bodies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["large", "whole"])
@pytest.mark.parametrize("pause", [0.02, 60.0])
async def test_a_slow_or_silent_sender_is_cut(pause: float, name: str) -> None:
    """50 bytes a second are progress, but fewer than allowed; 60 s without a byte are none."""
    async with two(STRICT) as (a, b):
        takes = Takes(a)
        async with lane(a) as (reader, writer):
            writer.write(push(name, 1_000_000, bytes(10)))

            async def drip() -> None:
                while True:
                    writer.write(b"x")
                    await asyncio.sleep(pause)

            async with beside(drip()):
                assert (await reply(reader)).code == "stalled"
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)  # and the rest is not waited for
        assert [type(error) for error in takes.errors] == [TransferStalled]
        assert a.stats.stalled_bodies == 1
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"


@pytest.mark.parametrize(("length", "longest"), [(100, 3600.0), (1_000_000, 100.0)])
async def test_of_a_body_that_its_receiver_judges_any_byte_is_progress(
    length: int, longest: float
) -> None:
    """If only it would end before a round has to."""
    async with two(replace(STRICT, longest=longest)) as (a, _):
        came: list[int] = []

        async def take(peer: PeerId, header: bytes, body: Incoming) -> bytes:
            await body.into(BufferDrain(bytearray(body.length)), slow=True)
            came.append(body.length)
            return b"ok"

        a.on_push("take", take, max_length=length)
        async with lane(a) as (reader, writer):
            writer.write(push("take", length))

            async def drip() -> None:
                for _ in range(length):
                    writer.write(b"x")
                    await asyncio.sleep(0.02)  # 50 bytes a second, where 2000 are asked for

            async with beside(drip()):
                answer = await reply(reader)
        assert (answer.code, came) == (("", [100]) if length == 100 else ("stalled", []))


async def test_frames_of_a_byte_do_not_hold_up_the_other_lanes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each costs as much as a long one, so their number counts in a turn."""
    turns: list[int] = []
    receive = Lane._receive_some

    def counted(self: Lane) -> None:
        receiving = self._receiving
        assert receiving is not None
        before = receiving.moved
        receive(self)
        turns.append(receiving.moved - before)

    async with two(STRICT) as (a, _):
        takes = Takes(a)
        async with lane(a) as (reader, writer):
            writer.write(push("whole", 3000))
            await wait_for(lambda: takes.runs == 1)
            monkeypatch.setattr(Lane, "_receive_some", counted)
            writer.write_frames_of_a_byte(bytes(3000))
            assert (await reply(reader)).detail == b"ok"
        assert sum(turns) >= 3000
        assert max(turns) < 500


async def test_a_refusal_reaches_who_is_still_sending() -> None:
    async with two(STRICT) as (a, _):
        takes = Takes(a)
        async with lane(a) as (reader, writer):
            writer.write(push("push", 200_000_000))
            for _ in range(50):
                writer.write(bytes(100_000))
            assert (await reply(reader)).code == "too_large"
        assert takes.received == 0


async def test_who_sends_on_after_his_body_is_cut() -> None:
    async with two(STRICT) as (a, b):
        hold = Hold(whole=True)
        a.on_push("hold", hold.push, max_length=100)
        async with lane(a) as (_, writer):
            writer.write(push("hold", 10, bytes(10)))
            await hold.begun.wait()
            writer.write(b"more")
            await hold.ended.wait()
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"


async def test_who_does_not_take_what_he_pulled_is_cut() -> None:
    async with two(STRICT) as (a, b):
        closed = asyncio.Event()

        async def source() -> AsyncIterator[Buffer]:
            try:
                for _ in range(100):
                    yield bytes(1 << 20)
            finally:
                closed.set()

        async def give(peer: PeerId, header: bytes) -> Outgoing:
            return Outgoing(100 << 20, source())

        a.on_pull("give", give)
        async with lane(a) as (_, writer):
            writer.write(Request(PULL, "give", b"", 1 << 40).encode())
            writer.pause_reading()
            await asyncio.wait_for(closed.wait(), 10)
        await wait_for(lambda: a.stats.stalled_bodies == 1)
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"


async def test_who_takes_what_he_pulled_byte_by_byte_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = count(1 << 20, -1)
    monkeypatch.setattr("protocols.lanes.moves.unacknowledged", lambda sock: next(left))
    async with two(STRICT) as (a, b):
        Takes(a)
        async with lane(a) as (_, writer):
            writer.write(Request(PULL, "pull", b"", 1 << 40).encode())
            writer.pause_reading()
            await wait_for(lambda: a.stats.stalled_bodies == 1)
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"


async def test_a_peer_that_leaves_in_the_middle_is_no_error_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with two(STRICT) as (a, b):
        takes = Takes(a)
        async with lane(a) as (_, writer):
            writer.write(push("large", 1_000_000, bytes(50_000)))
            await wait_for(lambda: takes.received > 0)
        await wait_for(lambda: bool(takes.errors))
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]


async def test_an_idle_lane_ends_and_so_does_half_a_request() -> None:
    limits = Limits(grace=0.1, idle_server=0.3, idle_client=0.1)
    async with two(limits) as (a, _):
        for start in (b"", push("push", 10)[:7]):
            async with lane(a) as (reader, writer):
                writer.write(start)
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)


async def test_room_that_was_taken_back_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a frame wakes a lane for nothing; what it had asked for may be gone then."""
    data = os.urandom(64_000)

    class Revoked:
        def __init__(self) -> None:
            self.kept = bytearray(len(data))
            self.at = 0
            self.revoked = False

        def attach(self, wake: Callable[[], None]) -> None:
            pass

        def room(self) -> memoryview:
            if self.revoked:
                raise RemoteRefused("late", "another one fills it")
            return memoryview(self.kept)[self.at : max(self.at + 1, len(data) // 2)]

        def took(self, count: int) -> None:
            self.at += count

    drain = Revoked()

    def for_nothing(sock: socket.socket, room: memoryview, *, secure: bool) -> Filled:
        if drain.at == half and not drain.revoked:
            drain.revoked = True
            return Filled(0, 1, dry=True)
        return fill(sock, room, secure=secure)

    async def take(peer: PeerId, header: bytes, body: Incoming) -> bytes:
        await body.into(drain)
        return b""

    half = len(data) // 2

    async def in_halves() -> AsyncIterator[Buffer]:
        yield data[:half]
        await wait_for(lambda: drain.at == half)
        yield data[half:]

    async with two() as (a, b):
        a.on_push("take", take, max_length=len(data))
        monkeypatch.setattr("protocols.lanes.lane.fill", for_nothing)
        body = Outgoing(len(data), in_halves())
        with pytest.raises(RemoteRefused, match="late"):
            await b.push(A.peer_id, "take", b"", body, timeout=5)
        assert bytes(drain.kept) == data[:half] + bytes(half)
