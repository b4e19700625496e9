"""How much of what earlier plans asked for is kept, and that nothing is counted on that is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from gossip_kit import EVERYBODY, PLACE, adopt, plan_of, results_of
from hypothesis import given
from hypothesis import strategies as st

from gossip.chain.reports import Reports
from gossip.exchange.retaining import Retention, keys_of
from gossip.plans.certificate import outcome_of
from gossip.plans.validity import PartKey, key_of
from protocols.identity import PeerId

SIZE = 100
PEER = PeerId("p")


def cut(basis: int, ends: list[int]) -> list[PartKey]:
    """The parts of one plan."""
    ends = sorted({*ends, SIZE})
    starts = [0, *ends[:-1]]
    return [(start, end, PEER, bytes([basis])) for start, end in zip(starts, ends, strict=True)]


PLANS = st.lists(
    st.builds(cut, st.integers(0, 5), st.lists(st.integers(1, SIZE - 1), max_size=3)), max_size=12
)


@given(PLANS, st.integers(1, 3))
def test_one_vector_beside_the_newest_plan(plans: list[list[PartKey]], copies: int) -> None:
    retention, kept = Retention(SIZE), set[PartKey]()
    stay = set(plans[0]) if plans else set()
    before: list[PartKey] = []
    for plan in plans:
        retention.ask(plan)
        kept |= set(plan)
        gone = retention.excess(set(plan), stay, lambda key: copies)
        assert not set(gone) & (set(plan) | stay)
        assert set(gone) <= kept
        kept -= set(gone)
        beside = kept - set(plan)
        assert sum(copies * (key[1] - key[0]) for key in beside - stay) <= SIZE
        if copies == 1 and not stay - set(plan):
            assert set(before) <= kept  # all of the plan before
        before = plan


def test_a_part_that_was_let_go_of_is_held_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    members, plan, agreement = adopt()
    results = results_of(plan, members)
    reports = cast(Any, SimpleNamespace(round=SimpleNamespace(agreement=agreement)))
    assert Reports.needed(reports) == set(keys_of(plan)) == {key_of(result) for result in results}
    for result in results:
        agreement.on_held(result)
    assert agreement.voted is not None
    later = plan_of(EVERYBODY[0], members, ballot=(0, 1), contributors=plan.contributors[:1])
    agreement.plan = later
    assert Reports.needed(reports) == {*keys_of(plan), *keys_of(later)}  # voted for, and asked for
    assert agreement.voted[1] == outcome_of(plan, results, PLACE.work)
    Reports.dropped(reports, key_of(results[0]))
    assert key_of(results[0]) not in agreement.held
    Reports.dropped(reports, key_of(results[0]))
