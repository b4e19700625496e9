"""What every transport promises of calls, dials and its end."""

from __future__ import annotations

import asyncio
import os

import pytest
from contract_kit import SOON, Net, Sink, echo, endless, outgoing, within

from protocols.errors import (
    IdentityMismatch,
    Malformed,
    RemoteRefused,
    TransferStalled,
    TransportError,
    Unreachable,
    Why,
)
from protocols.identity import Identity, PeerId
from protocols.transport import (
    MAX_CALL_BYTES,
    Incoming,
    Outgoing,
    Transport,
)


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
