"""Into how many parts a member's share is cut: over long ways several. Pure.

Each slice and each merged part takes one connection, so a share is cut into as many parts as
:mod:`protocols.lanes.streams` asks for connections. Connections have equal shares of a link, so all
parts of far members are about as large: else those of small shares would be over first, and then
everybody would send to the same few owners at once, faster than their links carry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from statistics import median

from gossip.plans.partition import ALIGN, MIN_PART, MemberLink
from protocols.identity import PeerId
from protocols.lanes.streams import streams

ALL = 24  # connections of one member in each direction, with all the others
LEAST = 2 * MIN_PART  # elements


def parts_of(link: MemberLink, round_trip_s: float, members: int) -> int:
    """Number of parts of the share of ``link``, ``round_trip_s`` away, among ``members``."""
    others = members - 1
    if not others:
        return 1
    each = link.speed / others
    return max(1, min(streams(round_trip_s, each), ALL // others))


def by_owner(
    me: PeerId, links: Sequence[MemberLink], trips: Mapping[PeerId, float]
) -> dict[PeerId, int]:
    """Number of parts of each member's share; ``trips`` are seconds from ``me``, who plans.

    The planner counts as far away as the median of the others is from it, and a member of which
    nothing is known as near.
    """
    others = [trips[link.peer] for link in links if link.peer in trips]
    away = dict(trips) | {me: median(others) if others else 0.0}
    return {link.peer: parts_of(link, away.get(link.peer, 0.0), len(links)) for link in links}


def divided(
    pieces: Iterable[tuple[int, int, PeerId]], counts: Mapping[PeerId, int]
) -> list[tuple[int, int, PeerId]]:
    """Cut each piece (start, stop, owner) into as many parts as its owner is to have, or fewer.

    No part is tiny, and shares smaller than the largest are cut into fewer.
    """
    pieces, found = list(pieces), []
    largest = max((b - a for a, b, owner in pieces if counts.get(owner, 1) > 1), default=1)
    for start, stop, owner in pieces:
        most = counts.get(owner, 1)
        wanted = min(most, ceil(most * (stop - start) / largest))
        count = max(1, min(wanted, (stop - start) // LEAST))
        ends = [start + (stop - start) * n // count // ALIGN * ALIGN for n in range(1, count)]
        found += [(a, b, owner) for a, b in zip([start, *ends], [*ends, stop], strict=True)]
    return found


def in_turn(owners: Sequence[PeerId], me: PeerId) -> list[int]:
    """The order in which ``me`` begins its slices, as numbers of parts with these ``owners``.

    It takes each owner in turn, the one after itself first, so that not all send to the same one
    at a time: that would fill the queue in front of its link.
    """
    counts, passed = Counter(owners), Counter[PeerId]()
    places = []
    for number, owner in enumerate(owners):
        place = (passed[owner] + 0.5) / counts[owner]  # of all that go there
        places.append((place, owner <= me, owner, number))
        passed[owner] += 1
    return [number for *_, number in sorted(places)]
