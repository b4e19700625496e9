"""Paxos: whatever the network does, one outcome; and nothing malformed gets in."""

from __future__ import annotations

import dataclasses

import pytest
from gossip_kit import (
    EVERYBODY,
    PLACE,
    RUN,
    adopt,
    agreement_of,
    leader,
    plan_of,
    result_of,
    results_of,
    roster_of,
)

from gossip.plans.certificate import (
    outcome_hash,
    outcome_of,
    sign_vote,
)
from gossip.rounds.agreed import Adopted, CastVote, Decided, DecidedElsewhere
from gossip.rounds.agreement import NONE
from gossip.rounds.proposer import Proposer
from protocols.errors import BadSignature, Stale
from protocols.identity import Identity, PeerId
from protocols.messages import (
    Prepare,
    Promise,
    Vote,
)

pytestmark = pytest.mark.usefixtures("remembered_signatures")


def test_a_member_votes_when_it_holds_every_part_and_once_only() -> None:
    members, plan, other = adopt()
    results = results_of(plan, members)
    for result in results[:-1]:
        assert other.on_held(result) == []
    assert [part[2] for part in other.missing()] == [results[-1].owner]
    (event,) = other.on_held(results[-1])
    assert isinstance(event, CastVote)
    assert event.vote.outcome == outcome_hash(outcome_of(plan, results, PLACE.work))
    assert other.on_held(results[-1]) == []
    assert other.on_plan(plan.leader, plan) == []


def test_the_first_of_two_results_for_one_part_counts() -> None:
    members, plan, other = adopt()
    first, *rest = results_of(plan, members)
    owner = next(i for i in members if i.peer_id == first.owner)
    other.on_held(first)
    other.on_held(result_of(owner, plan, first.start, first.stop, b"another"))
    (event,) = [event for result in rest for event in other.on_held(result)]
    assert isinstance(event, CastVote)
    assert event.vote.outcome == outcome_hash(outcome_of(plan, [first, *rest], PLACE.work))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_results_for_one_part_the_one_that_the_plan_takes_counts(
    order: tuple[int, int],
) -> None:
    """Its owner was started anew, or lies: a vote for the other one would be for no outcome."""
    members, plan, other = adopt()
    first, *rest = results_of(plan, members)
    owner = next(i for i in members if i.peer_id == first.owner)
    two = first, result_of(owner, plan, first.start, first.stop, b"another")
    by = leader(members, 3)
    fixed = (dataclasses.replace(plan.parts[0], result=first), *plan.parts[1:])
    later = plan_of(by, members, ballot=(0, 3), parts=fixed)
    assert other.on_plan(by.peer_id, later) == [Adopted(later)]
    for number in order:
        assert other.on_held(two[number]) == []
    assert [part[2] for part in other.missing()] == [result.owner for result in rest]
    (event,) = [event for result in rest for event in other.on_held(result)]
    assert isinstance(event, CastVote)
    assert event.vote.outcome == outcome_hash(outcome_of(later, [first, *rest], PLACE.work))


def test_who_holds_other_bytes_of_a_part_than_its_plan_takes_does_not_vote() -> None:
    """It could not give them to anybody, nor apply them."""
    members, plan, other = adopt()
    first, *rest = results_of(plan, members)
    owner = next(i for i in members if i.peer_id == first.owner)
    for result in (result_of(owner, plan, first.start, first.stop, b"another"), *rest[1:]):
        assert other.on_held(result) == []
    by = leader(members, 3)
    fixed = (dataclasses.replace(plan.parts[0], result=first), *plan.parts[1:])
    later = plan_of(by, members, ballot=(0, 3), parts=fixed)
    assert other.on_plan(by.peer_id, later) == [Adopted(later)]
    assert other.on_held(rest[0]) == []
    assert [part[2] for part in other.missing()] == [first.owner]
    assert [type(event) for event in other.on_held(first)] == [CastVote]


def test_what_comes_before_the_plan_that_it_is_for_counts() -> None:
    """Also where it comes twice, by two ways."""
    members = EVERYBODY[:3]
    plan = plan_of(leader(members), members)
    other = agreement_of(leader(members, 1), members)
    for result in 2 * results_of(plan, members):
        assert other.on_held(result) == []
    assert [type(e) for e in other.on_plan(plan.leader, plan)] == [Adopted, CastVote]


