"""What a plan may ask members to wait for: no more than a few times what they find themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from gossip_kit import PLACE, SHAPE, announce_of, leader, plan_of

from gossip.membership.trips import MOST_S
from gossip.plans.estimating import GUESSED, SLACK, bounded, links_of, prolonged, timing_of
from gossip.plans.rules import Rules
from gossip.plans.validity import MAX_EXPECTED_S, VerifiedResults, check_plan
from protocols.identity import Identity
from protocols.messages import Announce, Plan

Identities = Callable[[int], list[Identity]]
RULES = Rules(64 * 1024, ("int4",), lambda codec, start, stop: (stop - start) // 2)
TRIPS = (0.6, 0.6)


def scene(identities: Identities, speed: float) -> tuple[Plan, list[Announce]]:
    members = identities(4)
    heard = [announce_of(m.peer_id, upload=speed, download=speed) for m in members]
    return plan_of(leader(members), members), heard


@pytest.mark.parametrize("speed", [1e4, 1e6, 0.0])
def test_a_plan_as_honest_leaders_make_it_stays_as_it_is(
    identities: Identities, speed: float
) -> None:
    plan, heard = scene(identities, speed)
    members = [announce.peer for announce in heard]
    moved = (len(members) - 1) / len(members) * RULES.size  # half a byte an element, twice
    expected = moved / (speed or 12.5e6) * (1 if speed else GUESSED)
    for factor in (0.5, 1.0, 2.0):
        honest = dataclasses.replace(
            plan, expected_s=factor * expected, patience_s=max(0.6, expected / 2)
        )
        assert bounded(honest, heard, RULES, TRIPS) == honest


def test_no_plan_makes_anybody_wait_for_half_an_hour(identities: Identities) -> None:
    plan, heard = scene(identities, 1e6)
    lies = dataclasses.replace(plan, expected_s=6 * 3600.0, patience_s=1800.0)
    told = bounded(lies, heard, RULES, TRIPS)
    moved = 0.75 * RULES.size / 1e6
    assert told.expected_s == pytest.approx(SLACK * moved)
    assert told.patience_s == pytest.approx(SLACK * 0.6)
    assert dataclasses.replace(told, expected_s=6 * 3600.0, patience_s=1800.0) == lies


def test_no_plan_has_members_take_each_other_for_dead_at_once(identities: Identities) -> None:
    plan, heard = scene(identities, 1e6)
    hasty = dataclasses.replace(plan, expected_s=0.0, patience_s=1e-6)
    assert bounded(hasty, heard, RULES, TRIPS).patience_s == pytest.approx(0.6 / SLACK)


def test_who_has_measured_nothing_yet_believes_more(identities: Identities) -> None:
    plan, heard = scene(identities, 1e6)
    patient = dataclasses.replace(plan, patience_s=4.5, expected_s=0.01)
    assert bounded(patient, heard, RULES, (1.0, 5.0)) == patient
    assert bounded(patient, heard, RULES, (1.0, 1.0)).patience_s == SLACK


@pytest.mark.parametrize("spent", [0.0, 3.0, 300.0])
def test_in_a_round_that_has_lasted_long_more_is_believed_and_not_without_bound(
    identities: Identities, spent: float
) -> None:
    plan, heard = scene(identities, 1e6)
    plan = dataclasses.replace(plan, expected_s=0.1)
    assert prolonged(plan, 0.0) == plan
    honest = prolonged(plan, spent)
    assert honest.expected_s == max(plan.expected_s, spent)
    assert plan.patience_s <= honest.patience_s <= max(plan.patience_s, MOST_S)
    assert bounded(honest, heard, RULES, TRIPS, spent) == honest
    lies = dataclasses.replace(plan, expected_s=6 * 3600.0, patience_s=1800.0)
    told = bounded(lies, heard, RULES, TRIPS, spent)
    usual = bounded(lies, heard, RULES, TRIPS)
    assert told.expected_s == max(usual.expected_s, 2 * spent)
    assert usual.patience_s <= told.patience_s <= max(usual.patience_s, MOST_S)


def test_of_whom_nothing_was_heard_counts_as_the_median(identities: Identities) -> None:
    plan, heard = scene(identities, 1e6)
    lies = dataclasses.replace(plan, expected_s=6 * 3600.0)
    all_heard = bounded(lies, heard, RULES, TRIPS)
    assert bounded(lies, heard[:2], RULES, TRIPS) == all_heard
    assert bounded(lies, [], RULES, TRIPS).expected_s > 0


def test_rounds_that_share_the_links_take_as_many_times_as_long(identities: Identities) -> None:
    plan, heard = scene(identities, 1e6)
    lies = dataclasses.replace(plan, expected_s=6 * 3600.0)
    shared = dataclasses.replace(RULES, sharing=3)
    once, thrice = (bounded(lies, heard, r, TRIPS).expected_s for r in (RULES, shared))
    assert thrice == pytest.approx(3 * once)


def test_timing_before_any_speed_is_known_is_generous(identities: Identities) -> None:
    plan, heard = scene(identities, 0.0)
    assert plan.groups == ()
    links = links_of(heard, {a.peer for a in heard}, RULES.believed)
    known = timing_of(plan.parts, (), links, RULES, "int4", 0.6, known=True)
    guessed = timing_of(plan.parts, (), links, RULES, "int4", 0.6, known=False)
    assert guessed[0] == pytest.approx(GUESSED * known[0])
    assert guessed[1] >= 2.0


def test_a_plan_of_a_round_that_has_lasted_a_day_is_one_that_others_take(
    identities: Identities,
) -> None:
    """Else a round that nobody could complete for hours would be stuck for good."""
    plan, _ = scene(identities, 1e6)
    later = prolonged(plan, 86_400.0)
    assert later.expected_s == MAX_EXPECTED_S
    check_plan(later, PLACE, SHAPE, plan.roster, VerifiedResults())
