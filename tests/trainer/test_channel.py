from __future__ import annotations

import fcntl
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_kit import apply, begin

from node.trainer.channel import (
    COMMANDS,
    REPORTS,
    Channel,
    ChannelClosedError,
    Leaving,
    Ready,
    Snapshot,
    StepDone,
    Stop,
    Stopped,
)
from node.trainer.framing import MAX_FRAME, READ_BYTES, Unframer, frame
from node.trainer.unhurried import Unhurried
from protocols.errors import LocalProtocolError, Malformed
from protocols.wire import decode_any

WAIT_S = 5.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    daemon, trainer = socket.socketpair()
    with daemon, trainer:
        yield daemon, Channel(trainer)


def test_a_daemon_with_many_open_files_is_heard() -> None:
    """The rank has its end under the number that it had there, where connections take many."""
    daemon, trainer = socket.socketpair()
    with daemon, trainer:
        high = fcntl.fcntl(trainer, fcntl.F_DUPFD, 1024)
        with socket.socket(fileno=high) as end:
            channel = Channel(end)
            assert channel.receive(0) is None
            daemon.sendall(frame(Stop()))
            assert channel.receive(WAIT_S) == Stop()


def test_commands_arrive_in_order_however_they_are_cut(
    ends: tuple[socket.socket, Channel],
) -> None:
    daemon, channel = ends
    commands = [begin(resume="/a/place"), apply(1), apply(2, reset=True), Stop()]
    stream = b"".join(frame(command) for command in commands)
    got = []
    for byte in stream:
        daemon.sendall(bytes([byte]))
        if (command := channel.receive(0.0)) is not None:
            got.append(command)
    assert got == commands
    daemon.sendall(stream)
    assert [channel.receive(WAIT_S) for _ in commands] == commands
    assert channel.receive(0.0) is None


def test_reports_travel_to_the_daemon(ends: tuple[socket.socket, Channel]) -> None:
    daemon, channel = ends
    reports = [
        Ready(10, b"d" * 32),
        StepDone(0, 1, None, None, 1e-3, 64, 0.1),
        Snapshot(0, 1, 64, False),
    ]
    for report in reports:
        channel.send(report)
    frames = Unframer().feed(daemon.recv(65536))
    assert [decode_any(f, *(type(r) for r in reports)) for f in frames] == reports


def test_a_loss_that_is_not_finite_cannot_be_sent(ends: tuple[socket.socket, Channel]) -> None:
    with pytest.raises(LocalProtocolError):
        ends[1].send(StepDone(0, 1, float("nan"), None, 1e-3, 64, 0.1))


def test_the_end_of_the_daemon_is_noticed(ends: tuple[socket.socket, Channel]) -> None:
    daemon, channel = ends
    daemon.sendall(frame(Stop()) + b"\0\0")  # half a frame at the end
    daemon.close()
    assert channel.receive(WAIT_S) == Stop()
    with pytest.raises(ChannelClosedError):
        channel.receive(WAIT_S)
    with pytest.raises(ChannelClosedError):
        channel.send(Snapshot(0, 1, 64, True))


def test_a_last_word_waits_for_a_daemon_that_does_not_read() -> None:
    """What was stopped reads on once it goes on, and the process would be gone by then."""
    daemon, trainer = socket.socketpair()
    with daemon, trainer:
        channel, unframer, read = Unhurried(trainer), Unframer(), []
        while len(channel._unsent) < READ_BYTES:
            channel.send(Snapshot(0, 3, 24, True))
        channel.send(Stopped())
        last = threading.Thread(target=channel.finish)
        last.start()
        daemon.settimeout(WAIT_S)
        while Stopped() not in read:
            read += [decode_any(raw, *REPORTS) for raw in unframer.feed(daemon.recv(READ_BYTES))]
        last.join(WAIT_S)
        assert not last.is_alive()
        daemon.close()
        channel._unsent += b"more"
        with pytest.raises(ChannelClosedError):
            channel.finish()


def test_the_end_is_seen_though_a_forked_worker_has_the_socket_too(
    ends: tuple[socket.socket, Channel],
) -> None:
    """A data loader's workers live on for a while, or for as long as the script does."""
    daemon, channel = ends
    with channel._socket.dup():
        channel.send(Leaving())
        channel.close()
        daemon.settimeout(WAIT_S)
        assert daemon.recv(1024) == frame(Leaving())
        assert daemon.recv(1024) == b""
    channel.close()  # once more: nothing to do


@pytest.mark.parametrize("length", [0, MAX_FRAME + 1, 2**32 - 1])
def test_a_length_out_of_bounds_is_refused_before_the_body_comes(length: int) -> None:
    with pytest.raises(Malformed):
        Unframer().feed(length.to_bytes(4, "big"))


@given(st.binary(max_size=300), st.integers(1, 50))
def test_garbage_is_malformed_and_nothing_else(data: bytes, cut: int) -> None:
    unframer = Unframer()
    try:
        for start in range(0, len(data), cut):
            for raw in unframer.feed(data[start : start + cut]):
                decode_any(raw, *COMMANDS)
    except Malformed:
        pass


def test_garbage_on_the_socket(ends: tuple[socket.socket, Channel]) -> None:
    daemon, channel = ends
    daemon.sendall(b"\0\0\0\3abc")
    with pytest.raises(Malformed):
        channel.receive(WAIT_S)
