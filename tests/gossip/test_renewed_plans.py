"""What a leader makes of a plan that has lost members: what was merged and voted for stays."""

from __future__ import annotations

import dataclasses

import pytest
from gossip_kit import PLACE, SHAPE, counts_of, leader, plan_of, result_of, results_of
from planning_kit import Identities, remains

from gossip.plans.certificate import outcome_of
from gossip.plans.partition import MemberLink
from gossip.plans.planning import renewed_plan, repeated_plan
from gossip.plans.validity import VerifiedResults, check_plan, key_of
from gossip.rounds.leadership import usable
from protocols.counts import Included
from protocols.errors import LocalProtocolError
from protocols.messages import Part


def test_a_part_that_was_merged_in_another_codec_is_not_taken_over(identities: Identities) -> None:
    members = identities(4)
    plan = plan_of(leader(members), members)
    result = dataclasses.replace(results_of(plan, members)[0], codec="int2")
    live = list(plan.roster)
    by = leader(members, 4)
    renewed = renewed_plan(by, PLACE, plan, remains(plan, [result]), set(), live, live)
    assert renewed.parts[0].result is None


def test_what_is_merged_stays_merged_and_the_rest_moves_to_the_living(
    identities: Identities,
) -> None:
    members = identities(4)
    plan = plan_of(leader(members), members)
    results = results_of(plan, members)
    by = leader(members, 4)
    gone = {plan.parts[2].owner}
    live = [peer for peer in plan.roster if peer not in gone]
    renewed = renewed_plan(by, PLACE, plan, remains(plan, results[:2]), gone, live, plan.roster)
    check_plan(renewed, PLACE, SHAPE, plan.roster, VerifiedResults())
    assert [part.result for part in renewed.parts] == [*results[:2], None, None]
    assert renewed.parts[2].owner in live
    assert renewed.parts[3].owner == plan.parts[3].owner
    assert [c.active for c in renewed.contributors] == [c.peer in live for c in plan.contributors]


def test_the_parts_of_the_gone_are_spread(identities: Identities) -> None:
    members = identities(4)
    plan = plan_of(leader(members), members)
    by = leader(members, 4)
    gone = set(plan.roster) - {by.peer_id, plan.roster[0], plan.roster[1]}
    live = [peer for peer in plan.roster if peer not in gone]
    renewed = renewed_plan(by, PLACE, plan, remains(plan, []), gone, live, live)
    owners = [part.owner for part in renewed.parts]
    assert set(owners) <= set(live)
    assert max(owners.count(peer) for peer in live) <= 2


def test_the_part_of_the_gone_goes_to_whoever_is_through_with_it_first(
    identities: Identities,
) -> None:
    members = identities(6)
    plan = plan_of(leader(members), members)
    by = leader(members, 6)
    whole = plan.parts[-1].stop
    quick, dead, *slow = plan.roster  # the slow own nothing, as in plans by measured speeds
    half = whole // 2
    parts = (Part(0, half, quick, None), Part(half, whole, dead, None))
    plan = dataclasses.replace(plan, parts=parts)
    links = [MemberLink(quick, 250e6, 250e6), *(MemberLink(peer, 25e6, 25e6) for peer in slow)]
    live = [quick, *slow]
    renewed = renewed_plan(by, PLACE, plan, remains(plan, []), {dead}, live, live, links)
    assert [part.owner for part in renewed.parts] == [quick, quick]
    alike = renewed_plan(by, PLACE, plan, remains(plan, []), {dead}, live, live)
    assert alike.parts[1].owner == min(slow)


def test_a_part_merged_by_an_owner_that_was_replaced_is_kept(identities: Identities) -> None:
    members = identities(3)
    plan = plan_of(leader(members), members)
    part = plan.parts[0]
    other = next(i for i in members if i.peer_id != part.owner)
    earlier = result_of(other, plan, part.start, part.stop)
    renewed = renewed_plan(
        leader(members, 3), PLACE, plan, remains(plan, [earlier]), set(), plan.roster, plan.roster
    )
    check_plan(renewed, PLACE, SHAPE, plan.roster, VerifiedResults())
    assert renewed.parts[0].result == earlier
    assert renewed.parts[0].owner == other.peer_id


def test_results_for_other_contributors_are_no_remains(identities: Identities) -> None:
    members = identities(3)
    plan = plan_of(leader(members), members)
    fewer = dataclasses.replace(plan, contributors=plan.contributors[1:])
    renewed = renewed_plan(
        leader(members, 3),
        PLACE,
        plan,
        remains(plan, results_of(fewer, members)),
        set(),
        plan.roster,
        plan.roster,
    )
    check_plan(renewed, PLACE, SHAPE, plan.roster, VerifiedResults())
    assert all(part.result is None for part in renewed.parts)


