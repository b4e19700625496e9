"""Which owners a leader takes for the reason that slices are missing in its draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pytest
import torch
from gossip_kit import PLACE, RUN, SHAPE, company_of, leader, plan_of, roster_of
from weighing_kit import MIX

from gossip.plans.commitments import packed
from gossip.plans.weighing import draft_basis, sign_gram, triangle
from gossip.rounds.agreement import Agreement
from gossip.rounds.drafting import Drafting
from protocols.identity import Identity
from protocols.messages import Contributor, Gram, Part, Plan

pytestmark = pytest.mark.usefixtures("remembered_signatures")

MEMBERS = [Identity.from_seed(bytes([number]) * 32) for number in range(1, 8)]
OPEN = dataclasses.replace(SHAPE, mix=MIX)
NOW = 10.0


class Scene:
    """A leader's draft, to which all contribute; members are named by their place in the roster."""

    def __init__(self, count: int, owners: Sequence[int] | None = None) -> None:
        members = MEMBERS[:count]
        self.identities = sorted(members, key=lambda identity: identity.peer_id)
        self.roster = roster_of(members)
        me = leader(members)
        self.me = self.roster.index(me.peer_id)
        agreement = Agreement(me, PLACE, OPEN, self.roster)
        self.company = company_of(agreement, NOW)
        self.drafting = Drafting(agreement, MIX)
        own = [self.identities[number] for number in owners or range(count)]
        contributors = tuple(Contributor(peer, 100.0, 100, True, 9.0) for peer in self.roster)
        self.lead(plan_of(me, members, owners=own, contributors=contributors, draft=True))

    def lead(self, draft: Plan) -> None:
        self.draft, agreement = draft, self.drafting.agreement
        agreement.plan, agreement.promised = draft, (draft.epoch, draft.ballot)
        self.drafting.lead(draft)

    def others(self, *but: int) -> list[int]:
        """Members beside the leader and these."""
        return [n for n in range(len(self.roster)) if n not in (self.me, *but)]

    def gram(self, part: Part, absent: Sequence[int]) -> Gram:
        present = [n for n in range(len(self.roster)) if n not in absent]
        products = packed(triangle(torch.eye(len(present), dtype=torch.float64)))
        basis = draft_basis(self.draft.codec, self.draft.contributors)
        unsigned = Gram(
            0, PLACE.round, part.start, part.stop, part.owner, basis, tuple(present), products,
            b"", (b"r" * 32,) * len(present), (b"s" * 64,) * len(present), b"t" * 32,
        )  # fmt: skip
        return sign_gram(self.identities[self.roster.index(part.owner)], RUN, unsigned)

    def at_fault(self, absent: Mapping[int, Sequence[int]]) -> set[int]:
        """Whom the leader finds at fault when these owners say that of whom nothing came."""
        found = None
        for part in self.draft.parts:
            missing = absent.get(self.roster.index(part.owner), ())
            found = self.drafting.add(part.owner, self.gram(part, missing))
        assert found is not None, "all products are there"
        return {self.roster.index(p) for p in self.drafting.at_fault(self.company, NOW)}


def test_where_all_has_come_nobody_is_at_fault() -> None:
    assert Scene(5).at_fault({}) == set()


@pytest.mark.parametrize("missing", [2, 3, 4])
def test_an_owner_to_which_several_have_not_come_who_came_to_others(missing: int) -> None:
    scene = Scene(5)
    owner = scene.others()[0]
    absent = [n for n in range(5) if n != owner][:missing]
    assert scene.at_fault({owner: absent}) == {owner}


def test_of_two_ends_of_one_missing_slice_it_is_the_contributor() -> None:
    """As it leaves out but one, it is not worth a new draft, whoever lies."""
    scene = Scene(5)
    owner, other, *_ = scene.others()
    assert scene.at_fault({owner: [other]}) == set()


def test_a_contributor_that_does_not_come_to_several_owners_is_at_fault_itself() -> None:
    scene = Scene(5)
    one, other, third, _ = scene.others()
    assert scene.at_fault({one: [third], other: [third]}) == set()


