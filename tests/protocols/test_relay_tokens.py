"""Tokens of relayed calls, which others make up: what is said in the clear is nobody's choice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from http_kit import B, address
from test_relay import place

from protocols.addresses import parse_address
from protocols.errors import Malformed, RemoteRefused
from protocols.relay.wire import PREAMBLE, TOKEN_BYTES, RelayDial, spoken

COMMAND = b"\r\nFLUSHALL\r\n....\n"[:TOKEN_BYTES]  # of a service that takes a line for a command


@asynccontextmanager
async def service() -> AsyncIterator[tuple[str, asyncio.Future[bytes]]]:
    """Another service of this machine: where it listens, and the first that it is told."""
    told: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = await reader.readexactly(len(PREAMBLE) + TOKEN_BYTES)
        if not told.done():
            told.set_result(said)
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", told


def nobody_chose(said: bytes) -> bool:
    """Whether no character of it can be one of a command, let alone those of ours."""
    return said.startswith(PREAMBLE) and min(said[len(PREAMBLE) :]) >= 0x80


async def test_a_hidden_node_says_nothing_of_its_callers_choice() -> None:
    async with service() as (where, told), place() as here:
        here.closed.book.add(here.relay.peer_id, address(here.relay))
        asked = RelayDial(here.hidden.peer_id, COMMAND, (where,), False)
        await here.closed.call(here.relay.peer_id, "relay-dial", asked.encode(), timeout=5)
        assert nobody_chose(await asyncio.wait_for(told, 5))


async def test_a_caller_says_nothing_of_a_relays_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay has a name, which the next time leads elsewhere, and makes up the token."""
    async with service() as (where, told), place() as here:
        monkeypatch.setattr("protocols.relay.server.secrets.token_bytes", lambda size: COMMAND)
        monkeypatch.setattr(here.closed.book, "dialled_at", lambda peer: parse_address(where))
        with pytest.raises(ConnectionResetError):
            await here.closed.relays.connect(here.where, B.peer_id)
        assert nobody_chose(await asyncio.wait_for(told, 5))


@pytest.mark.parametrize("length", [1, TOKEN_BYTES - 1])
async def test_a_token_has_its_length(length: int) -> None:
    with pytest.raises(Malformed):
        spoken(bytes(length))
    async with place() as here:
        here.closed.book.add(here.relay.peer_id, address(here.relay))
        asked = RelayDial(here.hidden.peer_id, bytes(length), ("127.0.0.1:1",), False).encode()
        with pytest.raises(RemoteRefused, match="length"):
            await here.closed.call(here.relay.peer_id, "relay-dial", asked, timeout=5)


def test_every_token_is_said_in_its_own_way() -> None:
    said = {spoken(bytes([n]) * TOKEN_BYTES) for n in range(256)}
    assert len(said) == 256
    assert {len(one) for one in said} == {TOKEN_BYTES}
