"""How large a part each member merges: as much as its link can carry in the time of the others.

In a butterfly all-reduce a member with a share ``f`` of the vector sends its slices of the
other shares and its merged share to everybody, and receives the mirror image:

    upload   = c·(1 − f) + f·(M − 1)         download = f·(C − c) + (1 − f)

vectors, with M members, C contributors, and c = 1 for a contributor, 0 otherwise. The shares
below minimise the slowest member's time, which is the linear program of hivemind's
``load_balance_peers``; since every share is bounded by a linear function of that time, a
bisection on the time solves it without a solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocols.identity import PeerId

ALIGN = 1024  # elements; a multiple of every codec's block
MIN_PART = 16 * 1024  # elements; a smaller part costs more in messages than it saves


@dataclass(frozen=True)
class MemberLink:
    """A member of a round and its link."""

    peer: PeerId
    upload: float  # bytes a second
    download: float
    contributes: bool = True
    merges: bool = True  # may own parts

    @property
    def speed(self) -> float:
        """Bytes a second, both ways."""
        return min(self.upload, self.download)


def link_shares(links: Sequence[MemberLink]) -> list[float]:
    """The share of the vector each member merges; non-negative, summing to 1."""
    if len(links) == 1:
        return [1.0]
    contributors = sum(link.contributes for link in links)

    def largest(link: MemberLink, seconds: float) -> float:
        """The largest share this link carries within so many seconds (times bytes/vector)."""
        sends, own = len(links) - 1, float(link.contributes)
        receives = contributors - own
        # even without a share a slow link has its own traffic to carry
        feasible = own <= link.upload * seconds and link.download * seconds >= 1.0 - 1e-12
        bound = float(feasible)
        if sends > own:
            bound = min(bound, (link.upload * seconds - own) / (sends - own))
        if receives > 1.0:
            bound = min(bound, (link.download * seconds - 1.0) / (receives - 1.0))
        return max(0.0, bound)

    low, high = 0.0, 1.0
    while sum(largest(link, high) for link in links) < 1.0:
        high *= 2.0
        if high > 1e18:  # links so slow that arithmetic ends: share evenly
            return [1.0 / len(links)] * len(links)
    for _ in range(80):
        middle = (low + high) / 2
        if sum(largest(link, middle) for link in links) < 1.0:
            low = middle
        else:
            high = middle
    bounds = [largest(link, high) for link in links]
    total = sum(bounds)
    return [bound / total for bound in bounds]


def cut(
    size: int, links: Sequence[MemberLink], weights: Sequence[float] | None = None
) -> list[tuple[int, int, PeerId]]:
    """Cut ``[0, size)`` into parts: (start, stop, owner), contiguous, aligned, none tiny.

    ``weights`` are the members' :func:`link_shares`, unless they follow from more than their links.
    Boundaries lie on multiples of :data:`ALIGN`, except the last. Owners whose share would be
    below :data:`MIN_PART` merge nothing, unless that left nobody.
    """
    weights = link_shares(links) if weights is None else weights
    if size < MIN_PART * 2:
        best = max(range(len(links)), key=lambda i: (weights[i], links[i].peer))
        return [(0, size, links[best].peer)]
    kept = [(w, link.peer) for w, link in zip(weights, links, strict=True) if w * size >= MIN_PART]
    if not kept:
        ordered = sorted(zip(weights, links, strict=True), key=lambda x: (-x[0], x[1].peer))
        kept = [(1.0, link.peer) for _, link in ordered[: max(1, size // MIN_PART)]]
    total = sum(weight for weight, _ in kept)
    parts: list[tuple[int, int, PeerId]] = []
    start, passed = 0, 0.0
    for index, (weight, peer) in enumerate(kept):
        passed += weight
        last = index == len(kept) - 1
        stop = size if last else round(size * passed / total / ALIGN) * ALIGN
        if stop > start:
            parts.append((start, stop, peer))
            start = stop
    return parts