def test_what_came_to_no_owner_is_not_there() -> None:
    scene = Scene(6, owners=[0, 1])
    assert scene.at_fault({0: [2, 3], 1: [2, 3]}) == set()


def test_an_owner_of_everything_is_at_fault_where_most_is_missing() -> None:
    owner = Scene(5).others()[0]
    absent = [n for n in range(5) if n != owner]
    assert Scene(5, owners=[owner]).at_fault({owner: absent[:2]}) == set()
    for missing in (absent[:3], absent, [*absent, owner]):
        assert Scene(5, owners=[owner]).at_fault({owner: missing}) == {owner}
    owner = Scene(6).others()[0]
    half = [n for n in range(6) if n != owner][:3]
    assert Scene(6, owners=[owner]).at_fault({owner: half}) == set()


def test_two_owners_that_say_so_of_most_do_not_speak_for_each_other() -> None:
    scene = Scene(7)
    first, second = scene.others()[:2]
    absent = [n for n in range(7) if n not in (first, second)]
    assert scene.at_fault({first: absent, second: absent}) == {first, second}


def test_nobody_is_at_fault_for_who_is_gone_or_takes_part_no_more() -> None:
    scene = Scene(5)
    owner, dead, gone, left = scene.others()
    scene.company.membership.on_unreachable(scene.roster[dead], NOW)
    scene.company.faulty.add(scene.roster[gone])
    assert scene.at_fault({owner: [dead, gone]}) == set()
    inactive = tuple(
        dataclasses.replace(c, active=c.peer != scene.roster[left])
        for c in scene.draft.contributors
    )
    scene.lead(dataclasses.replace(scene.draft, contributors=inactive))
    assert scene.at_fault({owner: [dead, left]}) == set()


def test_nobody_misses_slices_of_who_takes_part_no_more_or_has_done_nothing() -> None:
    scene = Scene(7)
    owner, *left = scene.others()[:4]
    none, draft = {scene.roster[number] for number in left}, scene.draft
    for changes in ({"active": False}, {"weight": 0.0, "tokens": 0}):
        contributors = tuple(
            dataclasses.replace(c, **changes) if c.peer in none else c for c in draft.contributors
        )
        scene.lead(dataclasses.replace(draft, contributors=contributors))
        assert scene.at_fault({owner: left}) == set()


def test_a_contribution_that_its_own_owner_does_not_take_is_none() -> None:
    scene = Scene(5)
    owner, other, *_ = scene.others()
    assert scene.at_fault({owner: [owner, other]}) == set()


def test_a_leader_does_not_find_itself_at_fault() -> None:
    scene = Scene(5)
    assert scene.at_fault({scene.me: scene.others()}) == set()


def test_where_half_would_be_at_fault_it_is_something_else() -> None:
    scene = Scene(4)
    first, second, third = scene.others()
    two = {first: [scene.me, third], second: [scene.me, third]}
    everything = {first: [scene.me, second, third], second: [scene.me, first, third]}
    assert scene.at_fault(everything) == set()
    assert Scene(4).at_fault({first: everything[first]}) == {first}
    assert Scene(4).at_fault(two) == set(), "as likely it is the two who did not come"


def test_what_was_missing_in_one_draft_counts_in_the_next() -> None:
    """Two who send one owner after the other nothing have none of them replaced but the first."""
    scene = Scene(7)
    first, second, *_, one, other = scene.others()
    assert scene.at_fault({first: [one, other]}) == {first}
    renewed = tuple(
        dataclasses.replace(p, owner=scene.roster[scene.me])
        if p.owner == scene.roster[first]
        else p
        for p in scene.draft.parts
    )
    scene.lead(dataclasses.replace(scene.draft, parts=renewed, ballot=7))
    assert scene.at_fault({second: [one, other]}) == set()


def test_who_leads_no_draft_finds_nobody_at_fault() -> None:
    scene = Scene(3)
    scene.drafting.lead(dataclasses.replace(scene.draft, draft=False))
    assert scene.drafting.at_fault(scene.company, NOW) == set()
