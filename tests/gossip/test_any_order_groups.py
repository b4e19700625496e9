"""Whatever befalls members of sites and grids, of large swarms, and under robust rules.

As :mod:`test_any_order`, where slices and merged parts pass through relays, votes through a few
who collect them, and announcements as rumours. The parts have several chunks each, so that
whatever happens finds some of them merged.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from trouble_kit import KINDS, Drawn, anything_happens

from gossip.plans.grouping import UNGROUPED, Grouping
from node.replicas import mixing

pytestmark = [
    pytest.mark.usefixtures("remembered_signatures", "small_chunks"),
    pytest.mark.timeout(300),
]

FOUND_IN_GROUPS = (6,)  # most restarted in a round that others had yet to come to
# owners were asked for a draft whose slices they had no more; parts were given to who abstains
FOUND_BY_RULE = (5001,)
# At the timings of then: four of twelve in a later epoch, which the others found out one by one
# (test_round_epochs.py has it at any timing).
FOUND_BY_LINKS = (4004,)
GRID = Grouping("grid", 4)
MORE = (*KINDS, "narrow", "sever", "sever")
LINKS = ("kill", "freeze", "slow", "narrow", "narrow", "sever", "sever", "sever", "cut")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vectors in as many parts and chunks as large ones."""
    monkeypatch.setattr("protocols.codecs.base.CHUNK", 2048)
    monkeypatch.setattr("gossip.plans.estimating.CHUNK", 2048)
    monkeypatch.setattr("gossip.plans.partition.MIN_PART", 2048)


@pytest.fixture
def soon_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some members are as many as a large swarm has."""
    for name in (
        "gossip.membership.presence.EVERYBODY",
        "gossip.rounds.telling.SMALL",
        "gossip.rounds.spreading.SMALL",
    ):
        monkeypatch.setattr(name, 5)


def in_groups(dice: random.Random) -> Drawn:
    """Sites of a few members, some of which name none; or a grid of all."""
    grouping, sites = dice.choice(
        [(Grouping("region"), 2), (Grouping("region"), 3), (Grouping("region", 3), 2), (GRID, 1)]
    )
    return Drawn(
        founders=dice.choice([4, 5, 6, 8]),
        joiners=dice.choice([0, 1, 2]),
        think=dice.choice([(1.0, 1.1), (0.3, 1.5)]),
        upload=dice.choice([3e5, 6e5, 1e7]),
        codec=dice.choice(["fp32", "int8"]),
        fragments=dice.choice([1, 1, 2]),
        records=dice.random() < 0.6,
        size=40_000,
        grouping=grouping,
        sites=sites,
        mix=mixing.RULES[dice.choice(["mean", "clip"])](),
        most=9,
        kinds=MORE,
    )


def by_rule(dice: random.Random) -> Drawn:
    """Owners judge slices: element by element, or by their inner products."""
    rule = dice.choice(["median", "trimmed", "geometric-median", "centered-clip", "open"])
    return Drawn(
        founders=dice.choice([2, 3, 4, 6]),
        joiners=dice.choice([1, 2]),
        think=dice.choice([(1.0, 1.1), (0.3, 1.5)]),
        upload=dice.choice([3e5, 6e5, 1e7]),
        codec=dice.choice(["fp32", "int8"]),
        fragments=dice.choice([1, 1, 2]),
        records=dice.random() < 0.6,
        size=40_000,
        mix=mixing.BY_TRUST["open"]() if rule == "open" else mixing.RULES[rule](),
        kinds=MORE,
    )


def by_rule_and_links(dice: random.Random) -> Drawn:
    """More of what befalls links, and less of what befalls members."""
    return replace(by_rule(dice), kinds=LINKS)


def among_many(dice: random.Random) -> Drawn:
    """More than tell everybody everything, with groups or without."""
    grouping, sites = dice.choice([(UNGROUPED, 1), (Grouping("region"), 3), (GRID, 1)])
    return Drawn(
        founders=dice.choice([7, 8, 10]),
        joiners=dice.choice([0, 2]),
        think=dice.choice([(1.0, 1.1), (0.5, 2.0)]),
        upload=dice.choice([3e5, 1e7]),
        codec=dice.choice(["fp32", "int8"]),
        fragments=dice.choice([1, 1, 2]),
        records=dice.random() < 0.6,
        size=20_000,
        grouping=grouping,
        sites=sites,
        most=12,
        kinds=MORE,
    )


def by_links(draw: Callable[[random.Random], Drawn]) -> Callable[[random.Random], Drawn]:
    """The same, where it is mostly links that fail."""
    return lambda dice: replace(draw(dice), kinds=LINKS)


@pytest.mark.parametrize("seed", [*FOUND_IN_GROUPS, 1, 9])
def test_whatever_happens_in_groups_there_is_one_swarm(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, in_groups, tmp_path)


@pytest.mark.parametrize("seed", [15])
def test_whatever_happens_among_many_there_is_one_swarm(
    seed: int, tmp_path: Path, soon_many: None
) -> None:
    anything_happens(seed, among_many, tmp_path)


@pytest.mark.parametrize("seed", [4036])
def test_whatever_happens_to_links_in_groups_there_is_one_swarm(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, by_links(in_groups), tmp_path)


@pytest.mark.parametrize("seed", [4035])
def test_whatever_happens_to_links_among_many_there_is_one_swarm(
    seed: int, tmp_path: Path, soon_many: None
) -> None:
    anything_happens(seed, by_links(among_many), tmp_path)


@pytest.mark.parametrize("seed", [2, 7])
def test_whatever_happens_under_robust_rules_there_is_one_swarm(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, by_rule, tmp_path)


@pytest.mark.parametrize("seed", FOUND_BY_RULE)
def test_whatever_links_do_under_robust_rules_there_is_one_swarm(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, by_rule_and_links, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("draw", [in_groups, by_rule, by_rule_and_links])
@pytest.mark.parametrize("seed", range(100, 200))
def test_whatever_happens_there_is_one_swarm_many_times(
    draw: Callable[[random.Random], Drawn], seed: int, tmp_path: Path
) -> None:
    anything_happens(seed, draw, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [13, *range(100, 200)])
def test_whatever_happens_among_many_there_is_one_swarm_many_times(
    seed: int, tmp_path: Path, soon_many: None
) -> None:
    anything_happens(seed, among_many, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4020, 4084))
def test_whatever_happens_to_links_in_groups_there_is_one_swarm_many_times(
    seed: int, tmp_path: Path
) -> None:
    anything_happens(seed, by_links(in_groups), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*FOUND_BY_LINKS, *range(4020, 4084)])
def test_whatever_happens_to_links_among_many_there_is_one_swarm_many_times(
    seed: int, tmp_path: Path, soon_many: None
) -> None:
    anything_happens(seed, by_links(among_many), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_among_as_many_as_that_there_is_one_swarm(
    seed: int, tmp_path: Path
) -> None:
    """With the numbers from which on rumours and collectors are used."""
    anything_happens(seed, lambda dice: replace(among_many(dice), founders=18, most=20), tmp_path)
