"""Whom one member blames for what failed in a round, and when it leaves that to the others."""

from __future__ import annotations

import pytest
from company_kit import EXPECTED, NOW, PATIENCE, SOON, Scene

BELIEVED = NOW + PATIENCE / 4  # what was found at NOW is certain
ALONE = NOW + PATIENCE  # likewise, if only the leader has found it


def test_one_that_fails_me_is_to_blame_after_a_moment() -> None:
    scene = Scene()
    one = scene.others[0]
    scene.doubts(one)
    assert scene.gone(BELIEVED - SOON) == set()
    assert scene.gone(BELIEVED) == {one}
    assert not scene.company.aside


def test_a_leader_that_doubts_alone_asks_before_it_acts() -> None:
    scene = Scene(leads=True)
    one = scene.others[0]
    scene.doubts(one)
    for now, gone in [(BELIEVED, set()), (ALONE - SOON, set()), (ALONE, {one})]:
        scene.hears(now)
        assert scene.gone(now) == gone
        assert scene.company.aside == (not gone)


def test_a_leader_need_not_ask_about_whom_others_name() -> None:
    scene = Scene(leads=True)
    one, other, *_ = scene.others
    scene.doubts(one)
    scene.told(other, one)
    scene.hears(BELIEVED)
    assert scene.gone(BELIEVED) == {one}


def test_a_leader_does_not_ask_about_whom_it_does_not_hear_either() -> None:
    """Silent for a heartbeat and a quarter, of a second each."""
    for silent, gone in [(1.25 - SOON, False), (1.25 + SOON, True)]:
        scene = Scene(leads=True)
        one = scene.others[0]
        scene.doubts(one, now=NOW + 2.0)
        scene.hears(BELIEVED + 2.0 - silent, one)
        assert scene.gone(BELIEVED + 2.0) == ({one} if gone else set())
        assert scene.company.aside != gone
    scene.hears(BELIEVED + 2.0)  # and it is to blame, though it is heard again
    assert scene.gone(BELIEVED + 2.0) == {one}
    assert not scene.company.aside


def test_whose_slices_i_gave_up_on_is_rather_to_blame_than_whom_it_names() -> None:
    scene = Scene()
    one, other, *_ = scene.others
    scene.told(one, other)
    scene.company.refused(one)
    assert scene.gone(BELIEVED) == {one}
    scene = Scene()
    scene.company.refused(scene.company.me)  # my own are of no use to me: that tells nothing
    scene.doubts(one := scene.others[0])
    assert scene.gone(BELIEVED) == {one}


def test_who_names_others_without_cause_is_to_blame_itself() -> None:
    scene = Scene()
    company, (one, other, third, fourth) = scene.company, scene.others
    scene.told(one, other)
    assert scene.gone(BELIEVED) == {other}
    scene.told(one, third, now=BELIEVED)
    assert scene.gone(BELIEVED) == set()  # it is not the one that it named first any more
    assert company.unfounded == set()
    certain = BELIEVED + PATIENCE / 4
    assert scene.gone(certain) == {one}
    assert company.unfounded == {one}
    scene.told(fourth, other, now=certain)  # it was right
    scene.doubts(third, now=certain)
    assert scene.gone(certain) == {other, third}
    assert company.unfounded == set()


def test_who_names_others_is_told_of_nothing_if_it_has_failed_somebody_as_well() -> None:
    scene = Scene()
    one, other, third, fourth = scene.others
    scene.told(one, other, third)
    scene.told(fourth, one)
    assert scene.gone(BELIEVED) == {one}
    assert scene.company.unfounded == set()


def test_whom_an_earlier_plan_left_out_stays_to_blame_while_that_explains_what_failed() -> None:
    scene = Scene()
    one, other, third, _ = scene.others
    scene.doubts(one)
    scene.told(third, one)
    assert scene.gone(BELIEVED) == {one}
    scene.adopt((0, 5), without={one})
    scene.doubts(other, now=BELIEVED)
    assert scene.gone(BELIEVED + PATIENCE / 4) == {one, other}


def test_that_the_silent_fail_me_says_nothing_of_me_unless_most_are() -> None:
    scene = Scene()
    one, other, third, _ = scene.others
    scene.company.membership.expel(one)
    scene.company.membership.expel(other)
    scene.doubts(one, other, third)
    assert scene.gone(BELIEVED) == {third}
    scene.company.membership.expel(third)
    assert scene.gone(BELIEVED) == set()
    assert scene.company.isolated


