"""Whose address records a node keeps where it cannot keep all."""

from __future__ import annotations

import pytest
from identity_kit import identity
from p2p_kit import fast_network

from protocols.whereabouts import MAX_INFORMANTS, Whereabouts

FRIENDS = [identity(number).peer_id for number in (2, 3)]


def records(*numbers: int) -> list[bytes]:
    network = fast_network()
    return [
        Whereabouts(network.join(identity(n).peer_id), identity(n)).publish([f"192.0.2.{n}:1"])
        for n in numbers
    ]


@pytest.fixture
def whereabouts() -> Whereabouts:
    """With room for four."""
    me = identity(1)
    return Whereabouts(fast_network().join(me.peer_id), me, limit=4)


def kept(whereabouts: Whereabouts, *numbers: int) -> list[int]:
    return [n for n in numbers if whereabouts.get(identity(n).peer_id) is not None]


def test_strangers_make_way_for_each_other_and_not_those_of_the_swarm(
    whereabouts: Whereabouts,
) -> None:
    whereabouts.is_member = FRIENDS.__contains__
    for record in records(10, 2, 3, *range(11, 31)):
        whereabouts.learn(record)
    assert kept(whereabouts, 2, 3, *range(10, 31)) == [2, 3, 29, 30]


def test_who_leaves_the_swarm_makes_way_as_others_do(whereabouts: Whereabouts) -> None:
    members = set(FRIENDS)
    whereabouts.is_member = members.__contains__
    for record in records(2, 3, *range(10, 20)):
        whereabouts.learn(record)
    members.remove(FRIENDS[0])
    for record in records(*range(20, 24)):
        whereabouts.learn(record)
    assert kept(whereabouts, 2, 3, *range(10, 24)) == [3, 21, 22, 23]


def test_a_swarm_for_which_there_is_no_room_loses_its_oldest(whereabouts: Whereabouts) -> None:
    whereabouts.is_member = lambda peer: True
    for record in records(*range(2, 9)):
        whereabouts.learn(record)
    assert kept(whereabouts, *range(2, 9)) == [5, 6, 7, 8]


def test_who_knows_those_of_the_swarm_is_remembered_whomever_strangers_name(
    whereabouts: Whereabouts,
) -> None:
    whereabouts.is_member = FRIENDS.__contains__
    whereabouts.mention(FRIENDS[0], by=FRIENDS[1])
    for number in range(10, 30):
        whereabouts.mention(identity(number).peer_id, by=identity(99).peer_id)
    assert list(whereabouts._mentions[FRIENDS[0]]) == [FRIENDS[1]]
    assert len(whereabouts._mentions) == 4


def test_of_those_who_named_a_peer_strangers_are_forgotten_first(whereabouts: Whereabouts) -> None:
    whereabouts.is_member = FRIENDS.__contains__
    about, strangers = identity(50).peer_id, [identity(n).peer_id for n in range(10, 20)]
    for by in (*FRIENDS, *strangers):
        whereabouts.mention(about, by=by)
    informants = set(whereabouts._mentions[about])
    assert informants == {*FRIENDS, *strangers[2 - MAX_INFORMANTS :]}
