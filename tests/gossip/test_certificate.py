"""What makes a certificate valid, and what does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from gossip_kit import (
    PLACE,
    RUN,
    certificate_of,
    counts_of,
    decided,
    leader,
    plan_of,
    result_of,
    results_of,
    roster_of,
)

from gossip.plans.certificate import (
    MAX_WORK,
    basis_of,
    check_certificate,
    check_result,
    check_vote,
    genesis,
    heavier,
    leader_order,
    majority,
    outcome_hash,
    outcome_of,
    sign_vote,
    work_after,
)
from protocols.counts import Included
from protocols.errors import BadSignature, Stale
from protocols.identity import Identity
from protocols.messages import Certificate, Signed

Identities = Callable[[int], list[Identity]]


def test_a_majority_of_the_roster_certifies(identities: Identities) -> None:
    three = identities(3)
    full = decided(three)
    outcome, roster = full.outcome, roster_of(three)
    for voters in (three, three[:2], three[1:]):
        certificate = certificate_of(outcome, voters, roster)
        check_certificate(certificate, run=RUN, previous=PLACE.previous, roster=roster)
    with pytest.raises(BadSignature):
        check_certificate(
            certificate_of(outcome, three[:1], roster),
            run=RUN,
            previous=PLACE.previous,
            roster=roster,
        )


def broken(certificate: Certificate, stranger: Identity) -> dict[str, Certificate]:
    """Certificates that are almost right."""
    replace = dataclasses.replace
    outcome, votes = certificate.outcome, certificate.votes
    foreign = certificate_of(outcome, [stranger], (stranger.peer_id,)).votes[0]
    return {
        "another outcome": replace(certificate, outcome=replace(outcome, work=outcome.work + 1)),
        "another ballot": replace(certificate, ballot=5),
        "another epoch": replace(certificate, epoch=1),
        "a doubled vote": replace(certificate, votes=(votes[0], votes[0], votes[1])),
        "a stranger's vote": replace(certificate, votes=(*votes[:1], foreign)),
        "a swapped signature": replace(
            certificate,
            votes=(
                Signed(votes[0].voter, votes[1].signature),
                Signed(votes[1].voter, votes[0].signature),
            ),
        ),
        "no votes": replace(certificate, votes=()),
        "a smaller roster": replace(certificate, roster=certificate.roster[:1], votes=votes[:1]),
        "a doubled roster": replace(certificate, roster=certificate.roster * 2),
        "a roster of strangers": replace(
            certificate, epoch=1, roster=(stranger.peer_id,), votes=(foreign,)
        ),
        "an empty roster": replace(certificate, epoch=1, roster=(), votes=()),
        "another run": replace(certificate, run=b"x" * 32),
    }


*THREE, STRANGER = [Identity.from_seed(bytes([number]) * 32) for number in range(4)]
BROKEN = broken(decided(THREE), STRANGER)


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_not_exactly_right_is_refused(how: str) -> None:
    with pytest.raises((BadSignature, Stale)):
        check_certificate(BROKEN[how], run=RUN, previous=PLACE.previous, roster=roster_of(THREE))


def test_who_was_not_in_office_cannot_go_on_without_those_who_were() -> None:
    """Whoever joins anew with names of its own would else hand the run to itself."""
    outcome, office = decided(THREE).outcome, roster_of(THREE)
    for voters in ([STRANGER], [THREE[0], STRANGER]):
        taken = certificate_of(outcome, voters, roster_of(voters), ballot=(1, 0))
        check_certificate(taken, run=RUN, previous=PLACE.previous, roster=None)
        with pytest.raises(Stale, match="strangers"):
            check_certificate(taken, run=RUN, previous=PLACE.previous, roster=office)


def test_nobody_is_in_a_roster_twice() -> None:
    first, second = roster_of(THREE[:2])
    made = certificate_of(decided(THREE).outcome, THREE[:2], (first, second), ballot=(1, 0))
    doubled = dataclasses.replace(made, roster=(first, second, first))
    with pytest.raises(BadSignature, match="doubled"):
        check_certificate(doubled, run=RUN, previous=PLACE.previous, roster=roster_of(THREE))


def test_another_place_in_the_chain(identities: Identities) -> None:
    certificate = decided(identities(2))
    with pytest.raises(Stale):
        check_certificate(certificate, run=RUN, previous=b"x" * 32, roster=None)


def test_survivors_may_certify_in_a_later_epoch(identities: Identities) -> None:
    three = identities(3)
    roster, left = roster_of(three), roster_of(three[:1])
    outcome = decided(three).outcome
    alone = certificate_of(outcome, three[:1], left, ballot=(1, 1))
    check_certificate(alone, run=RUN, previous=PLACE.previous, roster=roster)
    with pytest.raises(Stale):  # but not in epoch 0
        check_certificate(
            certificate_of(outcome, three[:1], left),
            run=RUN,
            previous=PLACE.previous,
            roster=roster,
        )


def test_votes_are_for_one_run_round_and_ballot(identities: Identities) -> None:
    vote = sign_vote(identities(1)[0], RUN, 0, 3, PLACE.previous, (0, 2), b"h" * 32)
    check_vote(vote)
    for change in (
        {"run": b"x" * 32},
        {"fragment": 1},
        {"round": 4},
        {"previous": b"p" * 32},
        {"epoch": 1},
        {"ballot": 3},
        {"outcome": b"i" * 32},
        {"voter": identities(2)[1].peer_id},
    ):
        with pytest.raises(BadSignature):
            check_vote(dataclasses.replace(vote, **change))  # type: ignore[arg-type]


def test_results_are_signed_over_everything(identities: Identities) -> None:
    two = identities(2)
    plan = plan_of(leader(two), two)
    result = result_of(two[0], plan, 0, 1024)
    check_result(RUN, result)
    for change in (
        {"fragment": 1},
        {"round": 4},
        {"start": 1},
        {"stop": 2048},
        {"owner": two[1].peer_id},
        {"codec": "fp32"},
        {"digest": b"x" * 32},
        {"counts": counts_of([Included(0, 1024)])},
        {"basis": b"x" * 32},
    ):
        with pytest.raises(BadSignature):
            check_result(RUN, dataclasses.replace(result, **change))  # type: ignore[arg-type]
    with pytest.raises(BadSignature):
        check_result(b"x" * 32, result)


def test_the_basis_names_who_contributes_with_which_weight(identities: Identities) -> None:
    contributors = plan_of(leader(identities(2)), identities(2)).contributors
    first, second = contributors
    basis = basis_of("int4", contributors)
    assert basis != basis_of("int2", contributors)
    assert basis == basis_of("int4", [dataclasses.replace(first, active=False), second])
    assert basis == basis_of("int4", [dataclasses.replace(first, weight=100), second])
    for other in (
        [first],
        [second, first],
        [dataclasses.replace(first, weight=99.0), second],
        [dataclasses.replace(first, tokens=101), second],
        [dataclasses.replace(first, norm=1.0), second],
        [dataclasses.replace(first, scale=0.5), second],  # the parts have it in them
    ):
        assert basis != basis_of("int4", other)


def test_work_counts_the_share_that_is_merged(identities: Identities) -> None:
    three = identities(3)
    plan = plan_of(leader(three), three)
    results = results_of(plan, three)
    assert outcome_of(plan, results, 500).work == 800
    only = [
        dataclasses.replace(result, counts=counts_of([Included(1, result.stop - result.start)]))
        for result in results
    ]
    assert outcome_of(plan, only, 500).work == 600
    half = [
        dataclasses.replace(
            result, counts=counts_of([Included(1, (result.stop - result.start) // 2)])
        )
        for result in results
    ]
    assert outcome_of(plan, half, 500).work == 549  # rounded down
    assert outcome_of(plan, [], 500).work == 500
    assert work_after(MAX_WORK - 1, plan.contributors, results) == MAX_WORK


def test_names_differ_between_runs_and_outcomes(identities: Identities) -> None:
    assert genesis(b"a") != genesis(b"b")
    outcome = decided(identities(2)).outcome
    assert outcome_hash(outcome) != outcome_hash(dataclasses.replace(outcome, work=1))


def test_every_member_leads_equally_often(identities: Identities) -> None:
    roster = roster_of(identities(5))
    first = [leader_order(RUN, 0, number, roster)[0] for number in range(500)]
    assert all(60 <= first.count(peer) <= 140 for peer in roster)
    assert leader_order(RUN, 0, 7, roster) == leader_order(RUN, 0, 7, reversed(roster))


def test_fragments_of_one_round_have_leaders_of_their_own(identities: Identities) -> None:
    """They are under way at one time: one member would do the leading of all."""
    roster = roster_of(identities(5))
    assert len({leader_order(RUN, number, 7, roster)[0] for number in range(20)}) > 2
    runs = (bytes([number]) * 32 for number in range(20))
    assert len({leader_order(run, 0, 7, roster)[0] for run in runs}) > 2


def test_majorities_always_share_a_member() -> None:
    for size in range(1, 20):
        assert 2 * majority([None] * size) > size  # type: ignore[list-item]


def test_both_sides_judge_alike_which_chain_is_heavier() -> None:
    chains = [(work, head) for work in (1, 2) for head in (b"a", b"b")]
    for mine in chains:
        for theirs in chains:
            if mine != theirs:
                assert heavier(mine, theirs) != heavier(theirs, mine)
        assert not heavier(mine, mine)
    assert [chain for chain in chains if heavier((1, b"b"), chain)] == [(2, b"a"), (2, b"b")]
    assert heavier((1, b"a"), (1, b"b")), "of equal work the larger hash"
