"""Drafts that come again: their owners get the slices once more, and merge no part twice."""

from __future__ import annotations

import dataclasses

import pytest
from exchange_kit import SHAPE, Peer, World, run, same_bytes, until, world
from weighing_kit import MIX

from gossip.plans.certificate import basis_of, sign_result
from gossip.plans.commitments import root
from gossip.plans.weighing import final_plan
from protocols.identity import Identity
from protocols.messages import Gram, PartResult, Plan

OPEN = dataclasses.replace(SHAPE, mix=MIX)
ALL = (0, 1, 2, 3)


@pytest.fixture
def grams(monkeypatch: pytest.MonkeyPatch) -> list[Gram]:
    """What owners say of their parts, as it comes."""
    found: list[Gram] = []
    monkeypatch.setattr(Peer, "weighed", lambda self, gram: found.append(gram))
    return found


def draft_of(here: World, ballot: int, *owners: int) -> Plan:
    """A draft whose parts these members own, each the one of its place."""
    contributors = tuple(
        dataclasses.replace(c, norm=1.01 * here.of(c.peer).values.norm().item())
        for c in here.plan.contributors
    )
    parts = tuple(
        dataclasses.replace(part, owner=here.peers[owner].me)
        for part, owner in zip(here.plan.parts, owners, strict=True)
    )
    return dataclasses.replace(
        here.plan, ballot=ballot, draft=True, contributors=contributors, parts=parts
    )


async def judged(here: World, grams: list[Gram], draft: Plan) -> list[Gram]:
    """Work by a draft until all its owners have told; returns what they say, in order."""
    grams.clear()
    here.work(draft)
    said: dict[tuple[int, str], Gram] = {}

    def told() -> bool:
        said.update({(gram.start, gram.owner): gram for gram in grams})
        return len(said) == len(draft.parts)

    await until(told, 10.0)
    return [said[part.start, part.owner] for part in draft.parts]


def test_an_owner_that_has_let_go_of_a_draft_s_part_is_brought_it_again(grams: list[Gram]) -> None:
    async def story() -> None:
        async with world(OPEN) as here:
            first = await judged(here, grams, draft_of(here, 0, 0, 1, 2, 3))
            await judged(here, grams, draft_of(here, 1, 1, 0, 3, 2))  # no room for both
            again = await judged(here, grams, draft_of(here, 2, 0, 1, 2, 3))
            assert [gram.present for gram in again] == [ALL] * 4
            assert [gram.products for gram in again] == [gram.products for gram in first]

    run(story)


def test_what_was_merged_by_one_plan_is_judged_again_for_another(grams: list[Gram]) -> None:
    """The next leader knows of the draft alone: it has all judged again, and others come of it."""

    async def story() -> None:
        async with world(OPEN) as here:
            draft = draft_of(here, 0, 0, 1, 2, 3)
            first = await judged(here, grams, draft)
            lost = [gram.products for gram in first]
            only = dataclasses.replace(first[0], present=(0, 1), products=lost[0][: 8 * 3])
            here.work(final_plan(draft, [only, *first[1:]], MIX))
            await until(here.whole, 10.0)
            before = {key for peer in here.peers for key in peer.exchange.parts}

            later = dataclasses.replace(draft, ballot=1)
            again = await judged(here, grams, later)
            assert [gram.products for gram in again] == lost
            plan = final_plan(later, again, MIX)
            basis = basis_of(plan.codec, plan.contributors)
            assert all(key[3] != basis for key in before)
            here.work(plan)
            keys = {(part.start, part.stop, part.owner, basis) for part in plan.parts}
            await until(lambda: all(keys <= p.exchange.parts.keys() for p in here.peers), 10.0)
            assert same_bytes(here.peers)

    run(story)


def test_a_plan_that_comes_of_two_drafts_has_one_result(
    grams: list[Gram], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though what is brought for the second draft is not what was brought for the first."""
    signed: list[PartResult] = []

    def sign(identity: Identity, run: bytes, unsigned: PartResult) -> PartResult:
        signed.append(unsigned)
        return sign_result(identity, run, unsigned)

    monkeypatch.setattr("gossip.exchange.owning.sign_result", sign)

    async def story() -> None:
        async with world(OPEN) as here:
            draft = draft_of(here, 0, 0, 1, 2, 3)
            plan = final_plan(draft, await judged(here, grams, draft), MIX)
            here.work(plan)
            await until(here.whole, 10.0)
            for peer in here.peers:
                peer.values = peer.values.flip(0)
            await judged(here, grams, dataclasses.replace(draft, ballot=1))
            here.work(dataclasses.replace(plan, ballot=2))
            await judged(here, grams, draft_of(here, 3, 1, 0, 3, 2))  # all have seen to it by now
            assert len(signed) == len(plan.parts)

    run(story)


def test_who_has_weighed_a_part_can_show_it_if_another_merges_it(grams: list[Gram]) -> None:
    """The scales follow from what it has said, so it is asked for that after the round."""

    async def story() -> None:
        async with world(OPEN) as here:
            draft = draft_of(here, 0, 0, 1, 2, 3)
            plan = final_plan(draft, await judged(here, grams, draft), MIX)
            others = draft_of(here, 1, 1, 0, 3, 2).parts
            here.work(dataclasses.replace(plan, ballot=1, parts=others))
            await until(here.whole, 10.0)
            for gram in plan.grams:
                shown = here.of(gram.owner).exchange.owning.shown[gram.start, gram.stop]
                assert root(shown.products).hash == gram.tree
                assert [root(leaves).hash for leaves in shown.leaves.values()] == list(gram.roots)

    run(story)
