"""Drafts of five members, with the inner products that their owners state."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from gossip_kit import PLACE, RUN, SHAPE, leader, plan_of

from diloco import robust
from gossip.plans.commitments import packed
from gossip.plans.mix import Mix
from gossip.plans.planning import Remains, renewed_plan
from gossip.plans.weighing import Products, draft_basis, sign_gram, triangle, unpack
from protocols.identity import Identity
from protocols.messages import Contributor, Gram, Part, Plan

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


def numbers(gram: Gram, **changes: float) -> bytes:
    products = unpack(gram.products, len(gram.present))
    for place, value in changes.items():
        row, column = int(place[1]), int(place[2])
        products[row, column] = products[column, row] = value
    return packed(triangle(products))


def remains(plan: Plan) -> Remains:
    return Remains((plan.epoch, plan.ballot + 7), plan.roster, None, {})


def renewed(plan: Plan, gone: set[str]) -> Plan:
    live = [peer for peer in plan.roster if peer not in gone]
    by = MEMBERS[0] if MEMBERS[0].peer_id in live else MEMBERS[1]
    return renewed_plan(by, PLACE, plan, remains(plan), gone, live, plan.roster)  # type: ignore[arg-type]
