"""What a connection is asked of its socket."""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import closing

import pytest

from protocols.lane_moves import load
from protocols.lane_socket import Told, told, unacknowledged

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")

SND_MSS, SACKED, MIN_RTT, LENGTH = 16, 28, 148, 232  # of Linux's struct tcp_info


class Gapped(socket.socket):
    """A connection that has lost a packet, behind which others have arrived."""

    sacked, length = 3, LENGTH

    def getsockopt(self, *_: object) -> bytes:  # type: ignore[override]
        info = bytearray(LENGTH)
        struct.pack_into("I", info, SND_MSS, 1448)
        struct.pack_into("I", info, SACKED, self.sacked)
        struct.pack_into("I", info, MIN_RTT, 20_000)
        return bytes(info[: self.length])


def test_a_connection_tells_its_round_trip() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = server.getsockname()
        with closing(socket.create_connection(address)) as one, closing(server.accept()[0]) as two:
            one.sendall(b"x" * 100)
            assert len(two.recv(200)) == 100
            assert 0.0 < told(one).round_trip < 5.0
            assert told(one).beyond == 0


def test_what_has_arrived_behind_a_gap_is_not_under_way() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        one = Gapped(socket.AF_INET, socket.SOCK_STREAM)
        with closing(one):
            one.connect(server.getsockname())
            one.setblocking(False)
            while True:
                try:  # nobody reads it
                    one.send(bytes(1 << 16))
                except BlockingIOError:
                    break
            assert told(one) == Told(0.02, 3 * 1448)
            left = unacknowledged(one)
            assert left > 3 * 1448
            under_way, sends, _, round_trip = load(one, None, None)
            assert (under_way, sends, round_trip) == (left - 3 * 1448, True, 0.02)
            one.sacked = left  # segments, which is more than there are
            assert load(one, None, None).under_way == 0


def test_an_old_system_tells_nothing() -> None:
    with closing(Gapped(socket.AF_INET, socket.SOCK_STREAM)) as one:
        one.length = MIN_RTT
        assert told(one) == Told()


def test_what_is_no_tcp_connection_tells_nothing() -> None:
    one, two = socket.socketpair()
    with closing(one), closing(two):
        assert told(one) == Told()
