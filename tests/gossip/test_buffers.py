"""Memory that is used again: never while anybody looks at it, never more than was needed once."""

from __future__ import annotations

import gc

import torch

from gossip.exchange.bodies import as_bytes
from gossip.exchange.buffers import SMALL, Buffers, Whole
from node.bench.noise import joined
from protocols.codecs import RangeCodec

SIZE = 3 * SMALL + 17


def address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def test_what_is_let_go_is_used_again() -> None:
    pool = Buffers()
    first = pool.take(SIZE)
    assert (len(first), first.dtype) == (SIZE, torch.uint8)
    where = address(first)
    del first
    again = pool.take(SIZE - SMALL // 2)
    assert address(again) == where
    assert address(pool.take(SIZE)) != where
    assert pool._mapped == 8 * SMALL


def test_not_while_a_view_of_it_is_left() -> None:
    pool = Buffers()
    first = pool.take(SIZE)
    first.fill_(7)
    views = [as_bytes(first)[5:9], first[SMALL:].view(torch.uint8)]
    where = address(first)
    del first
    gc.collect()
    other = pool.take(SIZE)
    other.fill_(1)
    assert address(other) != where
    assert bytes(views[0]) == b"\x07" * 4
    views.clear()
    assert address(pool.take(SIZE)) == where


def test_blocks_that_do_not_fit_make_room_for_those_that_do() -> None:
    pool = Buffers()
    kept = [pool.take(SIZE) for _ in range(4)]
    del kept
    large = pool.take(3 * SIZE)
    assert pool._mapped <= 16 * SMALL
    del large
    for number in range(1, 30):  # parts change their sizes from round to round
        taken = [pool.take(SIZE + number * SMALL // 3), pool.take(SIZE)]
        assert len(taken[0]) > len(taken[1])
        del taken
    assert pool._mapped <= 17 * SMALL


def test_what_is_small_is_not_kept() -> None:
    pool = Buffers()
    assert len(pool.take(100)) == 100
    assert pool._mapped == 0


def test_parts_of_a_vector_come_to_lie_in_one_piece() -> None:
    codec, size = RangeCodec("fp32", dense=900), 1000
    whole = Whole(size)
    ends = [(600, 1000), (0, 250), (250, 600)]
    parts = {}
    for start, stop in ends:
        parts[start, stop] = whole.take(codec, start, stop)
        codec.encode(start, torch.arange(start, stop).float(), parts[start, stop])
    found = joined([parts[key] for key in sorted(parts)])
    assert found is not None
    assert torch.equal(found.view(torch.float32), torch.arange(size).float())
    assert joined([parts[key] for key in ends]) is None
    assert joined([parts[0, 250], torch.empty(1400, dtype=torch.uint8)]) is None


def test_a_range_that_is_taken_already_is_not_overwritten() -> None:
    whole, codec = Whole(1000), RangeCodec("fp32", dense=900)
    first, second = whole.take(codec, 0, 500), whole.take(codec, 400, 600)
    first.fill_(1)
    second.fill_(2)
    assert first.eq(1).all()
    assert len(second) == 800


def test_other_codecs_have_memory_of_the_size_they_need() -> None:
    whole, codec = Whole(1000), RangeCodec("int8", dense=900)
    assert len(whole.take(codec, 100, 1000)) == codec.encoded_size(100, 1000)
