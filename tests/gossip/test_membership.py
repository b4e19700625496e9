"""Who is believed to be there, from what was heard and when."""

from __future__ import annotations

import pytest
from gossip_kit import announce_of

from gossip.membership.members import Liveness, Membership, Patience
from protocols.bounds import MAX_PEERS
from protocols.identity import PeerId

ME, A, B = PeerId("me"), PeerId("a"), PeerId("b")


def member(now: float = 0.0, **changes: object) -> Membership:
    membership = Membership(ME)
    assert membership.on_announce(announce_of(A, **changes), b"e", 1, now)
    return membership


def test_silence_makes_suspect_then_dead_and_one_word_alive_again() -> None:
    membership = member()
    assert membership.liveness(A, 3.9) is Liveness.ALIVE
    assert membership.liveness(A, 4.1) is Liveness.SUSPECT
    assert membership.liveness(A, 15.9) is Liveness.SUSPECT
    assert membership.liveness(A, 16.1) is Liveness.DEAD
    membership.on_contact(A, 17.0)
    assert membership.liveness(A, 17.5) is Liveness.ALIVE


def test_who_was_never_heard_of_is_dead_and_this_node_is_alive() -> None:
    membership = Membership(ME)
    assert membership.liveness(A, 0.0) is Liveness.DEAD
    assert membership.liveness(ME, 1e9) is Liveness.ALIVE
    membership.on_contact(A, 0.0)
    membership.on_unreachable(A, 0.0)
    assert membership.announcement(A) is None


def test_the_newest_incarnation_and_sequence_win() -> None:
    membership = member(incarnation=2)
    assert not membership.on_announce(announce_of(A, incarnation=2, tokens=7), b"", 1, 1.0)
    assert not membership.on_announce(announce_of(A, incarnation=1, tokens=7), b"", 99, 1.0)
    assert membership.on_announce(announce_of(A, incarnation=2, tokens=7), b"new", 2, 1.0)
    assert membership.on_announce(announce_of(A, incarnation=3, tokens=8), b"", 1, 1.0)
    announce = membership.announcement(A)
    assert announce is not None
    assert announce.tokens == 8


def test_an_old_announcement_is_no_sign_of_life() -> None:
    membership = member()
    membership.on_announce(announce_of(A), b"", 1, 20.0)
    assert membership.liveness(A, 20.0) is Liveness.DEAD


def test_refused_connections_are_believed_sooner_than_silence() -> None:
    membership = member()
    membership.on_unreachable(A, 1.0)
    assert membership.liveness(A, 1.1) is Liveness.SUSPECT
    membership.on_unreachable(A, 3.0)  # counts from the first
    assert membership.liveness(A, 4.1) is Liveness.DEAD
    membership.on_contact(A, 4.2)
    assert membership.liveness(A, 4.3) is Liveness.ALIVE


def test_the_irregular_are_given_more_time() -> None:
    membership = member()
    now = 0.0
    for sequence in range(2, 60):
        now += 3.0
        membership.on_announce(announce_of(A), b"", sequence, now)
        membership.on_answer(A, 0.01)
    assert membership.liveness(A, now + 3.5) is Liveness.ALIVE
    assert membership.liveness(A, now + 3.7) is Liveness.SUSPECT


def test_one_long_silence_does_not_make_a_peer_slow() -> None:
    membership = member()
    membership.on_announce(announce_of(A), b"", 2, 500.0)
    assert membership.liveness(A, 500.0 + 12.0) is not Liveness.ALIVE


def test_farewell() -> None:
    membership = member()
    membership.on_announce(announce_of(A, status="leaving"), b"", 2, 1.0)
    membership.on_contact(A, 1.1)
    assert membership.liveness(A, 1.2) is Liveness.LEFT
    assert membership.alive(1.2) == []
    membership.on_announce(announce_of(A, incarnation=2), b"", 1, 2.0)
    assert membership.alive(2.0) == [A]


def test_time_in_which_this_process_stood_still_does_not_count() -> None:
    membership = member()
    membership.on_announce(announce_of(B), b"", 1, 0.0)
    membership.on_unreachable(B, 1.0)
    membership.forgive(100.0, 101.0)
    assert membership.liveness(A, 103.0) is Liveness.ALIVE
    assert membership.liveness(B, 103.0) is Liveness.SUSPECT
    assert membership.liveness(B, 104.5) is Liveness.DEAD


def test_the_long_silent_are_forgotten() -> None:
    membership = member()
    membership.on_announce(announce_of(B), b"", 1, 500.0)
    membership.forget_old(601.0)
    assert set(membership.islands) == {B}


def test_a_full_table_makes_room_by_the_longest_silent_that_is_dead() -> None:
    membership = Membership(ME)
    peers = [PeerId(f"p{i}") for i in range(MAX_PEERS)]
    for number, peer in enumerate(peers):
        membership.on_announce(announce_of(peer), b"", 1, number / 1000)
    assert not membership.on_announce(announce_of(A), b"", 1, 1.0)
    assert membership.liveness(peers[0], 5.0) is Liveness.SUSPECT
    assert not membership.on_announce(announce_of(A), b"", 1, 5.0)  # it may be back in a moment
    assert membership.on_announce(announce_of(A), b"", 1, 30.0)
    assert peers[0] not in membership.islands
    assert len(membership.islands) == MAX_PEERS


def test_estimates_run_on_after_the_announcement() -> None:
    membership = member(eta=5.0)
    assert membership.eta(A, 2.0) == pytest.approx(3.0)
    assert membership.eta(A, 9.0) == 0.0


def test_only_live_islands_take_part() -> None:
    membership = member()
    membership.on_announce(announce_of(B, role="seed"), b"", 1, 0.0)
    assert [a.peer for a in membership.members_alive(1.0)] == [A]
    assert sorted(membership.alive(1.0)) == [A, B]
    assert membership.members_alive(60.0) == []


def test_who_announces_itself_seldom_is_not_dead_between_two_announcements() -> None:
    membership = Membership(ME, Patience(heartbeat_s=5.0))
    membership.on_announce(announce_of(A), b"", 1, 0.0)
    assert membership.liveness(A, 19.0) is Liveness.ALIVE


def test_announcements_of_this_node_by_others_are_no_news() -> None:
    membership = Membership(ME)
    assert not membership.on_announce(announce_of(ME), b"", 1, 0.0)
    assert membership.islands == {}
