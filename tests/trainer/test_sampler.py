"""The sampler: a bijection, disjoint islands, whole coverage, nothing remembered."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.trainer.sampler import FEISTEL_ROUNDS, Sampler, permute

keys = st.lists(st.integers(0, 2**64 - 1), min_size=FEISTEL_ROUNDS, max_size=FEISTEL_ROUNDS).map(
    lambda found: np.array(found, dtype=np.uint64)
)


@given(st.integers(1, 3000), keys)
@settings(deadline=None)
def test_permute_is_a_bijection(size, key):
    image = permute(np.arange(size, dtype=np.uint64), size, key)
    assert np.array_equal(np.sort(image), np.arange(size))


@given(st.integers(1, 2**40), keys, st.data())
@settings(deadline=None)
def test_permute_stays_inside_large_ranges_and_does_not_collide(size, key, data):
    some = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=50))
    image = permute(np.array(sorted(some), dtype=np.uint64), size, key)
    assert image.max() < size
    assert len(np.unique(image)) == len(some)


def test_permute_looks_random():
    key = np.arange(FEISTEL_ROUNDS, dtype=np.uint64)
    image = permute(np.arange(10_000, dtype=np.uint64), 10_000, key).astype(np.float64)
    assert abs(np.corrcoef(np.arange(10_000), image)[0, 1]) < 0.05
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.05


@given(
    tokens=st.integers(64, 4000),
    seq_len=st.integers(1, 32),
    batch_size=st.integers(1, 5),
    slots=st.integers(1, 6),
    round=st.integers(0, 2**40),
    seed=st.integers(0, 2**63 - 1),
)
@settings(deadline=None)
def test_islands_of_a_round_share_no_token_until_all_windows_are_read(
    tokens, seq_len, batch_size, slots, round, seed
):
    sampler = Sampler(tokens, seq_len, batch_size, seed)
    read = []
    for step in range(sampler.windows // (batch_size * slots)):
        for slot in range(slots):
            read.append(sampler.starts(round, slot, slots, step))
    if not read:
        return
    starts = np.sort(np.concatenate(read))
    assert starts[0] >= 0
    assert starts[-1] + seq_len + 1 <= tokens
    assert (np.diff(starts) >= seq_len).all()  # inputs do not overlap


def test_the_corpus_is_read_whole_before_any_window_is_read_twice():
    sampler = Sampler(tokens=8 * 41, seq_len=8, batch_size=4, seed=1)
    assert sampler.windows == 40
    rows = [sampler.starts(3, slot, 2, step) for step in range(10) for slot in range(2)]
    first, second = np.concatenate(rows[:10]), np.concatenate(rows[10:])
    assert len(np.unique(first)) == len(np.unique(second)) == 40
    assert not np.array_equal(first, second)


def test_an_epoch_may_end_inside_a_batch():
    sampler = Sampler(tokens=8 * 8, seq_len=8, batch_size=5, seed=1)
    assert sampler.windows == 7
    read = np.concatenate([sampler.starts(0, 0, 1, step) for step in range(7)])
    for epoch in read.reshape(5, 7):
        assert len(np.unique(epoch)) == 7


@given(st.integers(1, 8), st.data())
@settings(deadline=None)
def test_a_batch_may_be_cut_anywhere(batch_size, data):
    sampler = Sampler(10_000, 16, batch_size, seed=2)
    cut = data.draw(st.integers(0, batch_size))
    parts = [sampler.starts(4, 1, 3, 9, rows) for rows in (range(cut), range(cut, batch_size))]
    assert np.array_equal(np.concatenate(parts), sampler.starts(4, 1, 3, 9))


def test_seed_round_slot_and_step_all_matter():
    sampler, other = Sampler(10**6, 64, 8, seed=0), Sampler(10**6, 64, 8, seed=1)
    draws = [
        sampler.starts(0, 0, 2, 0), other.starts(0, 0, 2, 0), sampler.starts(1, 0, 2, 0),
        sampler.starts(0, 1, 2, 0), sampler.starts(0, 0, 2, 1),
    ]  # fmt: skip
    assert len({draw.tobytes() for draw in draws}) == len(draws)
    assert np.array_equal(Sampler(10**6, 64, 8, seed=0).starts(0, 0, 2, 0), draws[0])


def test_the_order_is_part_of_the_protocol():
    """Anyone can recompute who read what only while these numbers stay."""
    got = Sampler(10**6, 64, 4, seed=7).starts(round=3, slot=1, slots=2, step=5)
    assert got.tolist() == [978924, 350188, 162476, 382380]


def test_what_has_no_place_is_refused():
    with pytest.raises(ValueError, match="too few"):
        Sampler(31, 16, 1, 0)
    sampler = Sampler(1000, 16, 4, 0)
    for arguments in [(0, 2, 2, 0), (0, -1, 2, 0), (-1, 0, 1, 0), (0, 0, 1, -1)]:
        with pytest.raises(ValueError, match="no such place"):
            sampler.starts(*arguments)
    with pytest.raises(ValueError, match="outside a batch"):
        sampler.starts(0, 0, 1, 0, range(2, 5))


# -- windows over a whole run


def reads(sampler, islands):
    """(round, slot, steps) to the starts read; ``islands``: a list of rounds, each of steps."""
    return {
        (round, slot, step): sampler.starts(round, slot, len(steps), step)
        for round, steps in enumerate(islands)
        for slot, taken in enumerate(steps)
        for step in range(taken)
    }


@given(
    rounds=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), min_size=1, max_size=12),
    batch_size=st.integers(1, 4),
    seq_len=st.integers(1, 9),
    pool=st.sampled_from([0, 1, 7, 40]),
    seed=st.integers(0, 2**63 - 1),
)
@settings(deadline=None, max_examples=60)
def test_no_window_is_read_twice_in_an_epoch(rounds, batch_size, seq_len, pool, seed):
    """Whatever number of islands comes to a round, and however many steps each of them takes."""
    reserved = max(len(steps) * max(steps) * batch_size for steps in rounds) or 1
    tokens = (len(rounds) * reserved + pool + 1) * seq_len + seq_len
    sampler = Sampler(tokens, seq_len, batch_size, seed, reserved, pool)
    assert sampler.rounds >= len(rounds)
    found = reads(sampler, rounds)
    if not found or not any(map(len, found.values())):
        return
    starts = np.sort(np.concatenate(list(found.values())))
    assert starts[0] >= 0
    assert starts[-1] + seq_len + 1 <= tokens
    assert (np.diff(starts) >= seq_len).all()
    # and any one of these reads can be had without the others
    again = Sampler(tokens, seq_len, batch_size, seed, reserved, pool)
    place = list(found)[seed % len(found)]
    assert np.array_equal(again.starts(*place[:2], len(rounds[place[0]]), place[2]), found[place])


def test_an_epoch_ends_after_its_rounds_and_the_next_one_has_another_order():
    sampler = Sampler(8 * 101, 8, 5, seed=3, reserved=20)
    assert (sampler.windows, sampler.rounds) == (100, 5)
    epochs = [
        np.concatenate([sampler.starts(r, s, 2, t) for t in range(2) for s in range(2)])
        for r in range(10)
    ]
    first, second = np.concatenate(epochs[:5]), np.concatenate(epochs[5:])
    assert len(np.unique(first)) == len(np.unique(second)) == 100
    assert not np.array_equal(first, second)


def test_who_goes_on_too_long_leaves_the_windows_of_later_rounds_alone_no_more():
    sampler = Sampler(8 * 101, 8, 5, seed=3, reserved=20)
    late = np.concatenate([sampler.starts(0, 0, 2, step) for step in range(12)])
    assert len(late) == 60  # reads on, from the whole corpus
    inside = np.concatenate([sampler.starts(0, s, 2, step) for step in range(2) for s in range(2)])
    assert len(np.unique(inside)) == 20


def test_what_is_read_at_one_time_lies_in_few_pools():
    sampler = Sampler(64 * 10_001, 64, 8, seed=5, reserved=400, pool=500)
    for round in range(3):
        at = np.concatenate([sampler.starts(round, s, 4, t) for t in range(10) for s in range(4)])
        assert len(np.unique(at // (64 * 500))) <= 3  # an offset may reach into a neighbour
    everything = np.concatenate(
        [sampler.starts(r, s, 4, t) for r in range(25) for t in range(12) for s in range(4)]
    )
    assert len(np.unique(everything)) == 25 * 12 * 4 * 8


def test_what_fills_no_whole_pool_is_read_in_other_epochs():
    """An epoch has as many windows as before, all apart; another one reaches the rest."""
    sampler = Sampler(16 * 191 + 5, 16, 2, seed=1, reserved=20, pool=100)
    assert (sampler.windows, sampler.rounds) == (100, 5)
    read = np.zeros(16 * 191 + 5, dtype=bool)
    for epoch in range(40):
        rounds = range(5 * epoch, 5 * epoch + 5)
        found = [sampler.starts(r, s, 2, t) for r in rounds for t in range(5) for s in range(2)]
        starts = np.sort(np.concatenate(found))
        assert len(starts) == 100
        assert (np.diff(starts) == 16).all()
        assert starts[0] >= 0
        assert starts[-1] + 17 <= len(read)
        read[starts[0] : starts[-1] + 17] = True
    assert read[100:-100].all()


@pytest.mark.parametrize(
    ("pool", "order"),
    [
        (0, [[267, 539], [1199, 1215]]),
        (50, [[1387, 1371], [1215, 1295]]),
        (1000, [[267, 539], [1199, 1215]]),  # more than the corpus has
    ],
)
def test_the_order_is_part_of_the_protocol_with_whole_pools_too(pool, order):
    sampler = Sampler(16 * 101 + 5, 16, 2, seed=1, reserved=20, pool=pool)
    assert [sampler.starts(round, 1, 2, 3).tolist() for round in (0, 7)] == order


def test_steps_computed_together_read_what_each_reads_by_itself():
    sampler = Sampler(tokens=40_000, seq_len=8, batch_size=3, seed=5, reserved=60)
    for step in (0, 1, 15, 16, 33):  # beyond the round's own windows as well
        alone = sampler.compute(2, 1, 2, range(3 * step, 3 * step + 3))
        assert sampler.starts(2, 1, 2, step).tolist() == alone.tolist()
        assert sampler.starts(2, 1, 2, step, range(1, 3)).tolist() == alone[1:].tolist()
