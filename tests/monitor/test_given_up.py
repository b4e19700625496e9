"""What is told of an attempt at a round that came to nothing."""

from __future__ import annotations

import dataclasses

import pytest
from gossip_kit import announce_of, leader, roster_of
from identity_kit import identity
from planning_kit import fresh

from node.monitor.wording import short
from node.reports.attempts import given_up
from protocols.messages import Plan

MEMBERS = [identity(number) for number in range(1, 5)]


def plan() -> Plan:
    return fresh(MEMBERS, [announce_of(one.peer_id) for one in MEMBERS])


def test_it_is_the_round_and_fragment_of_the_plan() -> None:
    before = dataclasses.replace(plan(), round=7, fragment=2)
    event = given_up(before, None)
    assert (event.round, event.fragment) == (7, 2)
    assert event.reason == "what it built on is given up for what the others have"


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("renewed", [True, False])
def test_it_says_why_there_is_another_plan(epoch: int, renewed: bool) -> None:
    before = plan()
    *_, last = (peer for peer in roster_of(MEMBERS) if peer != before.leader)
    after = dataclasses.replace(
        before,
        ballot=3,
        epoch=epoch,
        leader=before.leader if renewed else last,
        roster=before.roster[:2] if epoch else before.roster,
    )
    why = given_up(before, after).reason
    if epoch:
        assert why == "too few of those in office are left: 2 go on, epoch 1"
    elif renewed:
        assert why == f"{short(before.leader)} has another plan"
    else:
        assert why == f"{short(last)} leads in place of {short(before.leader)}"


def test_it_names_whom_the_new_plan_does_without() -> None:
    before = plan()
    gone = next(peer for peer in roster_of(MEMBERS) if peer != leader(MEMBERS).peer_id)
    contributors = tuple(
        dataclasses.replace(one, active=one.peer != gone) for one in before.contributors
    )
    parts = tuple(dataclasses.replace(part, owner=before.leader) for part in before.parts)
    after = dataclasses.replace(before, ballot=4, contributors=contributors, parts=parts)
    told = given_up(before, after).reason
    assert told.startswith(f"{short(before.leader)} has another plan, without ")
    assert short(gone) in told
    assert short(before.leader) not in told.partition("without")[2]
