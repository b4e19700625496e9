"""Scales from inner products: what owners state, what a leader makes of it, what all check."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from gossip_kit import PLACE, RUN, SHAPE, announce_of, leader, plan_of, results_of, roster_of
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_kit import fresh

from diloco import merge, robust
from gossip.plans.agreed import Remains
from gossip.plans.certificate import basis_of, outcome_of
from gossip.plans.commitments import packed
from gossip.plans.mix import MEAN, Mix
from gossip.plans.planning import renewed_plan, repeated_plan
from gossip.plans.rules import Rules
from gossip.plans.validity import Known, check_plan
from gossip.plans.weighing import (
    Products,
    check_scales,
    draft_basis,
    final_plan,
    sign_gram,
    triangle,
    unpack,
    weighed,
)
from protocols.errors import BadSignature, Malformed
from protocols.identity import Identity
from protocols.messages import MAX_WEIGHED, Contributor, Gram, Part, Plan

MEMBERS = [Identity.from_seed(bytes([number]) * 32) for number in range(1, 6)]
BY_PEER = {member.peer_id: member for member in MEMBERS}
PEERS = sorted(BY_PEER)
MIX = Mix(weigh=robust.geometric_median)
OPEN = dataclasses.replace(SHAPE, mix=MIX)
SIZE = SHAPE.size


def vectors(count: int = 5, liar: int | None = 4) -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    common = torch.randn(SIZE, generator=random, dtype=torch.float64)
    found = common + torch.randn(count, SIZE, generator=random, dtype=torch.float64)
    if liar is not None:
        found[liar] *= -5
    return found


def draft_of(inputs: torch.Tensor, weights: Sequence[float] = (100.0,) * 5) -> Plan:
    contributors = tuple(
        Contributor(peer, weight, 100, True, one.norm().item())
        for peer, weight, one in zip(PEERS, weights, inputs, strict=True)
    )
    return plan_of(leader(MEMBERS), MEMBERS, contributors=contributors, draft=True)


def said(draft: Plan, part: Part, present: Sequence[int], products: bytes) -> Gram:
    """What a part's owner says of the contributions that are ``present``; not signed."""
    return Gram(
        draft.fragment,
        draft.round,
        part.start,
        part.stop,
        part.owner,
        draft_basis(draft.codec, draft.contributors),
        tuple(present),
        products,
        b"",
        (b"r" * 32,) * len(present),
        (b"s" * 64,) * len(present),
        b"t" * 32,
    )


def gram_of(
    draft: Plan, number: int, inputs: torch.Tensor, present: Sequence[int] = (0, 1, 2, 3, 4)
) -> Gram:
    part = draft.parts[number]
    piece = inputs[list(present), part.start : part.stop]
    unsigned = said(draft, part, present, packed(triangle(piece @ piece.T)))
    return sign_gram(BY_PEER[part.owner], RUN, unsigned)


def grams_of(draft: Plan, inputs: torch.Tensor) -> list[Gram]:
    return [gram_of(draft, number, inputs) for number in range(len(draft.parts))]


def resigned(gram: Gram, **changes: object) -> Gram:
    changed = dataclasses.replace(gram, signature=b"", **changes)
    return sign_gram(BY_PEER[changed.owner], RUN, changed)


def gathered(draft: Plan, grams: Sequence[Gram]) -> Plan:
    products = Products(draft, RUN, MIX)
    found = [products.add(gram.owner, gram) for gram in grams]
    assert found[:-1] == [None] * (len(grams) - 1)
    assert found[-1] is not None
    return found[-1]


# --- from products to scales ----------------------------------------------------------------------


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
    check_plan(final, PLACE, OPEN, roster_of(MEMBERS), Known())


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
    check_plan(final, PLACE, OPEN, roster_of(MEMBERS), Known())
    rest = inputs[[0, 2, 3, 4]]
    want = robust.geometric_median(rest @ rest.T, [1.0] * 4)
    assert [c.scale / 4 for c in final.contributors if c.scale] == pytest.approx(want)


def test_nobody_is_whole() -> None:
    inputs = vectors()
    draft = draft_of(inputs)
    grams = [gram_of(draft, n, inputs, present=(n,)) for n in range(5)]
    final = gathered(draft, grams)
    assert [c.scale for c in final.contributors] == [0.0] * 5
    check_plan(final, PLACE, OPEN, roster_of(MEMBERS), Known())


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


# --- what is refused ------------------------------------------------------------------------------


