"""What every transport promises of pushes."""

from __future__ import annotations

import array
import asyncio
import os
from collections.abc import AsyncIterator

import pytest
from contract_kit import SOON, Sink, echo, endless, outgoing, within

from protocols.errors import (
    LocalProtocolError,
    RemoteRefused,
    TransferStalled,
    Unreachable,
    Why,
)
from protocols.identity import PeerId
from protocols.stats import TransportStats
from protocols.transport import (
    MAX_HEADER_BYTES,
    Buffer,
    Incoming,
    Outgoing,
    Transport,
)


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


async def test_a_handler_may_refuse_before_the_body_ends(
    pair: tuple[Transport, Transport],
) -> None:
    a, b = pair

    async def enough(peer: PeerId, header: bytes, body: Incoming) -> bytes:
        raise RemoteRefused("enough")

    b.on_push("take", enough, max_length=10_000_000)
    b.on_call("echo", echo)
    data = outgoing(bytes(5_000_000))
    with pytest.raises(RemoteRefused) as error:
        await within(a.push(b.peer_id, "take", b"", data, timeout=SOON))
    assert error.value.code == "enough"
    assert await a.call(b.peer_id, "echo", b"", timeout=SOON)


async def test_a_body_that_is_answered_before_it_was_sent_is_not_taken(
    pair: tuple[Transport, Transport],
) -> None:
    """Nor does it tell how fast the link is."""
    a, b = pair
    closed = asyncio.Event()

    async def at_once(peer: PeerId, header: bytes, body: Incoming) -> bytes:
        return b"thanks"

    b.on_push("take", at_once, max_length=10_000_000)
    b.on_call("echo", echo)
    body = Outgoing(900_000, endless(closed, bytes(100_000)))  # the rest of it never comes
    with pytest.raises(Unreachable) as error:
        await within(a.push(b.peer_id, "take", b"", body, timeout=SOON))
    assert error.value.why is Why.NOT_ATOLL
    assert closed.is_set()
    stats: TransportStats = a.stats  # type: ignore[attr-defined]
    assert stats.peer(b.peer_id).upload is None
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
