"""What a connection is asked of its socket."""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import closing

import pytest

from protocols.lanes.losses import SETTLED, Losses
from protocols.lanes.moves import load
from protocols.lanes.socket import (
    _ANY_RATE,
    _FAR_UNSENT_BYTES,
    _MAX_PACING_RATE,
    Told,
    prefer_bbr,
    send_evenly,
    told,
    unacknowledged,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")

# of Linux's struct tcp_info
SND_MSS, UNACKED, SACKED, RTT, SND_CWND = 16, 24, 28, 68, 80
TOTAL_RETRANS, NOTSENT_BYTES, MIN_RTT, LENGTH = 100, 144, 148, 232


class Gapped(socket.socket):
    """A connection that has lost a packet, behind which others have arrived."""

    sacked, length = 3, LENGTH
    under_way, window = 20, 60  # segments
    round_trip = 50_000  # microseconds

    def getsockopt(self, *_: object) -> bytes:  # type: ignore[override]
        info = bytearray(LENGTH)
        for at, value in (
            (SND_MSS, 1448),
            (UNACKED, self.under_way),
            (SACKED, self.sacked),
            (RTT, self.round_trip),
            (SND_CWND, self.window),
            (TOTAL_RETRANS, 7),
            (NOTSENT_BYTES, 5000),
            (MIN_RTT, 20_000),
        ):
            struct.pack_into("I", info, at, value)
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
            assert told(one) == Told(0.02, 3 * 1448, 0.05, 7)
            left = unacknowledged(one)
            assert left > 3 * 1448
            under_way, sends, _, round_trip = load(one, None, None, Losses())
            assert (under_way, sends, round_trip) == (left - 3 * 1448, True, 0.02)
            one.sacked = left  # segments, which is more than there are
            assert load(one, None, None, Losses()).under_way == 0


def test_what_waits_for_the_connections_own_window_stands_in_no_queue_of_the_link() -> None:
    with closing(Gapped(socket.AF_INET, socket.SOCK_STREAM)) as one:
        one.under_way, one.round_trip = one.window, 24_000
        assert told(one).beyond == 3 * 1448  # and the window has room for these
        one.sacked = 2
        assert told(one).beyond == 2 * 1448 + 5000
        one.round_trip = 25_000  # they stand in a queue
        assert told(one).beyond == 2 * 1448


def test_a_connection_is_given_bbr_where_the_system_has_it() -> None:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as one:
        before = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        given = prefer_bbr(one)
        after = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        try:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError:
            assert (given, after) == (False, before)
        else:
            assert (given, after.rstrip(b"\0")) == (True, b"bbr")
    assert not prefer_bbr(one)  # it is closed


def test_over_a_long_way_a_connection_sends_evenly_and_keeps_little_unsent() -> None:
    shortest = {"far": 0.2, "near": 0.002}
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        for host in shortest:
            with closing(Gapped(socket.AF_INET, socket.SOCK_STREAM)) as one:
                one.connect(server.getsockname())
                one.send(b"x")
                losses = Losses(host, shortest)
                for _ in range(SETTLED):
                    load(one, None, None, losses)
                asked = super(Gapped, one).getsockopt
                paced = asked(socket.SOL_SOCKET, _MAX_PACING_RATE) == _ANY_RATE
                unsent = asked(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == _FAR_UNSENT_BYTES
                assert (paced, unsent) == (host == "far",) * 2
    send_evenly(one)  # it is closed


def test_an_old_system_tells_nothing() -> None:
    with closing(Gapped(socket.AF_INET, socket.SOCK_STREAM)) as one:
        one.length = MIN_RTT
        assert told(one) == Told()


def test_what_is_no_tcp_connection_tells_nothing() -> None:
    one, two = socket.socketpair()
    with closing(one), closing(two):
        assert told(one) == Told()