def test_a_new_leader_builds_on_what_was_asked_for_and_is_to_be_had(
    identities: Identities,
) -> None:
    members = identities(3)
    plan = plan_of(leader(members), members)
    results = results_of(plan, members)
    liar = next(m for m in members if m.peer_id == plan.parts[2].owner)
    part = plan.parts[0]
    forged = result_of(liar, plan, part.start, part.stop, b"f")  # of another's part
    counted = dataclasses.replace(results[1], counts=counts_of((Included(7, 5),)), signature=b"")
    said = {key_of(result): result for result in (forged, results[0], results[2])}
    assert usable(said, plan, (), said) == {key_of(r): r for r in (results[0], results[2])}
    assert usable(said, plan, {key_of(forged)}, said) == said  # its bytes are here
    at_hand = {key_of(forged), key_of(results[0])}  # whoever has the third part does not deliver
    assert usable(said, plan, (), at_hand) == {key_of(results[0]): results[0]}
    assert (
        usable({key_of(counted): counted}, plan, (), {key_of(counted)}) == {}
    )  # no such contributor


def test_what_nobody_can_complete_is_certified_as_empty(identities: Identities) -> None:
    members = identities(3)
    first = leader(members)
    plan = plan_of(first, members)
    only = dataclasses.replace(
        plan, contributors=tuple(c for c in plan.contributors if c.peer == first.peer_id)
    )
    by = leader(members, 4)
    results = [r for r in results_of(only, members) if r.owner != first.peer_id][:1]
    gone = {first.peer_id}
    live = [peer for peer in plan.roster if peer not in gone]
    renewed = renewed_plan(by, PLACE, only, remains(only, results), gone, live, live)
    check_plan(renewed, PLACE, SHAPE, plan.roster, VerifiedResults())
    empty = [part.result for part in renewed.parts if part.result and not part.result.digest]
    assert len(empty) == 2
    assert {result.owner for result in empty} == {by.peer_id}
    outcome = outcome_of(renewed, [p.result for p in renewed.parts if p.result], PLACE.work)
    merged = results[0].stop - results[0].start
    assert outcome.work == PLACE.work + 100 * merged // SHAPE.size


def test_an_owner_that_says_its_part_came_out_empty_empties_nothing(
    identities: Identities,
) -> None:
    """Contributors are there: their work is merged by it, or has been by somebody else."""
    members = identities(3)
    plan = plan_of(leader(members), members)
    part = plan.parts[0]
    owner = next(i for i in members if i.peer_id == part.owner)
    other = next(i for i in members if i.peer_id != part.owner)
    nothing = result_of(owner, plan, part.start, part.stop, digest=b"", counts=b"")
    merged = result_of(other, plan, part.start, part.stop)
    for held, wanted in (([nothing], None), ([nothing, merged], merged)):
        renewed = renewed_plan(
            leader(members, 3), PLACE, plan, remains(plan, held), set(), plan.roster, plan.roster
        )
        assert renewed.parts[0].result == wanted


def test_who_was_found_gone_stays_out_of_the_round(identities: Identities) -> None:
    """Some may have merged without it already, and nobody waits for its slices any more."""
    members = identities(3)
    plan = plan_of(leader(members), members)
    back = plan.roster[0]
    for gone in ({back}, set()):
        plan = renewed_plan(
            leader(members, 3), PLACE, plan, remains(plan, []), gone, plan.roster, plan.roster
        )
        assert [c.peer for c in plan.contributors if not c.active] == [back]


def test_a_vote_is_repeated_as_it_was(identities: Identities) -> None:
    members = identities(3)
    plan = plan_of(leader(members), members)
    outcome = outcome_of(plan, results_of(plan, members), PLACE.work)
    by = leader(members, 1)
    voted = dataclasses.replace(remains(plan, []), ballot=(0, 1), voted=outcome)
    repeated = repeated_plan(by, PLACE, voted, 1.0)
    check_plan(repeated, PLACE, SHAPE, plan.roster, VerifiedResults())
    results = [part.result for part in repeated.parts if part.result is not None]
    assert outcome_of(repeated, results, PLACE.work) == outcome
    with pytest.raises(LocalProtocolError):
        repeated_plan(by, PLACE, remains(plan, []), 1.0)
