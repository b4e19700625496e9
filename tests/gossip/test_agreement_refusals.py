"""Plans, promises and votes told in promises that are refused, and change nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from gossip_kit import (
    EVERYBODY,
    PLACE,
    RUN,
    SHAPE,
    agreement_of,
    counts_of,
    decided,
    leader,
    plan_of,
    result_of,
    results_of,
    roster_of,
)

from gossip.plans.certificate import outcome_of, sign_result
from gossip.plans.validity import MAX_TOKENS, check_outcome, key_of
from gossip.rounds.agreed import Adopted
from gossip.rounds.agreement import LEAP, NONE
from gossip.rounds.proposer import Proposer
from protocols.bounds import MAX_ROSTER
from protocols.counts import Included
from protocols.errors import Malformed, RemoteProtocolError, Stale
from protocols.identity import Identity, PeerId
from protocols.messages import Contributor, Part, Plan, Prepare, Promise

pytestmark = pytest.mark.usefixtures("remembered_signatures")


def bent(plan: Plan, members: list[Identity]) -> dict[str, Plan]:
    """Plans no honest leader makes."""
    replace = dataclasses.replace
    first, *others = plan.contributors
    part, *parts = plan.parts
    owner = next(i for i in members if i.peer_id == part.owner)
    good = result_of(owner, plan, part.start, part.stop)

    def with_result(**changes: Any) -> Plan:
        bad = sign_result(owner, RUN, replace(good, **changes))
        return replace(plan, parts=(replace(part, result=bad), *parts))

    length = part.stop - part.start
    theirs = sign_result(EVERYBODY[4], RUN, replace(good, owner=EVERYBODY[4].peer_id))
    return {
        "no contributors": replace(plan, contributors=()),
        "a contributor twice": replace(plan, contributors=(first, first, *others)),
        "a negative weight": replace(plan, contributors=(replace(first, weight=-1.0), *others)),
        "more weight than tokens": replace(
            plan, contributors=(replace(first, weight=1e9), *others)
        ),
        "tokens beyond measure": replace(
            plan, contributors=(replace(first, tokens=MAX_TOKENS + 1), *others)
        ),
        "a stranger contributes": replace(
            plan, contributors=(Contributor(EVERYBODY[4].peer_id, 1.0, 1, True), *others)
        ),
        "fewer servers than none": replace(plan, servers=-1),
        "all bring work, and one is a server": replace(plan, servers=1),
        "no parts": replace(plan, parts=()),
        "a gap": replace(plan, parts=tuple(parts)),
        "a hole at the end": replace(plan, parts=plan.parts[:-1]),
        "too long": replace(plan, parts=(*plan.parts, Part(SHAPE.size, 2**62, part.owner, None))),
        "an empty part": replace(plan, parts=(Part(0, 0, part.owner, None), *plan.parts)),
        "a stranger merges": replace(
            plan, parts=(replace(part, owner=EVERYBODY[4].peer_id), *parts)
        ),
        "another codec": replace(plan, codec="fp32"),
        "no next roster": replace(plan, next_roster=()),
        "a doubled next roster": replace(plan, next_roster=plan.roster * 2),
        "too many next": replace(
            plan, next_roster=tuple(PeerId(f"p{n}") for n in range(MAX_ROSTER + 1))
        ),
        "endless patience": replace(plan, patience_s=1e300),
        "no patience": replace(plan, patience_s=0.0),
        "negative time": replace(plan, expected_s=-1.0),
        "endless time": replace(plan, expected_s=1e300),
        "a result that is not signed": replace(
            plan, parts=(replace(part, result=replace(good, signature=b"")), *parts)
        ),
        "a stranger's result": replace(plan, parts=(replace(part, result=theirs), *parts)),
        "a result of another round": with_result(round=4),
        "a result of another fragment": with_result(fragment=1),
        "a result for another range": with_result(stop=part.stop + 1024),
        "a result in another codec": with_result(codec="fp32"),
        "a result for other contributors": with_result(basis=b"x" * 32),
        "a result with a short digest": with_result(digest=b"x"),
        "nothing, with contributors": with_result(digest=b""),
        "an unknown contributor": with_result(counts=counts_of([Included(3, length)])),
        "a contributor counted twice": with_result(counts=2 * counts_of([Included(0, length)])),
        "more elements than there are": with_result(counts=counts_of([Included(0, length + 1)])),
        "another state": replace(plan, state=b"x" * 32),
        "another predecessor": replace(plan, previous=b"x" * 32),
        "another round": replace(plan, round=4),
        "another fragment": replace(plan, fragment=1),
        "another roster": replace(plan, roster=plan.roster[:2]),
        "a roster of strangers": replace(
            plan, epoch=1, roster=(*plan.roster, EVERYBODY[4].peer_id)
        ),
        "somebody else's ballot": replace(plan, ballot=1),
        "a ballot out of reach": replace(plan, ballot=3 * LEAP),
        "an epoch out of reach": replace(plan, epoch=2 * LEAP),
    }


BENT = bent(plan_of(leader(EVERYBODY[:3]), EVERYBODY[:3]), EVERYBODY[:3])


@pytest.mark.parametrize("how", BENT)
def test_a_bent_plan_is_refused_and_changes_nothing(how: str) -> None:
    members = EVERYBODY[:3]
    other = agreement_of(leader(members, 1), members)
    with pytest.raises(RemoteProtocolError):
        other.on_plan(BENT[how].leader, BENT[how])
    assert (other.plan, other.promised) == (None, NONE)


def test_no_promise_to_a_candidate_with_a_roster_of_strangers() -> None:
    """It would decide by itself, with names of its own making for a majority."""
    members, by = EVERYBODY[:3], EVERYBODY[1]
    mine = agreement_of(EVERYBODY[0], members)
    theirs = agreement_of(by, EVERYBODY)
    with pytest.raises(Malformed, match="strangers"):
        mine.on_prepare(by.peer_id, Proposer(theirs).prepare(1, theirs.roster))
    assert (mine.promised, mine.office) == (NONE, roster_of(members))


def test_no_promise_to_a_candidate_of_another_side_of_a_fork() -> None:
    """Else it would end a round that it takes no part in."""
    members, by = EVERYBODY[:3], EVERYBODY[1]
    mine = agreement_of(EVERYBODY[0], members)
    asked = Proposer(agreement_of(by, members)).prepare(0, mine.roster)
    with pytest.raises(Stale):
        mine.on_prepare(by.peer_id, dataclasses.replace(asked, previous=b"f" * 32))
    assert mine.promised == NONE
    assert isinstance(mine.on_prepare(by.peer_id, asked), Promise)


def test_survivors_give_no_part_to_who_is_not_among_them() -> None:
    """Nobody of a later epoch waits for it, so the part would never be merged."""
    members = EVERYBODY[:3]
    me, by, gone = leader(members, 1), leader(members, 2), leader(members)
    mine = agreement_of(me, members)
    asked = Proposer(agreement_of(by, members)).prepare(1, roster_of([me, by]))
    mine.on_prepare(by.peer_id, asked)
    plan = plan_of(by, [me, by], ballot=(asked.epoch, asked.ballot), owners=[by, gone])
    with pytest.raises(Malformed, match="outside the roster"):
        mine.on_plan(by.peer_id, plan)
    assert mine.plan is None


def test_a_plan_that_is_not_for_me_says_nothing_against_its_leader() -> None:
    """Plans are signed, so anybody can show one of another side of a fork, or of survivors."""
    members = EVERYBODY[:3]
    me = leader(members, 1)
    two = [identity for identity in members if identity is not me]
    there = dataclasses.replace(PLACE, previous=b"f" * 32)
    elsewhere = plan_of(leader(two, place=there), two, place=there)
    survivors = dataclasses.replace(plan_of(leader(two), two), epoch=1)
    for plan in (elsewhere, survivors):
        other = agreement_of(me, members)
        with pytest.raises(Stale):
            other.on_plan(plan.leader, plan)
        assert (other.plan, other.promised) == (None, NONE)
    asked = Proposer(agreement_of(leader(two), members)).prepare(1, roster_of(two))
    with pytest.raises(Stale):  # nor do I promise what is to be decided without me
        other.on_prepare(leader(two).peer_id, asked)
    assert (other.promised, other.office) == (NONE, roster_of(members))


def test_a_plan_of_a_later_epoch_is_adopted_only_by_who_has_promised_it() -> None:
    """Else one member could shrink the office of another to the two of them."""
    members = EVERYBODY[:3]
    me, other = leader(members, 1), leader(members, 2)
    two = [me, other]
    mine = agreement_of(me, members)
    asked = Proposer(agreement_of(other, members)).prepare(1, roster_of(two))
    plan = plan_of(other, two, ballot=(asked.epoch, asked.ballot))
    with pytest.raises(Stale):
        mine.on_plan(other.peer_id, plan)
    assert (mine.plan, mine.promised, mine.office) == (None, NONE, roster_of(members))
    assert isinstance(mine.on_prepare(other.peer_id, asked), Promise)
    assert mine.on_plan(other.peer_id, plan) == [Adopted(plan)]


def test_a_plan_must_come_from_its_leader() -> None:
    members = EVERYBODY[:3]
    other = agreement_of(leader(members, 1), members)
    with pytest.raises(Malformed):
        other.on_plan(leader(members, 2).peer_id, plan_of(leader(members), members))


@pytest.mark.parametrize(
    "how", ["a gap", "a negative weight", "no next roster", "another state", "another fragment"]
)
def test_a_bent_vote_in_a_promise_is_refused(how: str) -> None:
    """A new leader would have to propose it again, and be refused by everybody."""
    members = EVERYBODY[:3]
    results = results_of(plan_of(leader(members), members), members)
    candidate = agreement_of(leader(members, 1), members)
    proposer = Proposer(candidate)
    prepare = proposer.prepare(0, candidate.roster)
    bad = outcome_of(BENT[how], results[-len(BENT[how].parts) :], PLACE.work)
    for outcome in (bad, dataclasses.replace(bad, work=bad.work + 5)):
        with pytest.raises(RemoteProtocolError):
            proposer.on_promise(
                leader(members).peer_id, Promise(0, prepare.ballot, 0, 0, outcome, ())
            )


@pytest.mark.parametrize("more", [-1, 1])
def test_an_outcome_is_worth_the_tokens_that_are_in_it(more: int) -> None:
    """Of two sides of a fork the one with more work wins."""
    members = EVERYBODY[:3]
    outcome = decided(members).outcome
    check_outcome(outcome, PLACE, SHAPE, roster_of(members))
    with pytest.raises(Malformed, match="tokens"):
        check_outcome(
            dataclasses.replace(outcome, work=outcome.work + more),
            PLACE,
            SHAPE,
            roster_of(members),
        )


def test_unsigned_or_foreign_results_in_a_promise_are_refused() -> None:
    members = EVERYBODY[:3]
    plan = plan_of(leader(members), members)
    good = results_of(plan, members)[0]
    owner = next(i for i in members if i.peer_id == good.owner)
    stranger = result_of(EVERYBODY[4], plan, 0, 1024)
    bad = [
        dataclasses.replace(good, signature=b""),
        dataclasses.replace(good, digest=b"x" * 32),
        result_of(owner, plan, good.start, good.stop, round=9),
        result_of(owner, plan, 0, 2**60),
        stranger,
    ]
    candidate = agreement_of(leader(members, 1), members)
    proposer = Proposer(candidate)
    prepare = proposer.prepare(0, candidate.roster)
    for result in bad:
        with pytest.raises(RemoteProtocolError):
            proposer.on_promise(
                leader(members).peer_id, Promise(0, prepare.ballot, 0, 0, None, (good, result))
            )
    answer = Promise(0, prepare.ballot, 0, 0, None, (good,))
    proposer.on_promise(leader(members).peer_id, answer)
    remains = proposer.on_promise(leader(members, 2).peer_id, answer)
    assert remains is not None
    assert remains.held == {key_of(good): good}


def test_a_vote_under_a_ballot_only_just_promised_is_refused() -> None:
    members = EVERYBODY[:3]
    outcome = decided(members).outcome
    candidate = agreement_of(leader(members, 1), members)
    proposer = Proposer(candidate)
    ballot = proposer.prepare(0, candidate.roster).ballot
    with pytest.raises(Malformed):
        proposer.on_promise(leader(members).peer_id, Promise(0, ballot, 0, ballot, outcome, ()))


def test_ballots_as_high_as_they_get_do_not_stop_anybody() -> None:
    """Finding the next number of mine takes no longer for large numbers."""
    members = EVERYBODY[:3]
    other = agreement_of(leader(members, 1), members)
    step = LEAP - LEAP % 3 - 1  # a number of the third in the order
    reached = 0
    for _ in range(5):
        reached += step if reached == 0 else step - step % 3
        assert isinstance(
            other.on_prepare(
                leader(members, 2).peer_id,
                Prepare(0, 3, 0, reached, PLACE.previous, other.roster),
            ),
            Promise,
        )
    ballot = Proposer(other).prepare(0, other.roster).ballot
    assert reached < ballot <= reached + 3
    assert ballot % 3 == 1
    with pytest.raises(Malformed):
        other.on_prepare(
            leader(members, 2).peer_id,
            Prepare(0, 3, 0, 3 * 2**61 + 2, PLACE.previous, other.roster),
        )


def test_rosters_of_later_epochs_are_not_collected_for_ever() -> None:
    members = EVERYBODY[:3]
    other = agreement_of(members[0], members)
    roster = roster_of(members[:2])
    for epoch in range(1, 100):
        number = Proposer(agreement_of(members[1], members)).prepare(epoch, roster).ballot
        other.on_prepare(members[1].peer_id, Prepare(0, 3, epoch, number, PLACE.previous, roster))
    assert len(other._rosters) <= 32
    assert other.office == roster
