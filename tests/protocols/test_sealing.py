"""Sealed frames: all that was sealed comes out, in order, and nothing else ever does."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.connections import sealing, tls
from protocols.connections.sealing import (
    KEY_BYTES,
    MAX_FRAME_BYTES,
    OVERHEAD,
    Broken,
    Opener,
    Sealer,
)
from protocols.connections.tls import PeerSSLSocket
from protocols.identity import Identity

KEY = bytes(range(KEY_BYTES))
A, B = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))

pieces = st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=12)


def sealed(inside: list[bytes], key: bytes = KEY) -> list[bytes]:
    sealer = Sealer(key)
    return [bytes(sealer.seal(memoryview(piece))) for piece in inside]


def opened(opener: Opener, stream: bytes, out: bytearray, *, at_once: int, room: int) -> bytes:
    """What comes out if ``at_once`` bytes come at a time and ``room`` are taken at a time."""
    into = memoryview(bytearray(room))
    while stream:
        free = opener.room()
        count = min(len(free), at_once, len(stream))
        free[:count] = stream[:count]
        opener.took(count)
        stream = stream[count:]
        while put := opener.open(into):
            out += into[:put]
    return bytes(out)


@given(pieces, st.integers(1, 700), st.integers(1, 700))
def test_whatever_the_pieces_all_comes_out_in_order(
    inside: list[bytes], at_once: int, room: int
) -> None:
    stream = b"".join(sealed(inside))
    assert opened(Opener(KEY), stream, bytearray(), at_once=at_once, room=room) == b"".join(inside)


@given(pieces, st.data())
def test_a_changed_bit_opens_nothing_from_its_frame_on(
    inside: list[bytes], data: st.DataObject
) -> None:
    frames = sealed(inside)
    stream = bytearray(b"".join(frames))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] ^= 1 << data.draw(st.integers(0, 7))
    whole, end = 0, 0
    while at >= end + len(frames[whole]):
        end += len(frames[whole])
        whole += 1
    stream += bytes(MAX_FRAME_BYTES)  # a changed length waits for no more than a frame can hold
    out = bytearray()
    with pytest.raises(Broken):
        opened(Opener(KEY), bytes(stream), out, at_once=10**6, room=400)
    assert bytes(out) == b"".join(inside[:whole])


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=2, max_size=6), st.data())
def test_frames_left_out_doubled_or_moved_do_not_open(
    inside: list[bytes], data: st.DataObject
) -> None:
    frames = sealed(inside)
    first, second = data.draw(st.permutations(range(len(frames))))[:2]
    kind = data.draw(st.sampled_from(["left out", "doubled", "moved"]))
    if kind == "left out":
        del frames[min(first, second)]
    elif kind == "doubled":
        frames.insert(first, frames[first])
    else:
        frames[first], frames[second] = frames[second], frames[first]
    with pytest.raises(Broken):
        opened(Opener(KEY), b"".join(frames), bytearray(), at_once=10**6, room=100)


def test_what_follows_a_frame_that_was_taken_out_never_opens() -> None:
    """Asked once more, an end would be at the number of the frame that came instead."""
    opener, into = Opener(KEY), memoryview(bytearray(100))
    frames = sealed([b"first", b"second", b"third"])
    stream = frames[0] + frames[2]
    opener.room()[: len(stream)] = stream
    opener.took(len(stream))
    assert opener.open(into) == 5
    for _ in range(3):
        with pytest.raises(Broken):
            opener.open(into)


def test_another_key_opens_nothing() -> None:
    with pytest.raises(Broken):
        opened(Opener(bytes(KEY_BYTES)), sealed([b"x"])[0], bytearray(), at_once=100, room=100)


@given(
    st.lists(st.sampled_from([1, 16_363, 16_364, 16_365, 100_000, MAX_FRAME_BYTES]), max_size=5),
    st.sampled_from([1_000, 16_384, 10**6]),
    st.sampled_from([1_000, MAX_FRAME_BYTES]),
)
@settings(max_examples=30, deadline=None)
def test_frames_of_all_lengths_come_out_as_the_buffer_grows(
    lengths: list[int], at_once: int, room: int
) -> None:
    inside = [os.urandom(length) for length in lengths]
    stream = b"".join(sealed(inside))
    assert opened(Opener(KEY), stream, bytearray(), at_once=at_once, room=room) == b"".join(inside)


def test_an_announced_length_takes_no_memory_before_the_bytes_come() -> None:
    (frame,) = sealed([bytes(MAX_FRAME_BYTES)])
    opener, came, into = Opener(KEY), 0, memoryview(bytearray(MAX_FRAME_BYTES))
    while came < len(frame):
        room = opener.room()
        assert 0 < len(room) <= max(came, 1 << 14)
        count = min(len(room), 5 if came < 10 else len(room))
        room[:count] = frame[came : came + count]
        opener.took(count)
        came += count
        assert (opener.open(into) == MAX_FRAME_BYTES) == (came == len(frame))


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_length_that_nobody_may_send_takes_no_memory(length: int) -> None:
    opener = Opener(KEY)
    before = len(opener.room())
    with pytest.raises(Broken):
        opened(opener, length.to_bytes(4, "big") + bytes(100), bytearray(), at_once=104, room=100)
    assert len(opener._buffer) == before


def test_the_longest_frame_is_opened_where_it_is_wanted() -> None:
    inside = os.urandom(MAX_FRAME_BYTES)
    frame = sealed([inside])[0]
    assert len(frame) == MAX_FRAME_BYTES + OVERHEAD
    assert opened(Opener(KEY), frame, bytearray(), at_once=60_000, room=MAX_FRAME_BYTES) == inside


def test_keys_wear_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key seals so many frames; then both ends derive the next one."""
    monkeypatch.setattr(sealing, "FRAMES_A_KEY", 3)
    inside = [b"the same"] * 10
    frames = sealed(inside)
    assert len(set(frames)) == 10  # no nonce is used twice under one key
    assert opened(Opener(KEY), b"".join(frames), bytearray(), at_once=50, room=50) == b"".join(
        inside
    )
    monkeypatch.setattr(sealing, "FRAMES_A_KEY", 4)  # an end that does not change keys in time
    with pytest.raises(Broken):
        opened(Opener(KEY), b"".join(frames), bytearray(), at_once=50, room=50)


