"""Whom one member counts on in a round: who is there and ready, and who was found to fail."""

from __future__ import annotations

import dataclasses

from company_kit import NOW, PATIENCE, SOON, Scene
from gossip_kit import PLACE, result_of

from protocols.identity import Identity
from protocols.messages import Suspect

OTHER_STATE = dataclasses.replace(PLACE, state=b"another".ljust(32))
STRANGER = Identity.from_seed(b"s" * 32).peer_id


def test_members_are_those_at_this_place_who_deliver() -> None:
    scene = Scene()
    company, (one, other, third, fourth) = scene.company, scene.others
    scene.announces(one, place=dataclasses.replace(PLACE, round=PLACE.round + 1))
    company.faulty.add(other)
    company.agreement.heard(third, 1)  # it is in a later epoch
    assert {found.peer for found in company.members(NOW)} == {company.me, fourth}
    assert company.working(NOW) == {company.me, one, fourth}
    scene.hears(NOW + 60.0, one, other, third)
    assert {found.peer for found in company.members(NOW + 60.0)} == {company.me}


def test_who_is_ready_has_the_state_of_this_place_and_trains() -> None:
    scene = Scene()
    company, (one, other, third, fourth) = scene.company, scene.others
    scene.announces(one, place=OTHER_STATE)
    scene.announces(other, ready=False)
    scene.announces(third, role="server")
    scene.announces(fourth, ready=False, status="joining")
    for epoch in (0, 1):  # in a later epoch those who join have a vote, but nothing to give
        company.agreement.promised = (epoch, 0)
        ready, late = company.ready_and_late(NOW)
        assert {found.peer for found in ready} == {company.me}
        assert {found.peer for found in late} == {one, other}


def test_whom_a_new_plan_counts_on_is_at_fault_no_more() -> None:
    scene = Scene()
    company, (one, other, third, fourth) = scene.company, scene.others
    company.faulty, company.blamed = {one, third}, {other, fourth}
    plan = scene.adopt((0, 6), 1, without={other, third, fourth})
    assert company.gone == {other, third, fourth}
    assert company.owners == {company.me, *scene.others}  # by one plan or another
    first, second = plan.parts
    [by] = [member for member in scene.members if member.peer_id == third]
    merged = result_of(by, plan, first.start, first.stop)
    parts = (
        dataclasses.replace(first, owner=third, result=merged),  # which asks nothing more of it
        dataclasses.replace(second, owner=other),
    )
    scene.adopt((0, 11), 1, without={other, third, fourth}, parts=parts)
    assert company.gone == {third, fourth}


def test_a_leader_does_not_clear_itself_by_another_plan() -> None:
    scene = Scene()
    company, first = scene.company, scene.others[-1]
    company.faulty.add(first)
    scene.adopt((0, 5), 0)
    assert company.gone == {first}
    scene.adopt((0, 6), 1)
    assert company.gone == set()
    company.faulty.add(company.me)
    scene.adopt((0, 6), 1)  # what its draft has become
    assert company.gone == set()


def test_a_new_plan_is_judged_by_what_happens_under_it() -> None:
    scene = Scene()
    company, (one, other, third, _) = scene.company, scene.others
    scene.doubts(one, other)
    assert scene.gone(NOW + PATIENCE) == set()
    assert company.isolated
    company.stuck = True
    company.unfounded.add(third)
    scene.adopt((0, 6), 1)
    assert (company.isolated, company.aside, company.stuck) == (False, False, False)
    assert company.unfounded == set()
    assert not company.failures
    leader = Scene(leads=True)
    leader.doubts(leader.others[0])
    leader.gone(NOW + PATIENCE / 4)
    assert leader.company.aside  # it asks the others first
    leader.adopt((0, 5))
    assert not leader.company.aside


def test_a_report_is_one_of_a_member_on_others_under_this_plan() -> None:
    scene = Scene()
    company, (one, other, *_) = scene.company, scene.others
    scene.adopt((0, 6), 1)
    for changes in ({"ballot": 5}, {"ballot": 7}, {"epoch": 1}):
        scene.told(one, other, **changes)
    scene.told(STRANGER, other)
    scene.told(one, STRANGER, one, company.me)
    assert not company.failures
    scene.told(one, STRANGER, other)
    assert scene.gone(NOW + PATIENCE) == {other}
    company.agreement.plan = None
    company.reported(one, Suspect(0, PLACE.round, 0, 6, (other,)), NOW)


def test_all_who_failed_me_in_the_round_are_reported_once_that_has_settled() -> None:
    scene = Scene()
    company, (one, other, third, fourth) = scene.company, scene.others
    company.faulty.add(fourth)
    scene.doubts(one)
    scene.adopt((0, 6), 1, without={one, fourth})
    settled = NOW + 1.0 + PATIENCE / 4
    assert company.accused(settled, PATIENCE) == {fourth}
    scene.doubts(other, now=NOW + 1.0)
    scene.doubts(third, now=settled - SOON)
    scene.told(other, company.me, now=NOW)
    assert company.accused(settled - SOON, PATIENCE) == {fourth}
    assert company.accused(settled, PATIENCE) == {one, other, third, fourth}


def test_whom_the_others_can_do_without() -> None:
    scene = Scene()
    company, (one, other, third, fourth) = scene.company, scene.others
    assert not company.replaceable(one, NOW)
    company.faulty |= {one, other}
    assert company.replaceable(one, NOW)
    assert not company.replaceable(third, NOW)
    company.membership.expel(fourth)
    assert not company.replaceable(one, NOW)  # two are no majority of five
    company.membership.islands[fourth].expelled = False
    scene.adopt((0, 6), 1, without={one})
    company.faulty.clear()
    assert company.replaceable(one, NOW)  # the plan says so
    company.agreement.promised = (1, 0)  # where all are needed
    assert not company.replaceable(one, NOW)
