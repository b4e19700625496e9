"""The API's listener: its port, its connections, and callers that speak no HTTP."""

import asyncio
import contextlib
import os
import socket

import aiohttp
import pytest
from api_kit import KEY, listening
from http_kit import wait_for

from node.monitor import answers, api
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


async def asked(address, path, key=""):
    """A connection on which that was asked for, and the answer's first line; it stays open."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n"
    writer.write((head + (f"Authorization: Bearer {key}\r\n" if key else "") + "\r\n").encode())
    async with asyncio.timeout(20):
        return reader, writer, (await reader.readline()).strip()


async def test_who_has_no_key_keeps_nobody_out_who_has_it(kit, monkeypatch):
    """However often it asks for what is open to all, or from how many addresses."""
    monkeypatch.setattr(api, "MAX_CONNECTIONS", 3)
    async with listening(kit, KEY) as server:
        strangers = [await asked(server.address, "/static/style.css") for _ in range(3)]
        with_key = [await asked(server.address, "/api/v1/state", KEY) for _ in range(3)]
        assert [line for *_, line in strangers + with_key] == [b"HTTP/1.1 200 OK"] * 6
        for reader, _, _ in strangers:
            async with asyncio.timeout(20):
                with contextlib.suppress(ConnectionError):
                    await reader.read()  # it has made way, else this would not end
        more, there = await connected(server.address)
        assert not there, "as those who have the key do not"
        more.close()
        for _, writer, _ in strangers + with_key:
            writer.close()


@pytest.mark.parametrize("idle", [60.0, 0.1], ids=["asks for it to be closed", "says no more"])
async def test_what_is_closed_counts_until_its_last_answer_is_taken(kit, monkeypatch, idle):
    """Else who takes nothing would use up the process's descriptors, one answer each."""
    monkeypatch.setattr(api, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(api, "IDLE_S", idle)
    async with listening(kit, KEY) as server, asyncio.timeout(20):
        listener = server._listening.sockets[0]._sock
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            stranger.connect(("127.0.0.1", listener.getsockname()[1]))
            head = "GET /static/style.css HTTP/1.1\r\nHost: localhost\r\n"
            stranger.sendall((head + "Connection: close\r\n" * (idle > 1) + "\r\n").encode())
            await wait_for(lambda: any(link.is_closing() for link in server._links))
            there = list(server._links)
            assert there[0].get_write_buffer_size()
            _, writer, line = await asked(server.address, "/static/style.css")
            assert line == b"HTTP/1.1 200 OK"
            assert there[0].get_write_buffer_size() == 0, "it is cut"
            assert list(server._links) != there
            writer.close()


async def test_only_the_oldest_stranger_makes_way(kit, monkeypatch):
    monkeypatch.setattr(api, "MAX_CONNECTIONS", 3)
    async with listening(kit, KEY) as server, asyncio.timeout(20):
        held = [await asked(server.address, "/healthz") for _ in range(4)]
        for reader, writer, _ in held[1:]:
            await reader.readuntil(b'{"healthy":')
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b'{"healthy":')  # it still has its connection
        with contextlib.suppress(ConnectionError):
            await held[0][0].read()
        for _, writer, _ in held:
            writer.close()


async def test_a_wrong_key_is_none(kit, monkeypatch):
    monkeypatch.setattr(api, "MAX_CONNECTIONS", 1)
    async with listening(kit, KEY) as server:
        for number in range(3):
            _, writer, line = await asked(server.address, "/api/v1/state", f"{KEY}{number}")
            assert line == b"HTTP/1.1 401 Unauthorized"
            writer.close()
        _, stranger, _ = await asked(server.address, "/api/v1/state", f"{KEY}4")
        _, writer, line = await asked(server.address, "/api/v1/state", KEY)
        assert line == b"HTTP/1.1 200 OK"
        stranger.close()
        writer.close()


async def test_an_answer_that_nobody_takes_ends_the_connection(kit, monkeypatch):
    monkeypatch.setattr(answers, "STUCK_S", 0.2)
    monkeypatch.setattr(answers, "LEAST_RATE", 2**40)

    async def ask_on(writer):
        while True:
            writer.write(b"GET /static/uplot.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
            await writer.drain()
            await asyncio.sleep(0)

    async with listening(kit) as server, asyncio.timeout(20):
        _, writer = await asyncio.open_connection(*server.address.split(":"), limit=1024)
        with pytest.raises(ConnectionError):  # nothing is read of all these answers
            await ask_on(writer)
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
