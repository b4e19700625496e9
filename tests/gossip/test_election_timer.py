"""When a member stands for leader: in its turn, not too often, and later if another one stands."""

from __future__ import annotations

import pytest

from gossip.rounds.election_timer import ElectionTimer

PATIENCE = 2.0
BEGUN = 10.0
SOON = 0.01


def stands(timer: ElectionTimer, turn: int, now: float) -> bool:
    return timer.my_turn(turn, now, PATIENCE)


def reforms(timer: ElectionTimer, turn: int, now: float) -> bool:
    return timer.my_turn_to_reform(turn, now, PATIENCE)


@pytest.mark.parametrize("turn", [0, 1, 3])
def test_each_stands_a_patience_after_the_one_before(turn: int) -> None:
    timer = ElectionTimer()
    timer.due(BEGUN)
    mine = BEGUN + turn * PATIENCE
    timer.due(mine - SOON)  # as it has been all the time
    assert not stands(timer, turn, mine - SOON)
    assert stands(timer, turn, mine)


@pytest.mark.parametrize("turn", [0, 2])
def test_the_first_of_those_left_stands_a_patience_after_most_are_gone(turn: int) -> None:
    timer = ElectionTimer()
    assert timer.lost_for(BEGUN) == 0.0
    mine = BEGUN + (1 + turn) * PATIENCE
    assert timer.lost_for(mine) == mine - BEGUN
    assert not reforms(timer, turn, mine - SOON)
    assert reforms(timer, turn, mine)


def test_nobody_stands_where_nothing_is_to_be_done() -> None:
    timer = ElectionTimer()
    assert not stands(timer, 0, BEGUN)
    timer.due(BEGUN)
    assert not reforms(timer, 0, BEGUN + 9 * PATIENCE)
    timer.not_due()
    assert not stands(timer, 0, BEGUN + 9 * PATIENCE)
    later = BEGUN + 10 * PATIENCE
    timer.due(later)
    assert not stands(timer, 1, later + PATIENCE - SOON)
    assert stands(timer, 1, later + PATIENCE)


def test_a_majority_that_was_back_is_lost_anew() -> None:
    timer = ElectionTimer()
    timer.lost_for(BEGUN)
    timer.not_lost()
    assert not reforms(timer, 0, BEGUN + 9 * PATIENCE)
    assert timer.lost_for(BEGUN + 9 * PATIENCE) == 0.0


def test_all_others_wait_for_their_turn_from_when_one_stands() -> None:
    timer = ElectionTimer()
    timer.due(BEGUN)
    asked = BEGUN + PATIENCE - SOON
    timer.put_off(asked)
    timer.due(BEGUN + PATIENCE)
    assert not stands(timer, 1, asked + PATIENCE - SOON)
    assert stands(timer, 1, asked + PATIENCE)


def test_who_did_not_get_to_lead_stands_again_after_a_while_and_after_that() -> None:
    timer = ElectionTimer()
    timer.due(BEGUN)
    for time in range(3):
        stood = BEGUN + time * 2 * PATIENCE
        assert stands(timer, 0, stood)
        assert not stands(timer, 0, stood + 2 * PATIENCE - SOON)


def test_who_leads_stands_at_once_should_its_plan_fail() -> None:
    timer = ElectionTimer()
    timer.due(BEGUN)
    timer.lost_for(BEGUN)
    assert stands(timer, 0, BEGUN)
    timer.leading()
    assert not stands(timer, 0, BEGUN + 9 * PATIENCE)  # nothing is due while its plan is good
    assert timer.lost_for(BEGUN + SOON) == 0.0
    timer.due(BEGUN + SOON)
    assert stands(timer, 0, BEGUN + SOON)
