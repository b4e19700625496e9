"""The ladder of codecs: the finest that fits, and no flutter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.ladder import OVERRUN, ROOM, budget_s, choose
from protocols.codecs import codec
from protocols.errors import LocalProtocolError

RUNGS = ("fp32", "bf16", "int8", "int4", "int2", "top12", "top3")
SIZE = 125e6  # elements


def seconds(bandwidth: float, name: str) -> float:
    """Four islands: 2(N − 1)/N of the bytes through each link."""
    return 1.5 * SIZE * codec(name).bits / 8 / bandwidth


def chosen(bandwidth: float, budget: float, previous: str | None = None) -> str:
    return choose(RUNGS, lambda name: seconds(bandwidth, name), budget, previous)


@pytest.mark.parametrize(
    ("mbit", "expected"),
    [(10_000, "fp32"), (500, "bf16"), (200, "int8"), (100, "int4"), (50, "int2"), (20, "top12"),
     (5, "top3"), (0.1, "top3")],
)  # fmt: skip
def test_slower_links_get_coarser_codecs(mbit: float, expected: str) -> None:
    budget = budget_s(round_s=200.0, exposed=0.05, overlapped=0.0)
    assert chosen(mbit * 125_000, budget) == expected


def test_what_is_hidden_behind_inner_steps_costs_nothing() -> None:
    slow = 100 * 125_000
    assert budget_s(200.0, 0.05, 0.1) == pytest.approx(30.0)
    assert chosen(slow, budget_s(200.0, 0.05, 0.0)) == "int4"
    assert chosen(slow, budget_s(200.0, 0.05, 0.1)) == "bf16"


def test_links_that_vary_by_a_tenth_do_not_change_the_codec() -> None:
    for start in (2e6, 5e6, 1e7, 3e7, 1e8):
        previous = chosen(start, 10.0)
        for turn in range(20):
            now = chosen(start * (1.1 if turn % 2 else 0.92), 10.0, previous)
            if turn:  # the first may still move up to where it belongs
                assert now == previous
            previous = now


def test_down_at_once_and_up_one_by_one() -> None:
    assert chosen(1e5, 10.0, "fp32") == "top3"
    taken, name = [], "top3"
    for _ in range(8):
        name = chosen(1e12, 10.0, name)
        taken.append(name)
    assert taken == [*reversed(RUNGS[:-1]), "fp32", "fp32"]


@given(
    st.lists(st.sampled_from(RUNGS), min_size=1, unique=True),
    st.floats(1e3, 1e13),
    st.floats(0, 1e6),
    st.sampled_from((*RUNGS, None)),
)
def test_the_choice_is_a_rung_that_fits_if_any_does(
    names: list[str], bandwidth: float, budget: float, previous: str | None
) -> None:
    rungs = sorted(names, key=lambda name: -codec(name).bits)
    found = choose(rungs, lambda name: seconds(bandwidth, name), budget, previous)
    assert found in rungs
    if any(seconds(bandwidth, name) <= budget for name in rungs):
        assert seconds(bandwidth, found) <= OVERRUN * budget
    else:
        assert found == rungs[-1] or (
            found == previous and seconds(bandwidth, found) <= OVERRUN * budget
        )
    # and with the same links it comes to rest
    for _ in rungs:
        found = choose(rungs, lambda name: seconds(bandwidth, name), budget, found)
    assert choose(rungs, lambda name: seconds(bandwidth, name), budget, found) == found
    at = rungs.index(found)
    assert not at or seconds(bandwidth, rungs[at - 1]) > ROOM * budget


def test_a_ladder_needs_rungs_and_a_budget() -> None:
    with pytest.raises(LocalProtocolError):
        choose((), lambda _: 1.0, 1.0)
    with pytest.raises(LocalProtocolError):
        choose(RUNGS, lambda _: 1.0, float("nan"))