def test_a_result_merged_for_other_contributors_does_not_count() -> None:
    """Its indices would mean other islands."""
    members, plan, other = adopt()
    fewer = dataclasses.replace(plan, contributors=plan.contributors[1:])
    owner = next(i for i in members if i.peer_id == plan.parts[0].owner)
    foreign = result_of(owner, fewer, plan.parts[0].start, plan.parts[0].stop)
    other.on_held(foreign)
    assert len(other.missing()) == len(plan.parts)
    assert other.on_prepare(  # and is not passed on to a new leader
        leader(members, 2).peer_id, Prepare(0, 3, 0, 2, PLACE.previous, other.roster)
    ) == Promise(0, 2, 0, 0, None, ())


def test_a_majority_of_votes_decides_for_who_holds_it_and_is_pointed_out_to_who_does_not() -> None:
    members, plan, other = adopt()
    results = results_of(plan, members)
    hash_ = outcome_hash(outcome_of(plan, results, PLACE.work))
    votes = [
        sign_vote(i, RUN, 0, 3, PLACE.previous, (0, 0), hash_)
        for i in members
        if i.peer_id != other.me
    ]
    assert other.on_vote(votes[0]) == []
    assert other.on_vote(votes[0]) == []  # the same again
    (event,) = other.on_vote(votes[1])
    assert isinstance(event, DecidedElsewhere)
    assert set(event.peers) == {vote.voter for vote in votes}
    events = [event for result in results for event in other.on_held(result)]
    assert [type(event) for event in events] == [CastVote, Decided]
    assert other.certificate is not None
    assert len(other.certificate.votes) == 3
    assert other.on_vote(votes[0]) == other.on_held(results[0]) == []


def test_who_has_voted_for_something_else_does_not_take_it_for_decided() -> None:
    members, plan, other = adopt()
    results = results_of(plan, members)
    mine = [event for result in results for event in other.on_held(result)]
    assert [type(event) for event in mine] == [CastVote]
    later = [
        sign_vote(i, RUN, 0, 3, PLACE.previous, (0, 2), b"a" * 32)
        for i in members
        if i.peer_id != other.me
    ]
    assert other.on_vote(later[0]) == []
    assert [type(event) for event in other.on_vote(later[1])] == [DecidedElsewhere]
    assert other.certificate is None
    assert other.voted_for(outcome_hash(outcome_of(plan, results, PLACE.work)))
    assert not other.voted_for(b"a" * 32)


def test_votes_that_somebody_has_collected_decide() -> None:
    members, plan, other = adopt()
    late = agreement_of(
        next(i for i in members if i.peer_id not in (other.me, plan.leader)), members
    )
    late.on_plan(plan.leader, plan)
    results = results_of(plan, members)
    for result in results:
        other.on_held(result)
        late.on_held(result)
    assert other.collected() is None
    hash_ = outcome_hash(outcome_of(plan, results, PLACE.work))
    for i in members:
        if i.peer_id != other.me and other.certificate is None:
            other.on_vote(sign_vote(i, RUN, 0, 3, PLACE.previous, (0, 0), hash_))
    votes = other.collected()
    assert votes is not None
    assert (votes.outcome, len(votes.votes)) == (hash_, 2)
    forged = dataclasses.replace(votes, outcome=b"x" * 32)
    with pytest.raises(BadSignature):
        late.on_votes(forged)
    assert [type(event) for event in late.on_votes(votes)] == [Decided]


def test_there_is_nothing_to_hold_of_a_part_that_is_certified_as_empty() -> None:
    members, plan, _ = adopt()
    other = agreement_of(leader(members, 1), members)
    owner = next(i for i in members if i.peer_id == plan.parts[0].owner)
    part = plan.parts[0]
    empty = result_of(owner, plan, part.start, part.stop, digest=b"", counts=b"")
    plan = dataclasses.replace(
        plan, parts=(dataclasses.replace(part, result=empty), *plan.parts[1:])
    )
    assert other.on_plan(plan.leader, plan) == [Adopted(plan)]
    results = results_of(plan, members)
    assert [part[2] for part in other.missing()] == [result.owner for result in results[1:]]
    (event,) = [event for result in results[1:] for event in other.on_held(result)]
    assert isinstance(event, CastVote)
    assert event.vote.outcome == outcome_hash(outcome_of(plan, results, PLACE.work))


