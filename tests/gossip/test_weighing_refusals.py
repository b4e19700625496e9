"""Inner products and scales that cannot be, or are not whose they are said to be."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gossip_kit import PLACE, RUN, SHAPE, leader, results_of, roster_of
from weighing_kit import (
    BY_PEER,
    MEMBERS,
    MIX,
    OPEN,
    draft_of,
    gathered,
    gram_of,
    grams_of,
    numbers,
    resigned,
    vectors,
)

from gossip.plans.commitments import packed
from gossip.plans.mix import MEAN
from gossip.plans.planning import Lead, roll_call
from gossip.plans.rules import Rules
from gossip.plans.validity import VerifiedResults, check_plan
from gossip.plans.weighing import Products, check_scales, final_plan, sign_gram, triangle, unpack
from protocols.errors import BadSignature, Malformed
from protocols.identity import Identity
from protocols.messages import Plan


def with_results(plan: Plan) -> Plan:
    """As if all its parts were merged."""
    results = results_of(plan, MEMBERS)
    merged = (
        dataclasses.replace(part, result=result)
        for part, result in zip(plan.parts, results, strict=True)
    )
    return dataclasses.replace(plan, parts=tuple(merged))


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
    with pytest.raises(BadSignature):
        products.add(good.owner, sign_gram(BY_PEER[good.owner], b"another run".ljust(32), good))


def test_products_that_cannot_be() -> None:
    inputs = vectors()
    draft = draft_of(inputs)
    products = Products(draft, RUN, MIX)
    good = gram_of(draft, 0, inputs)
    whole = (inputs[1] @ inputs[1]).item()
    for changes, why in [
        ({"products": good.products[8:]}, "another number"),
        ({"products": good.products + bytes(8)}, "another number"),
        ({"present": (0, 1, 2, 3, 3)}, "unknown contributors"),
        ({"present": (1, 0, 2, 3, 4)}, "unknown contributors"),
        ({"present": (0, 1, 2, 3, 5)}, "unknown contributors"),
        ({"roots": good.roots[:-1]}, "not named"),
        ({"signatures": good.signatures[:-1]}, "not named"),
        ({"roots": (*good.roots, bytes(32)), "signatures": (*good.signatures, b"")}, "not named"),
        ({"basis": bytes(32)}, "another plan"),
        ({"round": good.round + 1}, "another round"),
        ({"fragment": good.fragment + 1}, "another round"),
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


def test_products_may_be_as_large_as_the_norms_and_by_what_is_rounded() -> None:
    inputs = vectors()
    draft = draft_of(inputs)
    products = Products(draft, RUN, MIX)
    good = gram_of(draft, 0, inputs)
    limits = [MIX.limit(c, draft.codec) or 0.0 for c in draft.contributors]
    square, other = limits[1] ** 2, unpack(good.products, 5)[2, 2].item()
    most = limits[1] * other**0.5
    rounded = 1 + 5e-7
    for changes in ({"p11": square * rounded}, {"p11": square, "p21": -most * rounded}):
        taken = resigned(good, products=numbers(good, **changes))
        assert products.add(good.owner, taken) is None
    for changes, why in [
        ({"p11": square * 1.001}, "beyond the announced"),
        ({"p11": square, "p21": most * 1.001}, "no vectors have"),
        ({"p11": square, "p21": -most * 1.001}, "no vectors have"),
    ]:
        with pytest.raises(Malformed, match=why):
            products.add(good.owner, resigned(good, products=numbers(good, **changes)))


def test_who_announces_nothing_has_no_products() -> None:
    inputs = vectors()
    inputs[3] = 0
    draft = draft_of(inputs)
    products = Products(draft, RUN, MIX)
    good = gram_of(draft, 0, inputs)
    with pytest.raises(Malformed, match="beyond the announced"):
        products.add(good.owner, resigned(good, products=numbers(good, p33=0.5)))
    assert products.add(good.owner, good) is None


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
    rest = final.grams[1:]
    partly = (with_results(final).parts[0], *final.parts[1:])
    longer = resigned(final.grams[0], stop=final.grams[0].stop + 1)
    later = resigned(final.grams[0], start=final.grams[0].start + 1)
    for lie, why in [
        (dataclasses.replace(final, contributors=favoured), "do not follow"),
        (dataclasses.replace(final, grams=(longer, *rest)), "another part"),
        (dataclasses.replace(final, grams=(later, *rest)), "another part"),
        (dataclasses.replace(final, grams=final.grams[:-1]), "without the inner products"),
        (dataclasses.replace(final, grams=()), "without the inner products"),
        (dataclasses.replace(final, ballot=1, parts=partly, grams=()), "without the inner"),
        (dataclasses.replace(final, grams=final.grams[::-1]), "another part"),
        (dataclasses.replace(final, grams=forged), "another part"),
        (dataclasses.replace(final, draft=True), "knows its outcome"),
        (dataclasses.replace(draft, grams=final.grams), "knows its outcome"),
        (dataclasses.replace(draft, contributors=final.contributors), "knows its outcome"),
        (with_results(draft), "knows its outcome"),
    ]:
        with pytest.raises(Malformed, match=why):
            check_plan(lie, PLACE, OPEN, roster, VerifiedResults())
    gone = final.grams[0].owner  # the survivors go on with what it has said of its part
    left = tuple(peer for peer in roster if peer != gone)
    parts = tuple(
        dataclasses.replace(p, owner=left[0] if p.owner == gone else p.owner) for p in final.parts
    )
    reformed = dataclasses.replace(final, epoch=1, roster=left, parts=parts)
    check_plan(reformed, PLACE, OPEN, roster, VerifiedResults())
    with pytest.raises(Malformed, match="nothing is weighed"):
        check_plan(draft, PLACE, SHAPE, roster, VerifiedResults())
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
        check_plan(lie, PLACE, OPEN, roster_of(MEMBERS), VerifiedResults())
    later = dataclasses.replace(lie, ballot=1)  # their owners may have changed since
    check_plan(later, PLACE, OPEN, roster_of(MEMBERS), VerifiedResults())


def test_a_first_plan_finds_nothing_merged() -> None:
    inputs = vectors()
    draft = draft_of(inputs)
    favoured = tuple(
        dataclasses.replace(c, scale=5.0 if c.peer == draft.leader else 0.0)
        for c in draft.contributors
    )
    lie = dataclasses.replace(draft, draft=False, contributors=favoured)
    with pytest.raises(Malformed, match="merged already"):
        check_plan(with_results(lie), PLACE, OPEN, roster_of(MEMBERS), VerifiedResults())


def test_a_first_plan_may_find_that_there_is_nothing_to_merge() -> None:
    rules = Rules(SHAPE.size, SHAPE.codecs, lambda codec, start, stop: stop - start, mix=MIX)
    roster = roster_of(MEMBERS)
    lead = Lead(leader(MEMBERS), PLACE, (0, 0), roster)
    plan = roll_call(lead, rules, next_roster=roster, patience_s=1.0)
    check_plan(plan, PLACE, OPEN, roster, VerifiedResults())


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
