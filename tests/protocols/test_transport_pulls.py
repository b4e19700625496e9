"""What every transport promises of pulls."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from contract_kit import SOON, collect, echo, endless, outgoing, within

from protocols.errors import (
    RemoteRefused,
    TransferStalled,
    TransportError,
)
from protocols.identity import PeerId
from protocols.transport import (
    Buffer,
    Outgoing,
    Transport,
)


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
