"""Lanes between processes of one machine, past TCP."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import closing

import pytest
from http_kit import A, B, address, chunks_of, take, two, wait_for

from protocols.addresses import parse_address
from protocols.connections import same_machine
from protocols.connections.names import Names
from protocols.http.transport import HttpTransport
from protocols.lanes.socket import other_end_left
from protocols.transport import Outgoing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")

BODY = bytes(range(256)) * 8192


async def push(b: HttpTransport) -> bytes:
    return await b.push(A.peer_id, "take", b"", Outgoing(len(BODY), chunks_of(BODY)), timeout=10)


async def test_a_lane_to_the_same_machine_needs_no_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(names: Names, address: str, whose: str) -> socket.socket:
        raise ConnectionRefusedError(address)

    monkeypatch.setattr(Names, "connected", refused)
    async with two() as (a, b):
        a.on_push("take", take, max_length=len(BODY))
        assert await push(b) == str(len(BODY)).encode()


async def test_where_nobody_listens_so_it_goes_by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_machine, "listener", lambda port, peer: None)
    async with two() as (a, b):
        a.on_push("take", take, max_length=len(BODY))
        assert same_machine.connection(address(a), A.peer_id) is None
        assert await push(b) == str(len(BODY)).encode()


async def test_only_the_peer_that_listens_there_is_found() -> None:
    async with two() as (a, _):
        place = parse_address(address(a))
        assert same_machine.connection(f"127.0.0.1:{place.port}", B.peer_id) is None
        assert same_machine.connection(f"127.0.0.1:{place.port % 65535 + 1}", A.peer_id) is None
        assert same_machine.connection(f"localhost:{place.port}", A.peer_id) is None
        assert same_machine.connection(f"192.0.2.1:{place.port}", A.peer_id) is None
        found = same_machine.connection(f"127.0.0.1:{place.port}", A.peer_id)
        assert found is not None
        with closing(found):
            assert same_machine.is_near(found)


async def test_a_socket_of_another_user_is_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two() as (a, _):
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        assert same_machine.connection(address(a), A.peer_id) is None


async def test_a_second_one_of_the_same_name_does_without() -> None:
    first = same_machine.listener(4390, A.peer_id)
    assert first is not None
    with closing(first):
        assert same_machine.listener(4390, A.peer_id) is None
    again = same_machine.listener(4390, A.peer_id)
    assert again is not None
    again.close()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b""])
async def test_nothing_but_lanes_is_answered_there(said: bytes) -> None:
    async with two() as (a, _):
        sock = same_machine.connection(address(a), A.peer_id)
        assert sock is not None
        with closing(sock):
            loop = asyncio.get_running_loop()
            if said:
                await loop.sock_sendall(sock, said)
            else:
                sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(5):
                assert await ended(sock)
        await wait_for(lambda: a.stats.garbage_connections == 1)
        assert a.stats.connections == 0


async def ended(sock: socket.socket) -> bool:
    try:
        return await asyncio.get_running_loop().sock_recv(sock, 1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_who_has_left_is_noticed_without_reading(family: socket.AddressFamily) -> None:
    with socket.socket(family) as listener:
        listener.bind("\0atoll/test" if family == socket.AF_UNIX else ("127.0.0.1", 0))
        listener.listen()
        with socket.socket(family) as there:
            there.connect(listener.getsockname())
            here, _ = listener.accept()
            with here:
                there.sendall(b"unread")
                assert not other_end_left(here)
                there.close()
                assert other_end_left(here)
                assert here.recv(16) == b"unread"
