"""Whom a member lets lead a round, by what it has seen of it so far."""

from __future__ import annotations

import pytest
from gossip_kit import EVERYBODY, agreement_of, announce_of, company_of

from gossip.plans.planning import Ballot
from gossip.rounds.candidacies import AT_ONCE, Candidacies
from protocols.errors import RemoteRefused
from protocols.identity import PeerId

NOW = 10.0
PATIENCE = 2.0
SOON = 0.01


def candidacies_of(count: int = 5, *, forgot: bool = False) -> tuple[Candidacies, list[PeerId]]:
    """One member's, in a round without a plan; and the others."""
    agreement = agreement_of(EVERYBODY[0], EVERYBODY[:count])
    company = company_of(agreement, NOW, forgot=forgot)
    return Candidacies(agreement, company), [one.peer_id for one in EVERYBODY[1:count]]


def follow(of: Candidacies, peer: PeerId, number: int, now: float, *, epoch: int = 0) -> None:
    """It asks for a ballot, and gets it unless there is a reason against it."""
    before, asked = of.agreement.promised, (epoch, number)
    of.check(peer, asked, now, PATIENCE)
    of.agreement.promised = max(before, asked)
    of.followed(peer, before, now)


def refuses(of: Candidacies, peer: PeerId, ballot: Ballot, now: float = NOW) -> bool:
    try:
        of.check(peer, ballot, now, PATIENCE)
    except RemoteRefused:
        return True
    return False


def test_those_who_can_go_on_need_no_other_roster() -> None:
    of, others = candidacies_of()
    with pytest.raises(RemoteRefused, match="no reason"):
        of.check(others[0], (1, 3), NOW, PATIENCE)
    assert not refuses(of, others[0], (0, 3))
    for gone in others[1:]:
        of.company.membership.expel(gone)
    follow(of, others[0], 3, NOW, epoch=1)
    for gone in others[1:]:
        of.company.membership.islands[gone].expelled = False
    assert refuses(of, others[0], (2, 3))
    assert not refuses(of, others[0], (1, 8))  # under way in the epoch that there is


def test_whom_the_others_can_do_without_may_still_lead_those_who_are_left() -> None:
    """What it asks for voids no plan of theirs."""
    of, (other, again) = candidacies_of(3, forgot=True)
    joining = announce_of(again, status="joining")
    of.company.membership.on_announce(joining, b"", 2, NOW)
    of.company.faulty.add(again)
    assert not of.company.majority_alive(NOW)
    assert of.company.replaceable(again, NOW)
    assert refuses(of, again, (0, 3))
    assert not refuses(of, again, (1, 3))
    assert not refuses(of, other, (0, 3))


def test_after_a_few_ballots_of_one_member_each_further_one_is_a_wait_later() -> None:
    of, (one, other, *_) = candidacies_of()
    for number in range(3):
        follow(of, one, 10 + number, NOW + number * PATIENCE / 4)
    number = 13
    for wait in (PATIENCE, 4 * PATIENCE, 16 * PATIENCE):
        early = NOW + wait - SOON
        assert refuses(of, one, (0, number), early)
        assert of.company.faulty == {one}
        of.company.faulty.clear()
        assert not refuses(of, one, (0, number - 1), early)  # it only asks again
        assert not refuses(of, other, (0, number), early)
        follow(of, one, number, NOW + wait)
        number += 1


def test_a_ballot_counts_that_i_have_followed_somebody_into() -> None:
    of, (one, other, *_) = candidacies_of()
    follow(of, other, 50, NOW)
    for number in range(2 * AT_ONCE):
        follow(of, one, number, NOW)  # I have promised a later one, and say so
    assert not refuses(of, one, (0, 51))
