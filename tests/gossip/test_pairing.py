"""Partners that follow from the membership, and exchanges that cost no more than themselves."""

from __future__ import annotations

import collections

from hypothesis import given
from hypothesis import strategies as st

from gossip.pairs.pairing import partner
from protocols.identity import Identity

PEERS = sorted(Identity.from_seed(bytes([n + 1]) * 32).peer_id for n in range(12))


@given(st.integers(1, 12), st.integers(0, 10_000), st.integers(0, 3), st.randoms())
def test_both_come_to_the_same_pair_without_a_word(
    count: int, round_: int, meeting: int, chance: object
) -> None:
    members = PEERS[:count]
    found = {me: partner(members, me, round_, b"run", meeting) for me in members}
    for me, other in found.items():
        if other is not None:
            assert other != me
            assert found[other] == me
    assert sum(other is None for other in found.values()) == count % 2
    shuffled = members[:]
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert partner(shuffled, members[0], round_, b"run", meeting) == found[members[0]]


def test_everybody_meets_everybody_about_as_often() -> None:
    times = collections.Counter(
        partner(PEERS[:6], PEERS[0], round_, b"run") for round_ in range(1000)
    )
    assert len(times) == 5
    assert min(times.values()) > 150
    rounds = [partner(PEERS, PEERS[0], 1, b"run", meeting) for meeting in range(6)]
    assert len(set(rounds)) > 1  # another meeting of a round is with somebody else


def test_a_member_that_only_one_knows_costs_the_others_nothing() -> None:
    """Lists that differ by one: most pairs of those who both know each other stay as they are."""
    same = 0
    for round_ in range(200):
        one = partner(PEERS[:8], PEERS[0], round_, b"run")
        other = partner(PEERS[:9], PEERS[0], round_, b"run")
        same += one == other
    assert same > 60