def test_a_later_ballot_ends_the_earlier_one() -> None:
    members, plan, other = adopt()
    assert not other.awaits_plan
    challenger = agreement_of(leader(members, 2), members)
    prepare = Proposer(challenger).prepare(0, challenger.roster)
    promise = other.on_prepare(challenger.me, prepare)
    assert promise == Promise(0, prepare.ballot, 0, 0, None, ())
    assert other.awaits_plan
    for result in results_of(plan, members):
        assert other.on_held(result) == []  # holds everything, and must not vote for it
    assert other.on_plan(plan.leader, plan) == []
    again = other.on_prepare(challenger.me, prepare)
    assert isinstance(again, Promise)
    assert len(again.held) == len(plan.parts)


@pytest.mark.parametrize("heard", [((0, 0), (0, 4)), ((0, 4), (0, 0))])
def test_a_new_leader_repeats_the_vote_of_the_highest_ballot(
    heard: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    members = EVERYBODY[:3]
    plans = {
        (0, 0): plan_of(leader(members), members),
        (0, 4): plan_of(leader(members, 4), members, ballot=(0, 4)),
    }
    plans[0, 4] = dataclasses.replace(plans[0, 4], contributors=plans[0, 4].contributors[:2])
    candidate = agreement_of(leader(members, 2), members)
    proposer = Proposer(candidate)
    candidate.promised = (0, 6)
    prepare = proposer.prepare(0, candidate.roster)
    assert prepare.ballot == 8
    mine = candidate.on_prepare(candidate.me, prepare)
    assert isinstance(mine, Promise)
    outcomes = {
        at: outcome_of(plan, results_of(plan, members), PLACE.work) for at, plan in plans.items()
    }
    others = [peer for peer in candidate.roster if peer != candidate.me]
    first, last = (Promise(0, 8, *at, outcomes[at], ()) for at in heard)
    assert proposer.on_promise(others[0], first) is None
    remains = proposer.on_promise(others[1], last)
    assert remains is not None
    assert remains.voted == outcomes[0, 4]


def test_who_has_promised_more_does_not_end_a_candidacy_and_strangers_promise_nothing() -> None:
    members = EVERYBODY[:4]
    candidate = agreement_of(leader(members, 1), members)
    proposer = Proposer(candidate)
    prepare = proposer.prepare(0, candidate.roster)
    mine = candidate.on_prepare(candidate.me, prepare)
    assert isinstance(mine, Promise)
    proposer.on_promise(candidate.me, mine)
    ask = Promise(0, prepare.ballot, 0, 0, None, ())
    assert proposer.on_promise(EVERYBODY[4].peer_id, ask) is None
    bound, *others = (peer for peer in candidate.roster if peer != candidate.me)
    assert proposer.on_promise(bound, Promise(0, prepare.ballot + 3, 0, 0, None, ())) is None
    assert proposer.on_promise(others[0], ask) is None
    remains = proposer.on_promise(others[1], ask)  # these three are a majority
    assert remains is not None
    assert bound not in proposer.promises


def test_a_candidate_asks_for_its_lowest_number_above_all_that_it_has_seen() -> None:
    members = EVERYBODY[:3]
    for turn, promised, epoch, number in [
        (1, NONE, 0, 1),
        (0, NONE, 0, 3),  # 0 is the ballot that needs no promises
        (1, (0, 1), 0, 4),
        (2, (0, 1), 0, 2),
        (1, (0, 9), 1, 1),
        (1, (1, 9), 1, 10),
    ]:
        candidate = agreement_of(leader(members, turn), members)
        candidate.promised = promised
        assert Proposer(candidate).prepare(epoch, candidate.roster).ballot == number


def test_who_stands_again_keeps_what_was_promised_unless_it_is_outbid() -> None:
    members = EVERYBODY[:4]
    candidate = agreement_of(leader(members, 1), members)
    proposer = Proposer(candidate)
    others = [peer for peer in candidate.roster if peer != candidate.me]

    def stand() -> int:
        prepare = proposer.prepare(0, candidate.roster)
        mine = candidate.on_prepare(candidate.me, prepare)
        assert isinstance(mine, Promise)
        assert proposer.on_promise(candidate.me, mine) is None
        return prepare.ballot

    first = stand()
    assert proposer.on_promise(others[0], Promise(0, first, 0, 0, None, ())) is None
    assert stand() == first  # the third promise is still on its way
    assert proposer.on_promise(others[1], Promise(0, first + 1, 0, 0, None, ())) is None
    second = stand()
    assert second > first + 1
    assert proposer.on_promise(others[0], Promise(0, second, 0, 0, None, ())) is None
    assert stand() == second
    remains = proposer.on_promise(others[1], Promise(0, second, 0, 0, None, ()))
    assert remains is not None
    assert remains.ballot == (0, second)
    assert stand() > second  # it came up with no plan, and the promises are used up


def test_votes_of_who_is_not_in_a_later_epoch_do_not_count_there() -> None:
    """They may come before its roster is known here, and are kept until it is."""
    me, by, other, outside, another = EVERYBODY
    survivors = [me, by, other]
    mine = agreement_of(me, EVERYBODY)
    prepare = Proposer(agreement_of(by, EVERYBODY)).prepare(1, roster_of(survivors))
    ballot = (1, prepare.ballot)
    plan = plan_of(by, survivors, ballot=ballot)
    results = results_of(plan, survivors)
    hash_ = outcome_hash(outcome_of(plan, results, PLACE.work))

    def vote(voter: Identity) -> Vote:
        return sign_vote(voter, RUN, 0, 3, PLACE.previous, ballot, hash_)

    assert mine.on_vote(vote(outside)) == []
    assert isinstance(mine.on_prepare(by.peer_id, prepare), Promise)
    mine.on_plan(by.peer_id, plan)
    events = [event for result in results for event in mine.on_held(result)]
    assert [type(event) for event in events] == [CastVote], "with mine it is one of three"
    with pytest.raises(BadSignature):
        mine.on_vote(vote(another))
    (done,) = mine.on_vote(vote(other))
    assert isinstance(done, Decided)
    assert {signed.voter for signed in done.certificate.votes} == {me.peer_id, other.peer_id}


def test_in_a_later_epoch_all_must_promise() -> None:
    members = EVERYBODY[:3]
    candidate = agreement_of(leader(members, 1), members)
    proposer = Proposer(candidate)
    prepare = proposer.prepare(1, candidate.roster)
    mine = candidate.on_prepare(candidate.me, prepare)
    assert isinstance(mine, Promise)
    assert proposer.on_promise(candidate.me, mine) is None
    for peer in candidate.roster:
        if peer != candidate.me:
            other = agreement_of(next(i for i in members if i.peer_id == peer), members)
            promise = other.on_prepare(candidate.me, prepare)
            assert isinstance(promise, Promise)
            remains = proposer.on_promise(peer, promise)
    assert remains is not None


def test_who_has_promised_a_later_epoch_is_known_to_be_there_until_i_have_as_well() -> None:
    members = EVERYBODY[:3]
    mine, other = agreement_of(leader(members, 1), members), leader(members, 2)
    Proposer(mine).on_promise(other.peer_id, Promise(1, 7, 0, 0, None, ()))
    assert mine.beyond == {other.peer_id}
    mine.heard(EVERYBODY[4].peer_id, 3)
    assert mine.beyond == {other.peer_id}, "not a stranger"
    candidate = agreement_of(other, members)
    mine.on_prepare(candidate.me, Proposer(candidate).prepare(1, candidate.roster))
    assert mine.beyond == set()


def test_one_ballot_of_a_later_epoch_belongs_to_one_roster() -> None:
    """Two groups of survivors that overlap may come upon the same number."""
    members = EVERYBODY[:4]
    shared = agreement_of(members[0], members)
    asking: dict[int, list[tuple[PeerId, Prepare]]] = {0: [], 1: []}
    for partner in members[1:]:
        mine = roster_of([members[0], partner])
        turn = shared.order(mine).index(partner.peer_id)
        prepare = Prepare(0, 3, 1, 10 + turn, PLACE.previous, mine)
        asking[turn].append((partner.peer_id, prepare))
    (one, first), (other, second) = max(asking.values(), key=len)[:2]  # of three two are in turn
    assert (first.epoch, first.ballot) == (second.epoch, second.ballot)
    assert isinstance(shared.on_prepare(one, first), Promise)
    with pytest.raises(Stale, match="another roster has taken this ballot"):
        shared.on_prepare(other, second)
    assert isinstance(shared.on_prepare(one, first), Promise)


# --- what is refused ------------------------------------------------------------------------------
