"""Whose work is where in a round's result, for outer steps that depend on how much came together.

A part may lack what another part has of an island, or begin with it and end without. What it lacks
comes with a later round, and counts then. So every element is stepped for the islands whose work is
in it; what is kept once a round goes by the mean of all elements.

All members must come to the same numbers, and rounds that have all of everybody to those of their
contributors, whatever the parts: means are computed exactly and rounded once.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain

from protocols.codecs import Chunk, RangeCodec
from protocols.messages import Outcome, PartResult


@dataclass(frozen=True, slots=True)
class Arrived:
    """Elements [start, stop) of a fragment, in which the work of the same islands is."""

    start: int
    stop: int
    share: float  # of all islands
    weight: float  # of what they brought, on average


def arrived(outcome: Outcome, part: PartResult, islands: int) -> list[Arrived]:
    """A part from its beginning to its end, of a round of so many ``islands``."""
    found: list[Arrived] = []
    ends = {included.elements for included in part.included} | {part.stop - part.start}
    for end in sorted(ends):
        weights = [
            outcome.contributors[included.contributor].weight
            for included in part.included
            if included.elements >= end
        ]
        found.append(
            Arrived(
                found[-1].stop if found else part.start,
                part.start + end,
                min(1.0, len(weights) / max(1, islands)),
                statistics.fmean(weights or [0.0]),
            )
        )
    return found


def by_chunk(codec: RangeCodec, part: Sequence[Arrived]) -> Iterator[tuple[Chunk, Arrived]]:
    """The chunks of a part, which are merged whole, with whose work is in each."""
    pieces = iter(part)
    here = next(pieces)
    for chunk in codec.chunks(part[0].start, part[-1].stop):
        while here.stop < chunk.stop:
            here = next(pieces)
        yield chunk, here


def together(parts: Iterable[Sequence[Arrived]]) -> tuple[float, float]:
    """The mean share of all elements, and the mean weight of what is in them; zeros for nothing."""
    elements, shares, weights = 0, Fraction(), Fraction()
    for piece in chain.from_iterable(parts):
        size = piece.stop - piece.start
        elements += size
        shares += size * Fraction(piece.share)
        weights += size * Fraction(piece.share) * Fraction(piece.weight)
    if not shares:
        return 0.0, 0.0
    return float(shares / elements), float(weights / shares)
