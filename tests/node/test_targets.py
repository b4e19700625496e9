"""Which state a newcomer tries to get first, by what peers announce."""

from __future__ import annotations

from gossip_kit import RUN, announce_of
from lineage_kit import CREATOR, OTHERS

from gossip.place import Place
from gossip.plans.certificate import heavier
from node.entry.targets import targets


def test_of_a_fork_with_equal_work_all_take_the_side_that_the_others_come_over_to() -> None:
    ahead, behind = (Place(RUN, 0, 7, head * 32, b"s" * 32, 100) for head in (b"\2", b"\1"))
    assert heavier((behind.work, behind.previous), (ahead.work, ahead.previous))
    many = [announce_of(who.peer_id, behind) for who in OTHERS[:2]]
    first, second = targets([*many, announce_of(CREATOR.peer_id, ahead)])
    assert (first.head, second.head) == (ahead.previous, behind.previous)


def test_of_one_place_the_state_that_most_hold_is_taken() -> None:
    one, other = (Place(RUN, 0, 7, b"h" * 32, state * 32, 100) for state in (b"\2", b"\1"))
    many = [announce_of(who.peer_id, other) for who in OTHERS[:2]]
    assert targets([announce_of(CREATOR.peer_id, one), *many])[0].state == other.state


def test_who_was_restarted_in_the_round_that_most_had_come_to_is_who_is_ahead() -> None:
    ahead, behind = (Place(RUN, 0, r, b"h" * 32, b"s" * 32, 10 * r) for r in (7, 5))
    active = announce_of(CREATOR.peer_id, behind)
    restarted = [announce_of(who.peer_id, ahead, status="joining") for who in OTHERS[:2]]
    first, second = targets([active, *restarted])
    assert (first.round, set(first.sources)) == (7, {who.peer_id for who in OTHERS[:2]})
    assert (second.round, second.sources) == (5, (CREATOR.peer_id,))


def test_what_who_is_active_holds_is_taken_before_what_those_who_join_hold() -> None:
    one, other = (Place(RUN, 0, 7, b"h" * 32, state * 32, 100) for state in (b"\1", b"\2"))
    many = [announce_of(who.peer_id, other, status="joining") for who in OTHERS[:2]]
    first = targets([*many, announce_of(CREATOR.peer_id, one)])[0]
    assert (first.state, first.sources) == (one.state, (CREATOR.peer_id,))
    start = Place(RUN, 0, 0, b"g" * 32, b"s" * 32, 0)
    new = announce_of(OTHERS[0].peer_id, start, status="joining")
    assert [found.round for found in targets([new, announce_of(CREATOR.peer_id, one)])] == [7]
    assert [found.round for found in targets([new])] == [0]
