"""Into how many parts a member's share is cut: over long ways several. Pure.

A slice of a part and the merged part are one connection's each, so a part for each of the
connections that :mod:`protocols.streams` asks for. Connections have equal shares of a link, so all
parts of far members are about as large: else those of small shares would be over first, and then
everybody would send to the same few owners at once, faster than their links carry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from statistics import median

from gossip.partition import ALIGN, MIN_PART, Link
from protocols.identity import PeerId
from protocols.streams import streams

ALL = 24  # connections of one member in each direction, with all the others
LEAST = 2 * MIN_PART  # elements


def parts_of(link: Link, round_trip_s: float, members: int) -> int:
    """Of the share of the member ``link``, ``round_trip_s`` away, in a round of so many."""
    others = members - 1
    if not others:
        return 1
    each = min(link.upload, link.download) / others
    return max(1, min(streams(round_trip_s, each), ALL // others))


def by_owner(me: PeerId, links: Sequence[Link], trips: Mapping[PeerId, float]) -> dict[PeerId, int]:
    """For each member's share; ``trips`` are seconds from ``me``, who plans, to the others.

    Whoever plans is as far from the others as half of them are from it, and a member of which
    nothing is known is near.
    """
    others = [trips[link.peer] for link in links if link.peer in trips]
    away = dict(trips) | {me: median(others) if others else 0.0}
    return {link.peer: parts_of(link, away.get(link.peer, 0.0), len(links)) for link in links}


def divided(
    pieces: Iterable[tuple[int, int, PeerId]], counts: Mapping[PeerId, int]
) -> list[tuple[int, int, PeerId]]:
    """Each piece (start, stop, owner) in as many as its owner is to have, or in fewer.

    None of them is tiny, and of a share that is smaller than others there are fewer.
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
    """In which order ``me`` begins its slices of parts that have these owners.

    With each owner in turn, and with the one behind itself first, so that not all send to the same
    one at a time: what comes from all at once would fill the queue before its link.
    """
    counts, passed = Counter(owners), Counter[PeerId]()
    places = []
    for number, owner in enumerate(owners):
        place = (passed[owner] + 0.5) / counts[owner]  # of all that go there
        places.append((place, owner <= me, owner, number))
        passed[owner] += 1
    return [number for *_, number in sorted(places)]
