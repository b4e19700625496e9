"""Votes that are refused or do not count, and who is named as a liar for its own."""

from __future__ import annotations

import dataclasses

import pytest
from gossip_kit import EVERYBODY, PLACE, RUN, SHAPE, adopt, leader, plan_of, results_of, roster_of

from gossip.plans.certificate import outcome_hash, outcome_of, sign_vote
from gossip.rounds.agreed import CastVote, Decided, Equivocated
from gossip.rounds.agreement import VOTES_KEPT, Agreement
from protocols.errors import BadSignature, Stale
from protocols.identity import Identity
from protocols.messages import Vote

pytestmark = pytest.mark.usefixtures("remembered_signatures")


def test_one_voter_cannot_crowd_out_the_others() -> None:
    members, plan, other = adopt()
    liar, honest = (i for i in members if i.peer_id != other.me)
    for number in range(300):
        other.on_vote(
            sign_vote(liar, RUN, 0, 3, PLACE.previous, (0, number), bytes([number % 256]) * 32)
        )
    assert len(other._votes) <= VOTES_KEPT
    results = results_of(plan, members)
    for result in results:
        other.on_held(result)
    hash_ = outcome_hash(outcome_of(plan, results, PLACE.work))
    events = other.on_vote(sign_vote(honest, RUN, 0, 3, PLACE.previous, (0, 0), hash_))
    assert [type(event) for event in events] == [Decided]


def test_votes_that_are_refused() -> None:
    members, _, other = adopt()
    voter = next(i for i in members if i.peer_id != other.me)
    vote = sign_vote(voter, RUN, 0, 3, PLACE.previous, (0, 0), b"a" * 32)
    other.on_vote(vote)
    with pytest.raises(BadSignature):
        other.on_vote(dataclasses.replace(vote, ballot=1))
    with pytest.raises(BadSignature):
        other.on_vote(sign_vote(EVERYBODY[4], RUN, 0, 3, PLACE.previous, (0, 0), b"a" * 32))
    with pytest.raises(BadSignature):  # nor under a ballot whose roster is not known
        other.on_vote(sign_vote(EVERYBODY[4], RUN, 0, 3, PLACE.previous, (7, 0), b"a" * 32))
    with pytest.raises(Stale):
        other.on_vote(sign_vote(voter, RUN, 0, 4, PLACE.previous, (0, 0), b"a" * 32))


def test_who_votes_for_two_outcomes_is_named_and_its_votes_do_not_count() -> None:
    members, _, other = adopt()
    liar, *honest = (i for i in members if i.peer_id != other.me)

    def vote(voter: Identity, outcome: bytes) -> Vote:
        return sign_vote(voter, RUN, 0, 3, PLACE.previous, (0, 0), outcome * 32)

    assert other.on_vote(vote(liar, b"a")) == []
    assert other.on_vote(vote(liar, b"b")) == [Equivocated(liar.peer_id)]
    assert other.on_vote(vote(liar, b"c")) == []
    needed = len(members) // 2 + 1
    for voter in honest[: needed - 1]:  # with the liar's they would be enough
        assert other.on_vote(vote(voter, b"a")) == []


def test_who_votes_for_another_outcome_under_a_later_ballot_does_not_lie() -> None:
    """Where an owner died, its parts are merged anew, and all vote once more."""
    members, _, other = adopt(5)
    first, second, *_ = (i for i in members if i.peer_id != other.me)

    def vote(voter: Identity, number: int) -> Vote:
        hash_ = bytes([number]) * 32
        return sign_vote(voter, RUN, 0, 3, PLACE.previous, (0, number), hash_)

    for number in range(VOTES_KEPT):
        assert other.on_vote(vote(first, number)) == []
    kept = dict(other._votes)
    assert len(kept) == VOTES_KEPT
    assert other.on_vote(vote(first, 3)) == []
    assert other._votes == kept, "what somebody passes on once more puts no other vote out"
    assert other.on_vote(vote(first, VOTES_KEPT)) == []
    assert sorted(ballot for ballot, _ in other._votes) == [(0, n + 1) for n in range(VOTES_KEPT)]
    assert other.on_vote(vote(second, 0)) == []


def test_a_vote_of_another_side_of_a_fork_says_nothing_about_its_voter() -> None:
    """Rounds of one number on two sides are two rounds: who was honest on both is not a liar."""
    members, plan, other = adopt()
    honest = next(i for i in members if i.peer_id != other.me)
    there = dataclasses.replace(PLACE, previous=b"f" * 32)
    apart = [honest, EVERYBODY[4]]
    plan_there = plan_of(leader(apart, place=there), apart, place=there)
    abroad = Agreement(honest, there, SHAPE, roster_of(apart))
    abroad.on_plan(plan_there.leader, plan_there)
    (cast,) = [e for r in results_of(plan_there, apart) for e in abroad.on_held(r)]
    assert isinstance(cast, CastVote)
    old = cast.vote
    assert (old.round, old.epoch, old.ballot) == (plan.round, plan.epoch, plan.ballot)
    mine = sign_vote(honest, RUN, 0, 3, PLACE.previous, (0, 0), b"a" * 32)

    for shown in [(old, mine), (mine, old)]:
        other = adopt()[2]
        events = []
        for vote in shown:
            try:
                events += other.on_vote(vote)
            except Stale:
                assert vote is old
        assert events == []
        assert other._votes == {((0, 0), b"a" * 32): {honest.peer_id: mine.signature}}
    relabelled = dataclasses.replace(old, previous=PLACE.previous)
    with pytest.raises(BadSignature):  # nor can anybody else make it one of this side
        other.on_vote(relabelled)


def test_who_was_on_two_sides_of_a_fork_and_lies_on_one_is_named_there() -> None:
    members, _, other = adopt()
    liar = next(i for i in members if i.peer_id != other.me)
    votes = [
        sign_vote(liar, RUN, 0, 3, previous, (0, 0), outcome * 32)
        for previous, outcome in [(b"f" * 32, b"c"), (PLACE.previous, b"a"), (PLACE.previous, b"b")]
    ]
    with pytest.raises(Stale):
        other.on_vote(votes[0])
    assert other.on_vote(votes[1]) == []
    assert other.on_vote(votes[2]) == [Equivocated(liar.peer_id)]
