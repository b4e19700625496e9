"""How a machine learns as what others see its connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from address_kit import DEAD, dead, named

from protocols.http.transport import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.seen import MARK, seen_from


async def test_a_peer_is_asked_at_whichever_of_its_addresses_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with HttpTransport(Identity.generate(), listen="127.0.0.1:0") as peer:
        assert peer.listening is not None
        named(monkeypatch, "peer.example", DEAD, "127.0.0.1")
        with dead(peer.listening[1]):
            seen, port = await seen_from(f"peer.example:{peer.listening[1]}", 0)
    assert seen == f"127.0.0.1:{port}"


async def test_an_ipv4_caller_of_who_listens_for_both_families_is_seen_as_such() -> None:
    async with (
        HttpTransport(Identity.generate(), listen="[::]:0") as peer,
        HttpTransport(Identity.generate()) as caller,
    ):
        assert peer.listening is not None
        where = f"127.0.0.1:{peer.listening[1]}"
        seen, port = await seen_from(where, 0)
        assert seen == f"127.0.0.1:{port}"
        await caller.dial(where)

        async def observed(who: PeerId, body: bytes) -> bytes:
            return peer.observed(who).encode()

        peer.on_call("observed", observed)
        told = await caller.call(peer.peer_id, "observed", b"", timeout=5)
        assert told.decode() == caller.own_end(peer.peer_id)


@asynccontextmanager
async def saying(answer: bytes) -> AsyncIterator[str]:
    """Where a peer has this to say."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(1) == MARK
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(say, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        (b"[::ffff:192.0.2.7]:50000", "192.0.2.7:50000"),  # as nodes before have said it
        (b"[2001:db8::7]:50000", "[2001:db8::7]:50000"),
    ],
)
async def test_what_an_older_peer_says(answer: bytes, read: str) -> None:
    async with saying(answer) as where:
        assert (await seen_from(where, 0))[0] == read


@pytest.mark.parametrize("answer", [b"elsewhere:50000", b"192.0.2.7", b"192.0.2.7:x", b""])
async def test_what_is_no_address_is_not_taken(answer: bytes) -> None:
    async with saying(answer) as where:
        with pytest.raises(ValueError, match="does not"):
            await seen_from(where, 0)