# --- on a socket ----------------------------------------------------------------------------------


@contextmanager
def connected() -> Iterator[tuple[PeerSSLSocket, PeerSSLSocket]]:
    """The two ends of a lane, hands shaken."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(10)
    name = tls.server_name(B.peer_id)
    with ThreadPoolExecutor() as pool:
        server = pool.submit(tls.server_context(B).wrap_socket, theirs, server_side=True)
        client = tls.client_context(A).wrap_socket(ours, server_hostname=name)
        server_end = server.result(10)
    assert isinstance(client, PeerSSLSocket)
    assert isinstance(server_end, PeerSSLSocket)
    with client, server_end:
        yield client, server_end


def receive(sock: socket.socket, length: int) -> bytes:
    out = bytearray(length)
    at = 0
    while at < length:
        count = sock.recv_into(memoryview(out)[at:])
        assert count
        at += count
    return bytes(out)


def test_both_directions_are_sealed_under_keys_of_their_own() -> None:
    with connected() as (client, server):
        assert (client.peer_id, server.peer_id) == (B.peer_id, A.peer_id)
        for _ in range(3):
            assert client.send(b"a question") == 10
            assert receive(server, 10) == b"a question"
            assert server.send(b"an answer") == 9
            assert receive(client, 9) == b"an answer"
        assert client._own_first == server._their_first
        assert server._own_first == client._their_first != client._own_first
        assert client._own_first[-KEY_BYTES:] != bytes(KEY_BYTES)


def test_what_passes_by_is_not_readable_and_cannot_be_changed() -> None:
    with connected() as (client, server):
        client.send(b"the key, and a first frame")
        assert receive(server, 26)
        client.send(b"a secret")
        raw = bytearray(socket.socket.recv(server, 1000))
        assert len(raw) == 8 + OVERHEAD
        assert b"secret" not in raw
        raw[10] ^= 1
        socket.socket.send(client, raw)  # as one in the middle would
        with pytest.raises(Broken):
            receive(server, 8)


def test_a_piece_that_did_not_fit_is_sent_on_with_the_same_call() -> None:
    data = os.urandom(MAX_FRAME_BYTES)
    with connected() as (client, server), ThreadPoolExecutor() as pool:
        client.send(b"first")
        receive(server, 5)
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.send(data)  # socketpairs take a part of it
        client.setblocking(True)
        reading = pool.submit(receive, server, len(data))
        assert client.send(data) == len(data)
        assert reading.result(10) == data