def test_products_of_somebody_else() -> None:
    inputs = vectors()
    draft = draft_of(inputs)
    products = Products(draft, RUN, MIX)
    good = gram_of(draft, 0, inputs)
    with pytest.raises(Malformed, match="not asked for"):
        products.add(draft.parts[1].owner, good)
    with pytest.raises(Malformed, match="not asked for"):
        products.add(good.owner, resigned(good, stop=good.stop - 1))
    with pytest.raises(BadSignature):
        products.add(good.owner, dataclasses.replace(good, signature=bytes(64)))
    with pytest.raises(BadSignature):
        products.add(good.owner, dataclasses.replace(good, products=bytes(len(good.products))))


def numbers(gram: Gram, **changes: float) -> bytes:
    products = unpack(gram.products, len(gram.present))
    for place, value in changes.items():
        row, column = int(place[1]), int(place[2])
        products[row, column] = products[column, row] = value
    return packed(triangle(products))


def test_products_that_cannot_be() -> None:
    inputs = vectors()
    draft = draft_of(inputs)
    products = Products(draft, RUN, MIX)
    good = gram_of(draft, 0, inputs)
    whole = (inputs[1] @ inputs[1]).item()
    for changes, why in [
        ({"products": good.products[8:]}, "another number"),
        ({"present": (0, 1, 2, 3, 3)}, "unknown contributors"),
        ({"present": (1, 0, 2, 3, 4)}, "unknown contributors"),
        ({"present": (0, 1, 2, 3, 5)}, "unknown contributors"),
        ({"roots": good.roots[:-1]}, "not named"),
        ({"signatures": good.signatures[:-1]}, "not named"),
        ({"roots": (*good.roots, bytes(32)), "signatures": (*good.signatures, b"")}, "not named"),
        ({"basis": bytes(32)}, "another plan"),
        ({"round": good.round + 1}, "another round"),
        ({"products": numbers(good, p11=-1.0)}, "beyond the announced"),
        ({"products": numbers(good, p11=whole * 2)}, "beyond the announced"),
        ({"products": numbers(good, p11=float("nan"))}, "beyond the announced"),
        ({"products": numbers(good, p11=float("inf"))}, "beyond the announced"),
        ({"products": numbers(good, p21=float("nan"))}, "no vectors have"),
        ({"products": numbers(good, p21=float("inf"))}, "no vectors have"),
        ({"products": numbers(good, p21=-whole)}, "no vectors have"),
    ]:
        with pytest.raises(Malformed, match=why):
            products.add(good.owner, resigned(good, **changes))
    assert len(products.silent()) == 5


def test_a_leader_that_makes_scales_up() -> None:
    inputs = vectors()
    draft = draft_of(inputs)
    final = gathered(draft, grams_of(draft, inputs))
    roster = roster_of(MEMBERS)
    stranger = Identity.from_seed(bytes([9]) * 32)
    theirs = dataclasses.replace(final.grams[0], owner=stranger.peer_id)
    forged = (sign_gram(stranger, RUN, theirs), *final.grams[1:])
    favoured = tuple(
        dataclasses.replace(c, scale=c.scale * (1 + 1e-15) if n == 2 else c.scale)
        for n, c in enumerate(final.contributors)
    )
    for lie, why in [
        (dataclasses.replace(final, contributors=favoured), "do not follow"),
        (dataclasses.replace(final, grams=final.grams[:-1]), "without the inner products"),
        (dataclasses.replace(final, grams=()), "without the inner products"),
        (dataclasses.replace(final, grams=final.grams[::-1]), "another part"),
        (dataclasses.replace(final, grams=forged), "another part"),
        (dataclasses.replace(final, draft=True), "knows its outcome"),
        (dataclasses.replace(draft, grams=final.grams), "knows its outcome"),
    ]:
        with pytest.raises(Malformed, match=why):
            check_plan(lie, PLACE, OPEN, roster, Known())
    gone = final.grams[0].owner  # the survivors go on with what it has said of its part
    left = tuple(peer for peer in roster if peer != gone)
    parts = tuple(
        dataclasses.replace(p, owner=left[0] if p.owner == gone else p.owner) for p in final.parts
    )
    reformed = dataclasses.replace(final, epoch=1, roster=left, parts=parts)
    check_plan(reformed, PLACE, OPEN, roster, Known())
    with pytest.raises(Malformed, match="nothing is weighed"):
        check_plan(draft, PLACE, SHAPE, roster, Known())
    with pytest.raises(Malformed, match="nothing is weighed"):
        check_scales(
            dataclasses.replace(draft, draft=False, grams=final.grams), RUN, MEAN, draft.roster
        )


