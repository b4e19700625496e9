"""What the fault matrix counts as sent again, and what it takes for an honest deadline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fault_kit import MBIT, PATIENCE, RANGES, SIZE
from fault_limits import honest
from fault_traffic import Move, Repeats, repeats

from gossip.membership.members import Patience
from gossip.membership.trips import RoundTrip, stillness_s
from protocols.codecs import CHUNK

LENGTH = RANGES.encoded_size(0, 2 * CHUNK)
SLICE = Move(False, "a", 1, 0, 2 * CHUNK, 0, 0, LENGTH, given=LENGTH, began=0.0)
PART = replace(SLICE, merged=True)


def again(*moves: Move, came: tuple[Move, ...] = ()) -> Repeats:
    """What is sent again, all by one sender and in this order."""
    dated = [("me", replace(move, began=1.0 + k)) for k, move in enumerate(moves)]
    return repeats(dated, came, RANGES)


def test_what_is_sent_once_is_not_sent_again() -> None:
    other = replace(SLICE, start=2 * CHUNK, stop=4 * CHUNK)
    assert again(SLICE, other, PART, replace(PART, to="b")) == Repeats()


def test_a_slice_is_sent_once_to_anybody_and_a_part_once_to_each() -> None:
    assert again(SLICE, replace(SLICE, to="b")) == Repeats(needless=2 * CHUNK)
    assert again(PART, replace(PART, to="b"), PART) == Repeats(needless=2 * CHUNK)


def test_what_resumes_where_the_last_transfer_broke_off_sends_nothing_again() -> None:
    half = LENGTH // 2
    broken = replace(SLICE, given=half + 7)
    rest = replace(SLICE, done=CHUNK, length=half, given=half)
    assert again(broken, rest) == Repeats()
    assert again(broken, SLICE) == Repeats(broken=CHUNK)
    pulled = replace(PART, skip=half, length=half, given=half)
    assert again(replace(PART, given=half), pulled) == Repeats()


def test_slices_of_what_somebody_has_merged_are_needless_and_so_is_its_part_for_that_one() -> None:
    came = (PART,)
    assert again(SLICE, came=came) == Repeats(needless=2 * CHUNK)
    assert again(PART, came=came) == Repeats(needless=2 * CHUNK)
    assert again(replace(PART, to="b"), came=came) == Repeats()
    late = (replace(PART, began=9.0),)
    assert again(SLICE, came=late) == Repeats()


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_no_round_trips_on_these_links_ask_for_more_than_is_honest(every: int) -> None:
    """Whatever the queues do: here they are full all the time, or one time of some."""
    most = honest(RANGES.encoded_size(0, SIZE), MBIT, None, PATIENCE, 0.0)
    trips = [RoundTrip.first(0.0), RoundTrip.first(0.0)]
    asked = 0.0
    for k in range(200):
        for trip in trips:
            trip.add(0.2 if k % every == 0 else 0.0)
        asked = max(asked, stillness_s(trips, 1.0))
    assert 0.5 < asked <= most.patience < 2.5


def test_a_busy_machine_allows_more_but_not_any_patience() -> None:
    quiet, busy, stuck = (honest(SIZE, MBIT, None, Patience(), lag) for lag in (0.0, 0.1, 10.0))
    assert quiet.patience < busy.patience < stuck.patience < 8.0
