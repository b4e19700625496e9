"""Plans of rounds that weigh contributors: drafts, renewed drafts, and what was voted for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gossip_kit import PLACE, RUN, SHAPE, announce_of, leader, plan_of, results_of, roster_of
from planning_kit import fresh
from weighing_kit import (
    MEMBERS,
    MIX,
    OPEN,
    PEERS,
    SIZE,
    draft_of,
    gathered,
    gram_of,
    grams_of,
    numbers,
    remains,
    renewed,
    resigned,
    said,
    vectors,
)

from diloco import merge
from gossip.plans.certificate import basis_of, outcome_of
from gossip.plans.commitments import packed
from gossip.plans.mix import MEAN, Mix
from gossip.plans.planning import Remains, renewed_plan, repeated_plan
from gossip.plans.rules import Rules
from gossip.plans.validity import VerifiedResults, check_plan, key_of
from gossip.plans.weighing import Products, draft_basis, final_plan, triangle
from gossip.rounds.agreed import Adopted
from gossip.rounds.agreement import Agreement
from protocols.errors import Malformed
from protocols.identity import Identity
from protocols.messages import MAX_WEIGHED, Plan


def rules(mix: Mix) -> Rules:
    return Rules(SIZE, SHAPE.codecs, lambda codec, start, stop: (stop - start) * 17 // 32, mix=mix)


def first_plan(mix: Mix, count: int = 5, **changes: object) -> Plan:
    members = [Identity.from_seed(bytes([1 + n // 200, n % 200]) * 16) for n in range(count)]
    announces = [announce_of(member.peer_id, norm=1.0 + n) for n, member in enumerate(members)]
    announces = [dataclasses.replace(a, **changes) for a in announces]
    return fresh(members, announces, rules=rules(mix))


def test_first_plans() -> None:
    assert not first_plan(MEAN).draft
    assert {c.scale for c in first_plan(MEAN).contributors} == {1.0}
    assert first_plan(MIX).draft
    by_norm = {c.norm: c.scale for c in first_plan(Mix(clip=merge.clip_factors)).contributors}
    assert by_norm == {1.0: 1.0, 2.0: 1.0, 3.0: 1.0, 4.0: 0.75, 5.0: 0.6}


def test_those_without_weight_have_no_say_in_the_median_norm() -> None:
    plan = first_plan(Mix(clip=merge.clip_factors), weight=0.0)
    assert {c.scale for c in plan.contributors} == {1.0}


@pytest.mark.parametrize("norm", [-1.0, 1e300])
def test_announced_norms_are_bounded(norm: float) -> None:
    plan = first_plan(Mix(clip=merge.clip_factors), norm=norm)
    assert {c.norm for c in plan.contributors} <= {0.0, 1e45}


def test_a_draft_has_room_for_so_many() -> None:
    plan = first_plan(MIX, MAX_WEIGHED + 20)
    assert len(plan.contributors) == MAX_WEIGHED
    assert len(plan.parts) <= MAX_WEIGHED
    assert {part.owner for part in plan.parts} <= {c.peer for c in plan.contributors}
    plan.encode()


def test_the_largest_plan_fits_its_message() -> None:
    count = MAX_WEIGHED
    members = [Identity.from_seed(bytes([9, n]) * 16) for n in range(count)]
    draft = plan_of(leader(members), members, draft=True)
    draft = dataclasses.replace(
        draft, contributors=tuple(dataclasses.replace(c, norm=9.0) for c in draft.contributors)
    )
    products = packed(triangle(torch.eye(count, dtype=torch.float64)))
    unsigned = [said(draft, part, range(count), products) for part in draft.parts]
    grams = [dataclasses.replace(gram, signature=bytes(64)) for gram in unsigned]
    grams[0].encode()
    final = final_plan(draft, grams, MIX)
    assert len(final.encode()) < Plan.MAX_BYTES
    outcome = outcome_of(final, results_of(final, members), PLACE.work)
    found = dataclasses.replace(remains(final), voted=outcome)
    again = repeated_plan(members[0], PLACE, found, 1.0, final)
    assert len(again.encode()) < Plan.MAX_BYTES


def test_a_renewed_draft_is_a_draft_until_nobody_is_left() -> None:
    draft = draft_of(vectors())
    again = renewed(draft, {PEERS[2]})
    assert again.draft
    assert PEERS[2] not in {part.owner for part in again.parts}
    check_plan(again, PLACE, OPEN, roster_of(MEMBERS), VerifiedResults())
    nobody = renewed(draft, set(PEERS))
    assert not nobody.draft
    assert all(part.result is not None and not part.result.digest for part in nobody.parts)
    check_plan(nobody, PLACE, OPEN, roster_of(MEMBERS), VerifiedResults())


def test_nothing_is_merged_yet_of_a_renewed_draft() -> None:
    """Whatever an owner says: nobody would follow a draft that knows its outcome."""
    draft = draft_of(vectors())
    held = {key_of(result): result for result in results_of(draft, MEMBERS)}
    found = dataclasses.replace(remains(draft), held=held)
    live = list(draft.roster)
    again = renewed_plan(MEMBERS[0], PLACE, draft, found, set(), live, live)
    assert again.draft
    assert all(part.result is None for part in again.parts)
    check_plan(again, PLACE, OPEN, roster_of(MEMBERS), VerifiedResults())


def test_products_count_for_the_renewed_draft_as_well() -> None:
    inputs = vectors()
    draft = draft_of(inputs)
    again = renewed(draft, {PEERS[2]})
    assert draft_basis(again.codec, again.contributors) == draft_basis(
        draft.codec, draft.contributors
    )
    products = Products(again, RUN, MIX)
    for number, part in enumerate(again.parts):
        if part.owner == draft.parts[number].owner:
            assert products.add(part.owner, gram_of(draft, number, inputs)) is None
    pairs = zip(again.parts, draft.parts, strict=True)
    taken = [new.owner for new, old in pairs if new.owner != old.owner]
    assert products.silent() == set(taken)
    assert len(taken) == 1


def test_whoever_takes_a_part_over_merges_it_by_the_same_scales() -> None:
    inputs = vectors()
    draft = draft_of(inputs)
    final = gathered(draft, grams_of(draft, inputs))
    again = renewed(final, {PEERS[2]})
    assert not again.draft
    assert basis_of(again.codec, again.contributors) == basis_of(final.codec, final.contributors)
    assert PEERS[2] not in {part.owner for part in again.parts}
    check_plan(again, PLACE, OPEN, roster_of(MEMBERS), VerifiedResults())


def test_nobody_votes_for_a_draft() -> None:
    """Its scales are not those of the rule: owners that merge by them would let liars in."""
    draft = draft_of(vectors())
    other = Agreement(leader(MEMBERS, 1), PLACE, OPEN, roster_of(MEMBERS))
    assert other.on_plan(draft.leader, draft) == [Adopted(draft)]
    for result in results_of(draft, MEMBERS):
        assert other.on_held(result) == []
    assert other.voted is None


def voted(final: Plan) -> Remains:
    """What a new leader learns from somebody who has voted for it."""
    outcome = outcome_of(final, results_of(final, MEMBERS), PLACE.work)
    return dataclasses.replace(remains(final), voted=outcome)


def test_what_was_voted_for_is_proposed_with_its_products_by_who_knows_them() -> None:
    inputs = vectors()
    draft = draft_of(inputs)
    final = gathered(draft, grams_of(draft, inputs))
    plan = repeated_plan(MEMBERS[0], PLACE, voted(final), 1.0, final)
    assert plan.grams == final.grams
    check_plan(plan, PLACE, OPEN, roster_of(MEMBERS), VerifiedResults())
    others = (resigned(final.grams[0], products=numbers(final.grams[0], p11=0.0, p21=0.0)),)
    lie = dataclasses.replace(plan, grams=others + plan.grams[1:])
    with pytest.raises(Malformed, match=r"inner products|do not follow"):
        check_plan(lie, PLACE, OPEN, roster_of(MEMBERS), VerifiedResults())


def test_what_was_voted_for_is_proposed_without_its_products_by_who_does_not_know_them() -> None:
    inputs = vectors()
    draft = draft_of(inputs)
    final = gathered(draft, grams_of(draft, inputs))
    without = [gram_of(draft, number, inputs, (0, 1, 2, 3)) for number in range(len(draft.parts))]
    for known in (None, draft, gathered(draft, without)):  # the last one has other scales
        plan = repeated_plan(MEMBERS[0], PLACE, voted(final), 1.0, known)
        assert not plan.grams
        check_plan(plan, PLACE, OPEN, roster_of(MEMBERS), VerifiedResults())
