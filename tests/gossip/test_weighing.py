"""Scales from inner products: what owners state, what a leader makes of it, what all check."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gossip_kit import PLACE, RUN, roster_of
from hypothesis import given, settings
from hypothesis import strategies as st
from weighing_kit import MEMBERS, MIX, OPEN, PEERS, draft_of, gathered, gram_of, grams_of, vectors

from diloco import merge, robust
from gossip.plans.commitments import packed
from gossip.plans.mix import MAX_SCALE, Mix
from gossip.plans.validity import VerifiedResults, check_plan
from gossip.plans.weighing import Products, triangle, unpack, weighed


@settings(deadline=None)
@given(count=st.integers(0, 12), seed=st.integers(0, 2**32))
def test_products_survive_the_wire(count: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 7, generator=random, dtype=torch.float64)
    products = rows @ rows.T
    back = unpack(packed(triangle(products)), count)
    assert torch.equal(back.tril(), products.tril())
    assert torch.equal(back, back.T)


def test_the_weights_are_those_of_the_whole_vectors() -> None:
    inputs = vectors()
    draft = draft_of(inputs)
    final = gathered(draft, grams_of(draft, inputs))
    assert not final.draft
    assert (final.epoch, final.ballot, final.parts) == (draft.epoch, draft.ballot, draft.parts)
    got = [c.scale / 5 for c in final.contributors]
    assert got == pytest.approx(robust.geometric_median(inputs @ inputs.T, [1.0] * 5), rel=1e-9)
    assert got[4] < 0.3 * min(got[:4])
    check_plan(final, PLACE, OPEN, roster_of(MEMBERS), VerifiedResults())


def test_weights_that_differ_give_the_same_coefficients() -> None:
    """What an owner makes of weight and scale is the rule's coefficient."""
    inputs, weights = vectors(), (3.0, 100.0, 50.0, 0.0, 80.0)
    draft = draft_of(inputs, weights)
    final = gathered(draft, grams_of(draft, inputs))
    want = robust.geometric_median(inputs @ inputs.T, weights)
    shares = merge.shares([c.weight for c in final.contributors])
    got = [share * c.scale for share, c in zip(shares, final.contributors, strict=True)]
    assert got == pytest.approx(want, rel=1e-9)
    assert final.contributors[3].scale == 0


def test_who_is_missing_in_one_part_is_left_out_of_all() -> None:
    inputs = vectors(liar=None)
    draft = draft_of(inputs)
    grams = grams_of(draft, inputs)
    grams[2] = gram_of(draft, 2, inputs, present=(0, 2, 3, 4))
    final = gathered(draft, grams)
    assert [c.scale > 0 for c in final.contributors] == [True, False, True, True, True]
    check_plan(final, PLACE, OPEN, roster_of(MEMBERS), VerifiedResults())
    rest = inputs[[0, 2, 3, 4]]
    want = robust.geometric_median(rest @ rest.T, [1.0] * 4)
    assert [c.scale / 4 for c in final.contributors if c.scale] == pytest.approx(want)


def test_nobody_is_whole() -> None:
    inputs = vectors()
    draft = draft_of(inputs)
    grams = [gram_of(draft, n, inputs, present=(n,)) for n in range(5)]
    final = gathered(draft, grams)
    assert [c.scale for c in final.contributors] == [0.0] * 5
    check_plan(final, PLACE, OPEN, roster_of(MEMBERS), VerifiedResults())


def test_order_of_arrival_does_not_matter() -> None:
    inputs = vectors()
    draft = draft_of(inputs)
    grams = grams_of(draft, inputs)
    assert gathered(draft, grams) == gathered(draft, grams[::-1])


def test_a_gathering_knows_who_is_silent() -> None:
    inputs = vectors()
    draft = draft_of(inputs)
    products = Products(draft, RUN, MIX)
    products.add(draft.parts[1].owner, gram_of(draft, 1, inputs))
    assert products.silent() == {p.owner for p in draft.parts} - {draft.parts[1].owner}


def test_what_came_to_an_owner_in_one_part_does_not_speak_against_it_in_another() -> None:
    """It came to nobody else, so it was hardly sent; the others lack what came to somebody."""
    inputs = vectors()
    draft = draft_of(inputs)
    first, second, *rest = draft.parts
    parts = (first, dataclasses.replace(second, owner=first.owner), *rest)
    draft = dataclasses.replace(draft, parts=parts)
    products = Products(draft, RUN, MIX)
    for number, part in enumerate(parts):
        present = (0, 1, 2) if number else (0, 1, 2, 3, 4)
        products.add(part.owner, gram_of(draft, number, inputs, present))
    found = products.absences()
    assert {owner for owner, _ in found} == {part.owner for part in rest}
    assert {contributor for _, contributor in found} == {PEERS[3], PEERS[4]}


def test_products_of_who_owned_the_part_before_come_to_nothing() -> None:
    """They were on their way when the part went to another: nobody is to be named for that."""
    inputs = vectors()
    draft = draft_of(inputs)
    late = gram_of(draft, 0, inputs)
    renewed = dataclasses.replace(draft.parts[0], owner=draft.parts[1].owner)
    later = dataclasses.replace(draft, ballot=1, parts=(renewed, *draft.parts[1:]))
    products = Products(later, RUN, MIX)
    assert products.add(late.owner, late) is None
    assert products.silent() == {part.owner for part in later.parts}


def test_no_scale_is_larger_than_a_plan_may_have() -> None:
    """A rule that gives all the same makes much of who has announced next to no work."""
    inputs, weights = vectors(), (1e-30, 100.0, 100.0, 100.0, 100.0)
    draft = draft_of(inputs, weights)
    alike = Mix(weigh=lambda products, weights: [1 / len(weights)] * len(weights))
    found = weighed(draft.contributors, grams_of(draft, inputs), alike)
    assert [c.scale for c in found] == [MAX_SCALE, *[pytest.approx(0.8)] * 4]


def test_weighing_without_anybody() -> None:
    assert weighed((), [], MIX) == ()
