"""Whom the ready wait for, and what all waiting together may cost."""

from __future__ import annotations

import dataclasses

import pytest
from round_kit import World

from gossip.rounds.holding import (
    ALONE,
    ENOUGH,
    FIRST_S,
    MARGIN_S,
    MOST_S,
    NO_MORE,
    QUIET_S,
    QUIETER,
    SHARE,
    SLACK,
    Holding,
    share,
)
from protocols.identity import PeerId

A, B = PeerId("a"), PeerId("b")
NOBODY: frozenset[PeerId] = frozenset()


def test_who_arrives_was_worth_it_and_is_waited_for_again() -> None:
    holding = Holding()
    assert holding.holds({A: 2.0}, NOBODY, 1, 0.0)
    assert holding.holds({A: 0.5}, NOBODY, 1, 1.5)
    assert not holding.holds({}, {A}, 1, 2.0)
    assert holding.credit == pytest.approx(FIRST_S - 2.0)
    assert holding.holds({A: 1.0}, NOBODY, 1, 2.1)


def test_who_asks_no_more_may_do_so_again() -> None:
    holding = Holding()
    assert holding.holds({A: 2.0}, NOBODY, 1, 0.0)
    assert not holding.holds({A: NO_MORE}, NOBODY, 1, 1.5)
    assert holding.holds({A: 1.0}, NOBODY, 1, 1.6)  # it was not waited for in vain


def test_who_has_come_may_need_a_moment_more_to_get_ready() -> None:
    holding = Holding()
    assert holding.holds({A: 2.0}, NOBODY, 1, 0.0)
    assert holding.holds({A: 1.0}, {A}, 1, 1.5)
    assert not holding.holds({A: 1e6}, {A}, 1, 2.0)  # it does not know when: not that long
    assert holding.holds({A: 1.0}, NOBODY, 1, 2.1)  # and it was not waited for in vain


def test_a_word_is_believed_for_twice_as_long_and_then_less_often() -> None:
    holding, now = Holding(credit=MOST_S), 0.0
    for times in range(4):
        assert holding.holds({A: 1.0}, NOBODY, 1, now)
        now += SLACK + MARGIN_S - 0.01
        assert holding.holds({A: 1.0}, NOBODY, 1, now)
        now += 0.02
        assert not holding.holds({A: 1.0}, NOBODY, 1, now)
        quiet = QUIET_S * QUIETER**times
        assert not holding.holds({A: 1.0}, NOBODY, 1, now + 0.99 * quiet)
        now += quiet
    assert holding.holds({B: 1.0}, NOBODY, 1, now - 1.0)  # another one's word is as good as ever


@pytest.mark.parametrize("then", [{}, {A: FIRST_S + 1}, {A: float("nan")}])
def test_who_is_gone_or_needs_too_long_after_all_is_given_up_on_at_once(
    then: dict[PeerId, float],
) -> None:
    holding = Holding()
    assert holding.holds({A: 4.0}, NOBODY, 1, 0.0)
    assert not holding.holds(then, NOBODY, 1, 1.0)
    assert not holding.holds({A: 1.0}, NOBODY, 1, 2.0)


@pytest.mark.parametrize("seconds", [FIRST_S / ENOUGH + 0.1, 1e9, float("inf"), float("nan"), -1.0])
def test_what_there_is_no_credit_for_is_not_begun(seconds: float) -> None:
    assert not Holding().holds({A: seconds}, NOBODY, 1, 0.0)


def test_many_do_not_wait_as_long_at_a_time_as_one() -> None:
    for members in (1, 10):
        longest = MOST_S / members / ENOUGH
        assert not Holding(credit=MOST_S).holds({A: longest + 1.0}, NOBODY, members, 0.0)
        holding = Holding(credit=MOST_S)
        assert holding.holds({A: longest}, NOBODY, members, 0.0)
        assert not holding.holds({A: longest}, NOBODY, members, MOST_S / members)
        assert holding.credit == pytest.approx(MOST_S - MOST_S / members)


def test_credit_is_saved_up_but_not_without_end() -> None:
    holding = Holding()
    holding.holds({}, NOBODY, 1, 0.0)
    holding.holds({}, NOBODY, 1, 100.0)
    assert holding.credit == pytest.approx(FIRST_S + 100.0 * ALONE)
    holding.holds({}, NOBODY, 1, 1e7)
    assert holding.credit == MOST_S


def test_a_round_that_has_begun_costs_nothing_more() -> None:
    holding = Holding()
    assert holding.holds({A: 2.0}, NOBODY, 1, 0.0)
    holding.over(1.0)
    assert not holding.awaited
    assert not holding.holds({}, NOBODY, 1, 2.0)
    assert holding.credit == pytest.approx(FIRST_S - 1.0 + ALONE)
    assert holding.holds({A: 2.0}, NOBODY, 1, 2.0)  # nobody knows that it would not have come


def test_the_more_are_in_office_the_less_of_the_time_goes_into_waiting() -> None:
    assert [share(members) for members in (1, 2, 4, 5, 100)] == [0.5, 0.25, 0.125, 0.1, 0.1]
    holding = Holding(credit=0.0)
    for now, members in ((0.0, 2), (10.0, 50), (20.0, 1)):  # how many they were in the time before
        holding.holds({}, NOBODY, members, now)
    assert holding.credit == pytest.approx(10.0 * ALONE / 2 + 10.0 * SHARE)


@pytest.mark.parametrize(("members", "step"), [(1, 0.01), (1, 0.25), (3, 0.25), (8, 0.25)])
def test_any_number_of_liars_cost_no_more_than_the_share(members: int, step: float) -> None:
    liars = [PeerId(f"liar-{number}") for number in range(100)]
    holding, now, held = Holding(), 0.0, 0.0
    while now < 1000.0:
        asks = {liar: 0.3 + number / 100 for number, liar in enumerate(liars)}
        waits = holding.holds(asks, NOBODY, members, now)
        now += step
        held += step * waits
    assert held <= FIRST_S + share(members) * 1000.0 + 2 * step


def test_who_has_come_to_where_it_knew_them_to_be_is_not_given_up_on() -> None:
    """It says that it need not be waited for, a moment before it hears of the next round."""
    world = World(3, 1, outside=1)
    world.run(20.0)
    *members, newcomer = world.peers.values()
    assert members[0].round is not None
    company, peer = members[0].round.company, newcomer.identity.peer_id
    said = company.membership.announcement(peer)
    assert said is not None

    def says(behind_s: float, rounds: int) -> tuple[dict[PeerId, float], set[PeerId]]:
        newcomer.sequence += 1
        at = company.place.round - rounds
        word = dataclasses.replace(
            said, status="joining", round=at, head=b"h" * 32, behind_s=behind_s
        )
        company.membership.on_announce(word, b"", newcomer.sequence, world.now)
        return company.asking({peer}, world.now)

    assert says(0.5, 2) == ({peer: 0.5}, set())
    assert says(0.0, 1) == ({peer: NO_MORE}, set())
    assert says(0.6, 1) == ({peer: 0.6}, set())
    assert says(0.0, 0) == ({}, set()), "it stands in another place, and is not behind"
