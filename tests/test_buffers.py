"""Memory that is used again: never while anybody looks at it, never more than was needed once."""

from __future__ import annotations

import gc

import torch

from gossip.bodies import as_bytes
from gossip.buffers import SMALL, Buffers

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
    assert pool.mapped == 8 * SMALL


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
    assert pool.mapped <= 16 * SMALL
    del large
    for number in range(1, 30):  # parts change their sizes from round to round
        taken = [pool.take(SIZE + number * SMALL // 3), pool.take(SIZE)]
        assert len(taken[0]) > len(taken[1])
        del taken
    assert pool.mapped <= 17 * SMALL


def test_what_is_small_is_not_kept() -> None:
    pool = Buffers()
    assert len(pool.take(100)) == 100
    assert pool.mapped == 0
