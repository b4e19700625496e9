"""Who meets whom in pairs: it follows from the membership and the round, without asking.

Everybody sorts the members it knows by a hash of run, round and name, and neighbours in that
order are partners. Where two have the same list both come to the same pair without a word; where
their lists differ, one of them waits for somebody who meets another, and loses that exchange and
nothing else (:mod:`gossip.pairs.wandering`).
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from protocols.identity import PeerId


def order(members: Sequence[PeerId], round_: int, seed: bytes) -> list[PeerId]:
    """The members as they stand in a round: a permutation nobody can choose."""
    return sorted(set(members), key=lambda peer: _rank(peer, round_, seed))


def partner(
    members: Sequence[PeerId], me: PeerId, round_: int, seed: bytes, meeting: int = 0
) -> PeerId | None:
    """Whom ``me`` meets in a round; None for the one left over of an odd number.

    ``meeting`` counts the exchanges of one round, where there are several: each has another order.
    Raises :class:`ValueError` if ``me`` is not a member.
    """
    standing = order(members, round_, seed + meeting.to_bytes(2, "big"))
    place = standing.index(me) ^ 1
    return standing[place] if place < len(standing) else None


def successors(
    members: Sequence[PeerId], me: PeerId, round_: int, seed: bytes, count: int
) -> list[PeerId]:
    """To whom ``me`` sends in a round: who comes next in the round's order, closed to a ring.

    Where all know the same members everybody hears from exactly ``count`` others, so that the
    weights of push-sum stay near 1 and only losses move them.
    """
    standing = order([*members, me], round_, seed)
    at = standing.index(me)
    return [standing[(at + step) % len(standing)] for step in range(1, len(standing))][:count]


def _rank(peer: PeerId, round_: int, seed: bytes) -> bytes:
    return blake3(seed + round_.to_bytes(8, "big") + peer.encode()).digest(16)
