"""Trees of hashes over chunks, with and without sums, and seals under them."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from gossip_kit import EVERYBODY, RUN
from hypothesis import given
from hypothesis import strategies as st

from gossip.plans.commitments import (
    SEAL_SIZE,
    TreeNode,
    check_seal,
    leaf,
    leaf_of,
    root,
    root_of,
    seal,
    top,
    way,
    way_length,
)
from protocols.errors import BadSignature, Malformed
from protocols.messages import TransferHeader

HEADER = TransferHeader(RUN, 0, 3, 0, 4096, "int4", b"b" * 32, 0)


def tree_of(count: int, seed: int = 0, numbers: bool = False) -> list[TreeNode]:
    dice = random.Random(seed)
    if numbers:
        return [leaf_of(torch.tensor([dice.random(), dice.random()])) for _ in range(count)]
    return [leaf(dice.randbytes(9)) for _ in range(count)]


@given(count=st.integers(1, 70), at=st.integers(0, 10**6), numbers=st.booleans())
def test_each_leaf_leads_to_the_root(count: int, at: int, numbers: bool) -> None:
    leaves, index = tree_of(count, at, numbers), at % count
    beside = way(leaves, index)
    assert len(beside) == way_length(count, index) <= count.bit_length()
    found = top(leaves[index], beside, count, index)
    assert found.hash == root(leaves).hash
    assert torch.equal(found.total, root(leaves).total)


@given(count=st.integers(1, 33), at=st.integers(0, 10**6), other=st.integers(0, 10**6))
def test_nothing_else_does(count: int, at: int, other: int) -> None:
    leaves, index = tree_of(count, at), at % count
    beside, there = way(leaves, index), root(leaves).hash
    assert top(leaf(b"something else"), beside, count, index).hash != there
    for number in range(len(beside)):
        changed = [*beside[:number], leaf(b"else"), *beside[number + 1 :]]
        assert top(leaves[index], changed, count, index).hash != there
    if (elsewhere := other % count) != index:
        try:
            assert top(leaves[index], beside, count, elsewhere).hash != there
        except Malformed:
            assert way_length(count, elsewhere) != len(beside)
    for wrong in (beside[1:], [*beside, beside[0]]) if beside else ([leaf(b"")],):
        with pytest.raises(Malformed):
            top(leaves[index], wrong, count, index)


@pytest.mark.parametrize("index", [-1, 5, 8])
def test_there_is_no_such_leaf(index: int) -> None:
    leaves = tree_of(5)
    with pytest.raises(Malformed):
        top(leaves[0], way(leaves, 0), 5, index)


def test_a_sum_cannot_be_moved_from_one_leaf_to_another() -> None:
    leaves = tree_of(4, numbers=True)
    beside, shift = way(leaves, 1), torch.tensor([0.25, 0.0])
    moved = [dataclasses.replace(beside[0], total=beside[0].total - shift), *beside[1:]]
    found = top(leaf_of(leaves[1].total + shift), moved, 4, 1)
    assert torch.allclose(found.total, root(leaves).total)
    assert found.hash != root(leaves).hash
    kept = dataclasses.replace(leaves[1], total=leaves[1].total + shift)
    assert top(kept, moved, 4, 1).hash != root(leaves).hash


def test_a_node_does_not_pass_for_a_leaf() -> None:
    leaves = tree_of(4)
    inner = root(leaves[:2])
    assert leaf(leaves[0].hash + leaves[1].hash).hash != inner.hash


def test_a_seal_is_of_one_slice_and_one_sender() -> None:
    sender, other, *_ = EVERYBODY
    made = seal(sender, HEADER, tree_of(3))
    assert len(made) == SEAL_SIZE
    assert root_of(made) == root(tree_of(3)).hash
    check_seal(sender.peer_id, dataclasses.replace(HEADER, done=1024), made)
    for who, header, what in (
        (other, HEADER, made),
        (sender, HEADER, bytes(32) + made[32:]),
        (sender, HEADER, made[:-1] + bytes([made[-1] ^ 1])),
        (sender, HEADER, made[:32]),
        (sender, dataclasses.replace(HEADER, round=4), made),
        (sender, dataclasses.replace(HEADER, stop=4095), made),
        (sender, dataclasses.replace(HEADER, codec="int8"), made),
        (sender, dataclasses.replace(HEADER, basis=b"c" * 32), made),
        (sender, dataclasses.replace(HEADER, run=b"q" * 32), made),
    ):
        with pytest.raises(BadSignature):
            check_seal(who.peer_id, header, what)
