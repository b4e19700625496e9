"""Bodies packed for slow links: nothing is lost, less is sent, and nobody is flooded."""

from __future__ import annotations

import os
import sys
from math import inf

import pytest
import torch
from http_kit import A, B, address
from hypothesis import given
from hypothesis import strategies as st

from protocols.bodies import BufferDrain, BufferFeed
from protocols.codecs import RangeCodec
from protocols.errors import Malformed
from protocols.http.transport import HttpTransport
from protocols.identity import PeerId
from protocols.lanes import lane
from protocols.lanes.packing import (
    DENSEST,
    MOST,
    PIECE,
    PLAIN,
    SMALLEST,
    WIDTHS,
    Packer,
    Unpacker,
    packer,
)
from protocols.transport import Feed, Incoming

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SIZE = 1_000_000  # elements


class Gaps:
    """A drain with room for a few bytes, and every other time for none."""

    def __init__(self, rooms: list[int]) -> None:
        self.data = bytearray()
        self.rooms = rooms
        self.asked = 0

    def attach(self, wake: object) -> None:
        """The test asks again by itself."""

    def room(self) -> memoryview | None:
        self.asked += 1
        if self.asked % 2:
            return None
        self.scratch = bytearray(self.rooms[self.asked // 2 % len(self.rooms)])
        return memoryview(self.scratch)

    def took(self, count: int) -> None:
        self.data += self.scratch[:count]


def packed(body: bytes, piece: int = PIECE) -> bytes:
    packer = Packer()
    return b"".join(packer.pack(body[at : at + piece]) for at in range(0, len(body), piece))


def pour(unpacker: Unpacker, data: bytes, most: int = PIECE) -> int:
    """Give it what has come, ``most`` bytes at a time, and no more than it knows of."""
    at, refused, most_refused = 0, 0, 100 + 10 * (len(data) + unpacker.left)
    while unpacker.to_come:
        room = unpacker.room()
        if room is None:
            refused += 1
            assert refused < most_refused
            continue
        count = min(len(room), most, unpacker.to_come, len(data) - at)
        if not count:  # all has come, or nothing more comes
            break
        room[:count] = data[at : at + count]
        at += count
        unpacker.took(count)
    return at


HEAD = 5


def piece(kind: int, data: bytes, size: int) -> bytes:
    return bytes([kind]) + (size - 1).to_bytes(2, "big") + (len(data) - 1).to_bytes(2, "big") + data


def frame(data: bytes) -> bytes:
    """As short as a piece may be, at least."""
    packed = zstd.compress(data, options={zstd.CompressionParameter.window_log: 16})
    return packed.ljust(min(len(data), PIECE) // DENSEST, b"\0")


@given(
    st.binary(max_size=3000),
    st.integers(0, 60),
    st.sampled_from([SMALLEST, 5000, PIECE]),
    st.integers(1, 5000),
    st.lists(st.integers(1, 4000), min_size=1, max_size=4),
)
def test_a_body_comes_out_as_it_went_in(
    some: bytes, often: int, piece: int, arrive: int, rooms: list[int]
) -> None:
    body = some * often
    sent, drain = packed(body, piece), Gaps(rooms)
    unpacker = Unpacker(drain, len(body))
    assert pour(unpacker, sent, arrive) == len(sent)
    assert unpacker.to_come == 0
    assert drain.data == body
    assert unpacker.left == 0


@pytest.mark.parametrize("codec", ["int2", "int4", "int8", "bf16", "fp16", "fp32"])
def test_what_the_codecs_leave_gets_shorter(codec: str) -> None:
    """Of normal values; those with heavy tails, as pseudo-gradients have, get shorter still."""
    at_most = {"int2": 0.96, "int4": 0.93, "int8": 0.94, "bf16": 0.68, "fp16": 0.86, "fp32": 0.85}
    values = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    ranges = RangeCodec(codec, SIZE)
    encoded = torch.empty(ranges.encoded_size(0, SIZE), dtype=torch.uint8)
    ranges.encode(0, values, encoded)
    body = encoded.numpy().tobytes()
    sent = packed(body)
    assert len(sent) < at_most[codec] * len(body)
    target = bytearray(len(body))
    assert pour(Unpacker(BufferDrain(target), len(body)), sent) == len(sent)
    assert target == body


def test_what_is_dense_already_costs_five_bytes_a_piece() -> None:
    body = os.urandom(40 * PIECE)
    assert len(packed(body)) == len(body) + HEAD * 40


def test_a_dense_stretch_is_passed_over_and_the_rest_is_packed() -> None:
    body = os.urandom(PIECE) + bytes(40 * PIECE)
    assert len(packed(body)) < 16 * PIECE + 25 * PIECE / 15


def test_a_piece_is_never_more_than_so_dense() -> None:
    """What comes tells of a lane's pace, and of the time that unpacking takes."""
    for body in (bytes(PIECE), bytes(PIECE - 3), b"atoll" * 1000, bytes(range(16)) * 300):
        sent = packed(body)
        assert len(body) // DENSEST <= len(sent) - HEAD <= len(body) // DENSEST + 100
        target = bytearray(len(body))
        assert pour(Unpacker(BufferDrain(target), len(body)), sent) == len(sent)
        assert target == body


def test_zeros_at_the_beginning_do_not_spoil_the_rest() -> None:
    """They pack alike in any order, and so does what has but one kind of bytes."""
    numbers = torch.randn(8 * PIECE).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert len(packed(bytes(PIECE) + numbers)) < 0.69 * len(numbers) + PIECE / 15


def test_another_kind_of_numbers_is_found_before_long() -> None:
    bf16 = torch.randn(4 * PIECE).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    fp32 = torch.randn(12 * PIECE).view(torch.uint8).numpy().tobytes()
    assert len(packed(bf16 + fp32)) < 0.7 * len(bf16) + 0.87 * len(fp32)


@given(st.binary(max_size=4000), st.integers(0, 5000))
def test_garbage_is_refused_or_fills_no_more_than_was_announced(data: bytes, size: int) -> None:
    target = bytearray(size)
    unpacker = Unpacker(BufferDrain(target), size)
    try:
        pour(unpacker, data)
    except Malformed:
        return
    assert 0 <= unpacker.left <= size
    assert unpacker.to_come <= PIECE


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (piece(3 | 8, b"xyz", 6000), "kind 11"),
        (piece(1, b"xyz", 6000), "kind 1,"),  # no plane
        (piece(1 | 16, b"xyz", 6000), "kind 17"),  # one that there is not
        (piece(2 | 32, b"xyz", 6000), "kind 34"),
        (piece(PLAIN, bytes(5000), 6000), "5000 bytes for 6000"),
        (piece(PLAIN, bytes(6000), 5000), "6000 bytes for 5000"),
        (piece(9, bytes(5001), 5000), "5001 bytes for 5000"),
        (piece(PLAIN, bytes(6001), 6001), "6001 bytes, of a body that lacks 6000"),
        (piece(PLAIN, b"x", 1), "1 bytes, of"),
        (piece(9, frame(os.urandom(4095)), 4095), "4095 bytes, of"),
        (piece(9, frame(bytes(4999)), 5000), "5000 bytes"),
        (piece(9, frame(bytes(5001)), 5000), "5000 bytes"),
        (piece(9, b"\xff" * 500, 5000), "unpack"),
        (piece(9, frame(b"x" * 5000)[:-1], 5000), "311 bytes for 5000"),  # it is too dense
        (piece(9, frame(os.urandom(2000) + bytes(3000))[:-1], 5000), "end"),
        (piece(9, frame(bytes(5000)) + b"more", 5000), "end"),
        (piece(2 | 8, frame(os.urandom(2500)) + bytes(2300), 5000), "unpack|end"),
        (piece(2 | 8, bytes(400), 5000), "end|unpack"),  # less than the other plane has
        (piece(2 | 24, frame(bytes(2500)) + bytes(200), 5000), "5000 bytes"),
        (piece(9, frame(b"") + bytes(400), 5000), "5000 bytes"),
        (piece(9, frame(bytes(10_000_000))[:4000], 5000), "unpack|end"),  # a bomb
        (piece(9, b"\x28\xb5\x2f\xfd\x04\x88" + frame(bytes(5000))[6:], 5000), "memory"),
    ],
)
def test_a_piece_that_nobody_may_send_is_refused(sent: bytes, why: str) -> None:
    unpacker = Unpacker(BufferDrain(bytearray(6000)), 6000)
    with pytest.raises(Malformed, match=why):
        pour(unpacker, sent)
    assert unpacker.left == 6000


@pytest.mark.parametrize(
    ("width", "mask"), [(width, mask) for width in WIDTHS for mask in range(1, 1 << width)]
)
@pytest.mark.parametrize("length", [5_001, 5_002, 5_003, 5_004])
def test_planes_come_together_again_at_any_length(width: int, mask: int, length: int) -> None:
    body = (bytes(range(0, 64, 8)) * 700)[:length]
    count = length // width
    planes = [body[place : count * width : width] for place in range(width)]
    some = [plane for place, plane in enumerate(planes) if mask >> place & 1]
    rest = [plane for place, plane in enumerate(planes) if not mask >> place & 1]
    tail = body[count * width :]
    target = bytearray(length)
    sent = piece(width | mask << 3, b"".join((frame(b"".join(some)), *rest, tail)), length)
    assert pour(Unpacker(BufferDrain(target), length), sent) == len(sent)
    assert target == body


@pytest.mark.parametrize(
    ("cores", "rate", "to_peer", "hosts", "least"),
    [
        (2, inf, inf, 1, None),  # nothing is known yet
        (2, 12.5e6, 6e6, 3, 0.03),  # 100 Mbit
        (2, 25e6, 9e6, 3, 0.05625),  # 200 Mbit: int4
        (2, 62.5e6, 21e6, 3, 0.140625),  # 500 Mbit: not int4 any more, but fp32
        (4, 62.5e6, 21e6, 3, 0.0703125),  # int4 again
        (64, 62.5e6, 21e6, 3, 0.0703125),
        (2, 125e6, 42e6, 3, 0.28125),  # 1 Gbit: bf16 alone
        (64, 500e6, 120e6, 3, None),  # 4 Gbit, and its share of one of three peers
        (64, 500e6, 32e6, 15, None),  # and of one of fifteen
        (2, 250e6, 4e6, 3, 0.03),  # a fast node, and peers behind slow links
    ],
)
def test_the_faster_a_link_the_more_has_to_be_gained(
    cores: int, rate: float, to_peer: float, hosts: int, least: float | None
) -> None:
    found = packer(rate, to_peer, hosts, cores)
    assert (found and found.gain) == (least if least is None else pytest.approx(least))


@pytest.mark.parametrize(
    ("rate", "to_peer", "size"),
    [(2.5e6, inf, 62_500), (12.5e6, 6e6, PIECE), (12.5e6, 2e5, 20_000), (1e4, inf, SMALLEST)],
)
def test_a_piece_is_no_longer_under_way_than_who_waits_for_it_bears(
    rate: float, to_peer: float, size: int
) -> None:
    """What has come of one is no progress of the body."""
    found = packer(rate, to_peer, 4, 2)
    assert found is not None
    assert found.size == size


def test_what_gains_too_little_for_the_link_goes_as_it_is() -> None:
    body = (torch.randn(PIECE) * 20).to(torch.int8).numpy().tobytes()  # a fifth can be saved
    assert len(Packer(0.1).pack(body)) < 0.9 * PIECE
    assert len(Packer(MOST - 0.01).pack(body)) == PIECE + HEAD


@pytest.mark.parametrize(
    ("limit", "near", "packs"), [(2e6, False, True), (2e9, False, False), (2e6, True, False)]
)
async def test_a_node_packs_both_ways_where_its_link_is_slow(
    monkeypatch: pytest.MonkeyPatch, limit: float, near: bool, packs: bool
) -> None:
    """What is counted, and measured as the link's speed, is what went over it."""
    monkeypatch.setattr(lane, "same_machine", lambda sock: near)
    data = torch.randn(250_000).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    got = bytearray(len(data))

    async def take(peer: PeerId, header: bytes, body: Incoming) -> bytes:
        await body.into(BufferDrain(got))
        return b"ok"

    async def give(peer: PeerId, header: bytes) -> Feed:
        return BufferFeed(data)

    async with (
        HttpTransport(A, listen="127.0.0.1:0", max_upload=limit) as a,
        HttpTransport(B, max_upload=limit) as b,
    ):
        b.book.add(a.peer_id, address(a))
        a.on_push("take", take, max_length=len(data))
        a.on_pull("give", give)
        assert await b.push(a.peer_id, "take", b"", BufferFeed(data), timeout=10) == b"ok"
        assert got == data
        got[:] = bytes(len(got))
        async with b.pull(a.peer_id, "give", b"", max_length=len(data), timeout=10) as incoming:
            await incoming.into(BufferDrain(got))
        assert got == data
        pushed, pulled = b.stats.out_by_name["take"], b.stats.in_by_name["give"]
        assert (a.stats.in_by_name["take"], pulled) == (
            pushed,
            b.stats.peer(a.peer_id).bytes_in - 2,
        )
    assert [count < 0.7 * len(data) for count in (pushed, pulled)] == [packs, packs]
    assert [count == len(data) for count in (pushed, pulled)] == [not packs, not packs]
