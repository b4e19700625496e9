"""The API's listener: its port, its connections, and callers that speak no HTTP."""

import asyncio
import os

import aiohttp
import pytest

from node.monitor import api
from node.monitor.api import ApiServer, make_app
from node.monitor.history import History
from protocols.errors import OperatorError


async def test_a_port_in_use_is_e303_or_moved(kit, api_server):
    with pytest.raises(OperatorError) as caught:
        await ApiServer(
            make_app(kit.state, kit.log, History()), api_server.address, may_move=False
        ).start()
    assert caught.value.code == "E303"
    assert f"process {os.getpid()} listens" in caught.value.why
    assert "--api 127.0.0.1:" in caught.value.fix
    other = ApiServer(make_app(kit.state, kit.log, History()), api_server.address, may_move=True)
    try:
        assert await other.start() != api_server.address
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{other.address}/metrics") as answer,
        ):
            assert answer.status == 200
    finally:
        await other.aclose()


async def connected(address):
    """Whether a connection is kept open for as long as an answer takes; it stays open."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    try:
        async with asyncio.timeout(20):
            return writer, (await reader.read(9)) == b"HTTP/1.1 "
    except ConnectionError:
        return writer, False


async def test_connections_are_bounded_and_those_that_end_make_room(api_server, monkeypatch):
    monkeypatch.setattr(api, "MAX_CONNECTIONS", 3)
    held = [await connected(api_server.address) for _ in range(3)]
    assert all(there for _, there in held)
    more, there = await connected(api_server.address)
    assert not there
    more.close()
    held[0][0].close()
    async with asyncio.timeout(20):
        while True:
            another, there = await connected(api_server.address)
            another.close()
            if there:
                break
            await asyncio.sleep(0.01)
    for writer, _ in held[1:]:
        writer.close()


async def test_half_a_request_is_not_waited_for(kit, monkeypatch):
    monkeypatch.setattr(api, "IDLE_S", 0.2)
    server = ApiServer(make_app(kit.state, kit.log, History()), "127.0.0.1:0")
    reader, writer = await asyncio.open_connection(*(await server.start()).split(":"))
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: loc")
        async with asyncio.timeout(20):
            assert await reader.read() == b""
    finally:
        writer.close()
        await server.aclose()


async def test_what_is_no_http_leaves_no_traceback_of_ours(api_server, caplog):
    for sent in (b"\x16\x03\x01\x00\x05hello", b"GET /\0 HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        reader, writer = await asyncio.open_connection(*api_server.address.split(":"))
        writer.write(sent)
        async with asyncio.timeout(20):
            assert (await reader.read()).startswith(b"HTTP/1.0 400 ")
        writer.close()
    assert not caplog.records


async def test_a_host_that_is_not_ours(kit):
    server = ApiServer(make_app(kit.state, kit.log, History()), "nowhere.invalid:0", may_move=False)
    with pytest.raises(OperatorError) as caught:
        await server.start()
    assert caught.value.code == "E102"
