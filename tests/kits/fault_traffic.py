"""What members sent each other in a round, element by element: what went out more than once.

Of every contribution each element has to be sent to one owner, and of what is merged to each of the
others. Whatever goes beyond was sent again. So no guess is needed of who contributes, of who merges
what, or of how well bytes can be packed: they are counted as they are before that.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from protocols.codecs import RangeCodec
from protocols.identity import PeerId
from protocols.messages import PartRequest, TransferHeader


@dataclass
class Move:
    """One transfer of a slice, or of a merged part or the rest of one."""

    merged: bool
    to: PeerId
    round: int
    start: int  # of the part
    stop: int
    done: int  # elements of it,
    skip: int  # or its bytes, that were there before
    length: int  # bytes of the transfer
    given: int = 0  # of these, so far
    began: float = field(default_factory=time.monotonic)

    def arrived(self, at: PeerId) -> Move:
        """The same as its receiver sees it, now that all of it is there."""
        return replace(self, to=at, given=self.length, began=time.monotonic())

    @property
    def whole(self) -> bool:
        """Nothing was left to be sent."""
        return self.given >= self.length

    def elements(self, codec: RangeCodec) -> range:
        """Those that went out, as far as they can be decoded."""
        chunks = codec.chunks(self.start, self.stop)
        before = sum(c.size for c in chunks if c.stop <= self.start + self.done) or self.skip
        first, last = (
            self.start + codec.complete(self.start, self.stop, count)
            for count in (before, before + self.given)
        )
        return range(first, last)


def move_of(name: str, to: PeerId, header: bytes, length: int) -> Move | None:
    """The transfer that a push or a pull begins; None for what is neither slice nor part."""
    if name in ("slice", "merged"):
        h: TransferHeader = TransferHeader.decode(header)
        return Move(name == "merged", to, h.round, h.start, h.stop, h.done, 0, length)
    if name == "part":
        r: PartRequest = PartRequest.decode(header)
        return Move(True, to, r.round, r.start, r.stop, 0, r.skip, length)
    return None


@dataclass
class Repeats:
    """Elements that went out once more."""

    needless: int = 0  # what they were for was there already
    broken: int = 0  # the transfer before had broken off


def repeats(
    moves: Iterable[tuple[PeerId, Move]], came: Iterable[Move], codec: RangeCodec
) -> Repeats:
    """What senders sent again; ``came`` are merged parts that others gave before, or they did.

    A slice is to be sent once, to anybody, and not at all once somebody has the merged part; a
    merged part once to each.
    """
    before: dict[tuple[bool, PeerId], list[tuple[range, bool]]] = {}
    here = [(one, one.elements(codec)) for one in came]
    found = Repeats()
    for sender, move in sorted(moves, key=lambda one: one[1].began):
        sent = move.elements(codec)
        seen = before.setdefault((move.merged, move.to if move.merged else sender), [])
        there = [
            elements
            for one, elements in here
            if one.began < move.began and (not move.merged or one.to == move.to)
        ]
        needless = _overlap(sent, [*there, *(one for one, whole in seen if whole)])
        found.needless += needless
        found.broken += _overlap(sent, [*there, *(one for one, _ in seen)]) - needless
        seen.append((sent, move.whole))
    return found


def _overlap(one: range, others: Iterable[range]) -> int:
    """Elements of one range that are in any of the others."""
    total, at = 0, one.start
    for other in sorted(others, key=lambda other: other.start):
        first, last = max(at, other.start), min(one.stop, other.stop)
        if last > first:
            total, at = total + last - first, last
    return total