def test_a_first_plan_shows_the_products_of_its_own_owners() -> None:
    """The leader's, under all parts, would be numbers that nobody asks anybody to prove."""
    inputs = vectors()
    draft = draft_of(inputs)
    own = draft.leader
    made_up = [resigned(gram, owner=own) for gram in grams_of(draft, inputs)]
    lie = final_plan(draft, made_up, MIX)
    assert (lie.epoch, lie.ballot) == (0, 0)
    with pytest.raises(Malformed, match="another part"):
        check_plan(lie, PLACE, OPEN, roster_of(MEMBERS), Known())
    later = dataclasses.replace(lie, ballot=1)  # their owners may have changed since
    check_plan(later, PLACE, OPEN, roster_of(MEMBERS), Known())


def test_a_first_plan_finds_nothing_merged() -> None:
    inputs = vectors()
    draft = draft_of(inputs)
    favoured = tuple(
        dataclasses.replace(c, scale=5.0 if c.peer == draft.leader else 0.0)
        for c in draft.contributors
    )
    lie = dataclasses.replace(draft, draft=False, contributors=favoured)
    results = results_of(lie, MEMBERS)
    merged = tuple(
        dataclasses.replace(part, result=result)
        for part, result in zip(lie.parts, results, strict=True)
    )
    with pytest.raises(Malformed, match="merged already"):
        check_plan(dataclasses.replace(lie, parts=merged), PLACE, OPEN, roster_of(MEMBERS), Known())


@pytest.mark.parametrize("lie", [0.0, 1.0, -1.0])
def test_an_owner_that_lies_does_not_lift_anybody_above_the_rule(lie: float) -> None:
    """The owner of a fifth says that all but the liar are far from each other there."""
    inputs = vectors()
    draft = draft_of(inputs)
    grams = grams_of(draft, inputs)
    products = unpack(grams[0].products, 5)
    bounds = torch.tensor([c.norm * 1.3 for c in draft.contributors], dtype=torch.float64)
    claimed = lie * bounds[:, None] * bounds[None, :]
    claimed.diagonal().copy_(bounds * bounds)
    claimed[4] = claimed[:, 4] = 0
    grams[0] = resigned(grams[0], products=packed(triangle(claimed)))
    got = [c.scale / 5 for c in gathered(draft, grams).contributors]
    assert sum(got) == pytest.approx(1.0)
    assert all(0 <= share < 0.8 for share in got)
    assert products[4, 4] > 0


# --- plans ----------------------------------------------------------------------------------------


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


def remains(plan: Plan) -> Remains:
    return Remains((plan.epoch, plan.ballot + 7), plan.roster, None, {})


def renewed(plan: Plan, gone: set[str]) -> Plan:
    live = [peer for peer in plan.roster if peer not in gone]
    by = MEMBERS[0] if MEMBERS[0].peer_id in live else MEMBERS[1]
    return renewed_plan(by, PLACE, plan, remains(plan), gone, live, plan.roster)  # type: ignore[arg-type]


def test_a_renewed_draft_is_a_draft_until_nobody_is_left() -> None:
    draft = draft_of(vectors())
    again = renewed(draft, {PEERS[2]})
    assert again.draft
    assert PEERS[2] not in {part.owner for part in again.parts}
    check_plan(again, PLACE, OPEN, roster_of(MEMBERS), Known())
    nobody = renewed(draft, set(PEERS))
    assert not nobody.draft
    assert all(part.result is not None and not part.result.digest for part in nobody.parts)
    check_plan(nobody, PLACE, OPEN, roster_of(MEMBERS), Known())


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
    check_plan(again, PLACE, OPEN, roster_of(MEMBERS), Known())


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
    check_plan(plan, PLACE, OPEN, roster_of(MEMBERS), Known())
    others = (resigned(final.grams[0], products=numbers(final.grams[0], p11=0.0, p21=0.0)),)
    lie = dataclasses.replace(plan, grams=others + plan.grams[1:])
    with pytest.raises(Malformed, match=r"inner products|do not follow"):
        check_plan(lie, PLACE, OPEN, roster_of(MEMBERS), Known())


def test_what_was_voted_for_is_proposed_without_its_products_by_who_does_not_know_them() -> None:
    inputs = vectors()
    draft = draft_of(inputs)
    final = gathered(draft, grams_of(draft, inputs))
    for known in (None, draft):
        plan = repeated_plan(MEMBERS[0], PLACE, voted(final), 1.0, known)
        assert not plan.grams
        check_plan(plan, PLACE, OPEN, roster_of(MEMBERS), Known())


def test_weighing_without_anybody() -> None:
    assert weighed((), [], MIX) == ()
