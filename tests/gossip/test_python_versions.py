"""Members that run different Pythons derive the same numbers, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gossip_kit import roster_of
from sums import added_up, compensated, rounded
from weighing_kit import MIX, draft_of, grams_of, vectors

from diloco import merge, robust
from gossip.exchange.group_sums import magnitude
from gossip.exchange.slicing import shares
from gossip.plans.weighing import weighed
from protocols.identity import Identity
from protocols.messages import Contributor

MEMBERS = [Identity.from_seed(bytes([number, 5]) * 16) for number in range(12)]
ROSTER = roster_of(MEMBERS)


def alike(derived: Callable[[], Any]) -> Any:
    """What is derived, if all Pythons agree on it."""
    with added_up(rounded):
        found = derived()
    with added_up(compensated):
        assert derived() == found
    return found


def contributors(seed: int) -> list[Contributor]:
    """Islands that are weighted by their tokens a second, as some modes do."""
    by = random.Random(seed)
    return [Contributor(peer, by.uniform(1, 1e4), 2**20, True) for peer in ROSTER]


def test_the_two_ways_differ() -> None:
    assert rounded([0.1] * 10) == 1 - 2**-53
    assert compensated([0.1] * 10) == 1.0
    assert rounded(range(5)) == compensated(range(5)) == 10


@pytest.mark.parametrize("sites", [2, 4, 8])
@pytest.mark.parametrize("per", [3, 5, 6, 7, 11, 24])
def test_what_a_whole_site_is_divided_by(sites: int, per: int) -> None:
    """Shares that sum to a power of two, or to just below it: then to half as much."""
    each = 100.0 / (100.0 * sites * per)
    assert alike(lambda: magnitude([each] * per)) in (1 / sites, 2 / sites)


@pytest.mark.parametrize("seed", range(20))
def test_shares(seed: int) -> None:
    given = contributors(seed)
    alike(lambda: shares(given))


@pytest.mark.parametrize("seed", range(20))
def test_scales_that_follow_from_inner_products(seed: int) -> None:
    """Else a leader's plan is refused by all who run another version."""
    inputs = vectors()
    draft = draft_of(inputs, [c.weight for c in contributors(seed)[:5]])
    grams = grams_of(draft, inputs)
    alike(lambda: weighed(draft.contributors, grams, MIX))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "rule",
    [robust.norm_clip, robust.centered_clip, robust.geometric_median, robust.open_rule],
    ids=lambda rule: rule.__name__,
)
def test_merge_rules(rule: Callable[..., list[float]], seed: int) -> None:
    rows = torch.randn(7, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights = [c.weight for c in contributors(seed)[:7]]
    alike(lambda: rule(rows @ rows.T, weights))


@pytest.mark.parametrize("seed", range(20))
def test_factors_that_clip(seed: int) -> None:
    alike(lambda: merge.clip_factors([c.weight for c in contributors(seed)]))
