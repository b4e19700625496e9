"""Streaming's schedule: who is sent when, and what an island keeps."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco import outer
from diloco.fragments import Schedule, assign, blend, delay_for

schedules = st.integers(1, 60).flatmap(
    lambda h: st.builds(
        Schedule,
        inner_steps=st.just(h),
        fragments=st.integers(1, min(h, 24)),
        delay=st.integers(0, h // 4),
    )
)


@given(schedules)
def test_every_fragment_has_a_turn_of_its_own_in_each_h_steps(one: Schedule) -> None:
    turns = [one.offset(fragment) for fragment in range(one.fragments)]
    assert turns == sorted(set(turns))
    assert turns[0] >= 1
    assert turns[-1] == one.inner_steps
    gaps = [b - a for a, b in itertools.pairwise([0, *turns])]
    assert max(gaps) - min(gaps) <= 1


@given(schedules)
def test_a_result_is_applied_before_the_fragments_next_turn(one: Schedule) -> None:
    for fragment in range(one.fragments):
        assert one.offset(fragment) + one.delay < one.offset(fragment) + one.inner_steps


def test_one_fragment_without_delay_is_diloco() -> None:
    assert Schedule(inner_steps=20).offset(0) == 20


def test_late_results_and_too_many_fragments_are_refused() -> None:
    with pytest.raises(ValueError, match="quarter"):
        Schedule(20, 4, 6)
    with pytest.raises(ValueError, match="do not fit"):
        Schedule(4, 5)


def test_layers_are_strided_and_the_rest_balances() -> None:
    layers = [None, *[n for n in range(6) for _ in range(2)], None]
    sizes = [50, *[10] * 12, 1]
    found = assign(layers, sizes, 3)
    assert found[1:13] == [0, 0, 1, 1, 2, 2] * 2
    load = [sum(s for s, f in zip(sizes, found, strict=True) if f == p) for p in range(3)]
    assert sorted(load) == [40, 41, 90]


def test_more_fragments_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        assign([0, 1], [1, 1], 3)


def test_the_delay_covers_the_transfer_up_to_a_quarter() -> None:
    assert delay_for(3.5, 1.0, 100) == 4
    assert delay_for(0.0, 1.0, 100) == 1
    assert delay_for(1e6, 1.0, 100) == 25
    assert delay_for(9.0, 1.0, 3) == 0
    with pytest.raises(ValueError, match="no delay"):
        delay_for(1.0, 0.0, 10)


def test_blending_keeps_a_share_and_nothing_else() -> None:
    local, common = torch.randn(100), torch.randn(100)
    assert blend(local.clone(), common, 0.0).equal(common)
    assert blend(local.clone(), common, 1.0).equal(local)
    half = blend(local.clone(), common, 0.5)
    assert torch.allclose(half - common, local - half, atol=1e-6)
    with pytest.raises(ValueError, match="alpha"):
        blend(local, common, 1.5)


def test_fragment_by_fragment_is_the_outer_step_of_the_whole() -> None:
    params, merged = torch.randn(40), torch.randn(40)
    whole, cut = params.clone(), params.clone()
    state, states = outer.init(whole), outer.init(cut)
    outer.update(state, merged, whole, lr=0.7, momentum=0.9)
    for pieces in ([(0, 10), (35, 40)], [(10, 15)], [(15, 35)]):
        for start, stop in pieces:
            outer.update(
                outer.OuterState(states.momentum[start:stop]),
                merged[start:stop],
                cut[start:stop],
                lr=0.7,
                momentum=0.9,
            )
    assert whole.equal(cut)


def test_tensors_outside_of_layers_go_the_largest_first_where_least_is() -> None:
    """All islands have to cut the model alike, whatever version they run."""
    assert assign([0, 1, None, None], [10, 10, 1, 30], 2) == [0, 1, 1, 0]
    assert assign([None, 0, 1, None], [7, 10, 12, 7], 2) == [0, 0, 1, 1]