@pytest.mark.parametrize("known", ["by two failures", "by the plan"])
def test_who_is_at_fault_itself_blames_nobody(known: str) -> None:
    scene = Scene()
    company, (one, other, *_) = scene.company, scene.others
    if known == "by two failures":
        scene.doubts(one)
        assert scene.gone(BELIEVED) == {one}
        scene.doubts(other)
    else:
        scene.adopt((0, 5), without={company.me})
        scene.doubts(one)
    assert scene.gone(BELIEVED) == set()
    assert company.isolated
    assert company.aside
    company.settle(BELIEVED)
    assert company.gone == set()
    assert not company.stuck


def test_who_is_at_fault_no_longer_blames_others_again() -> None:
    scene = Scene()
    one, other, third, _ = scene.others
    scene.doubts(one, other)
    assert scene.gone(BELIEVED) == set()
    scene.told(third, one, other)
    assert scene.gone(BELIEVED) == {one, other}
    assert not scene.company.isolated


def test_half_of_all_may_be_at_fault_if_each_has_failed_several() -> None:
    scene = Scene(4)
    one, other, third = scene.others
    scene.doubts(one, other)
    scene.told(third, one)
    scene.told(other, third)  # which is no failure of its own
    assert scene.gone(BELIEVED) == set()
    assert scene.company.isolated
    scene = Scene(4)
    scene.doubts(one, other)
    scene.told(third, one, other)
    assert scene.gone(BELIEVED) == {one, other}


@pytest.mark.parametrize(
    ("count", "silent", "declining", "goes_on"),
    [
        (5, 2, 2, True),
        (5, 3, 0, False),
        (5, 0, 3, False),
        (4, 1, 1, True),
        (4, 2, 0, False),
        (4, 0, 2, False),
    ],
)
def test_where_nobody_has_gone_on_it_was_nobody_s_fault_if_most_are_heard_and_take_what_i_send(
    count: int, silent: int, declining: int, goes_on: bool
) -> None:
    scene = Scene(count)
    company, peers = scene.company, scene.others
    scene.doubts(*peers)
    for peer in peers[:declining]:
        company.declined(peer, NOW)
    begun = BELIEVED
    assert scene.gone(begun) == set()
    over = begun + 4 * PATIENCE + EXPECTED
    scene.hears(over - SOON, *peers[silent:])
    assert scene.gone(over - SOON) == set()
    assert (company.isolated, company.stuck) == (True, False)
    gone = set(peers[:silent]) if goes_on else set()
    assert scene.gone(over) == gone
    assert (company.isolated, company.stuck) == (not goes_on, goes_on)
    if goes_on:  # and it is forgotten
        assert scene.gone(over + SOON) == gone
        assert not company.aside
        assert company.accused(over + PATIENCE, PATIENCE) == set()
        scene.doubts(peers[-1], now=over)
        assert company.accused(over + PATIENCE, PATIENCE) == {peers[-1]}


def test_who_declines_what_i_send_fails_me() -> None:
    scene = Scene()
    one = scene.others[0]
    scene.company.declined(one, NOW)
    assert scene.gone(BELIEVED) == {one}


def test_a_leader_that_asked_and_is_alone_asks_no_more() -> None:
    scene = Scene(leads=True)
    company, peers = scene.company, scene.others
    scene.doubts(peers[0])
    scene.hears(BELIEVED)
    scene.gone(BELIEVED)
    scene.doubts(*peers)
    over = BELIEVED + 4 * PATIENCE + EXPECTED
    scene.hears(over - SOON)
    scene.gone(BELIEVED)
    assert scene.gone(over) == set()
    assert company.stuck
    assert not company.aside


def test_who_plans_anew_blames_at_once_whom_it_doubts_under_this_plan() -> None:
    scene = Scene()
    one, other, third, _ = scene.others
    scene.doubts(one)
    scene.told(third, one)
    scene.adopt((0, 6), 1)
    scene.company.settle(NOW)
    assert scene.company.gone == set()
    scene.doubts(other)
    scene.company.settle(NOW)
    assert scene.company.gone == {other}
