"""Counts of a part as runs: equal counts are equal bytes, and hostile bytes are refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.bounds import MAX_PEERS
from protocols.counts import MAX_BYTES, included_in, pack_counts, runs_of
from protocols.errors import Malformed


def packed(*runs: tuple[int, int, int]) -> bytes:
    """Runs as they travel: first contributor, how many, elements of each."""
    return b"".join(struct.pack(">HHQ", *run) for run in runs)


@given(st.lists(st.integers(0, 3), max_size=40))
def test_counts_come_back_as_they_were(elements: list[int]) -> None:
    found = dict(included_in(pack_counts(elements)))
    assert found == {index: count for index, count in enumerate(elements) if count}


def test_as_many_contributors_as_a_round_has_fit() -> None:
    alike, unlike = [7] * MAX_PEERS, [1 + index % 2 for index in range(MAX_PEERS)]
    assert pack_counts(alike) == packed((0, MAX_PEERS, 7))
    assert len(pack_counts(unlike)) == MAX_BYTES
    assert len(included_in(pack_counts(unlike))) == MAX_PEERS


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        (packed((0, 2, 5))[:-1], "end in the middle"),
        (packed((0, 0, 5)), "canonical"),
        (packed((1, 2, 0)), "canonical"),
        (packed((0, 2, 5), (1, 1, 6)), "canonical"),  # one of them twice
        (packed((3, 1, 5), (0, 1, 6)), "canonical"),
        (packed((0, 2, 5), (2, 1, 5)), "canonical"),  # one run, cut in two
        (packed((MAX_PEERS, 1, 5)), "more contributors"),
        (packed((0, 2**16 - 1, 5)), "more contributors"),
    ],
)
def test_bytes_that_no_counts_have_are_refused(counts: bytes, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        runs_of(counts)
    with pytest.raises(Malformed, match=why):
        included_in(counts)
