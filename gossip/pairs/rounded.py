"""How a round of an island that meets in pairs ended, and with whom it has mixed its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gossip.membership.spread import Spread, in_pairs
from gossip.pairs.meeting import Met
from protocols.identity import PeerId
from protocols.messages import Announce


@dataclass(frozen=True)
class Exchanged:
    """One exchange as it ended, for the report."""

    met: Met
    sent: int  # bytes
    received: int
    difference: float | None  # RMS of the parameters' difference to the partner's
    codec: str = ""  # of this island's letter; empty: it has sent none


@dataclass(frozen=True)
class Rounded:
    """A round of this island's that is through."""

    fragment: int
    round: int
    began: float
    ended: float
    exchanged: tuple[Exchanged, ...]
    spread: Spread
    after: float | None  # mean relative distance to the mean after this island's exchanges
    exchanges: int  # in the next round, and what that follows from
    progress: float  # mean square of what the inner steps moved
    lost: float  # mean square of what the codec loses


class Acquaintance:
    """With whom this island has mixed each fragment last, of so many elements."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.elements = sum(sizes)
        self.shares = [size / self.elements for size in sizes]
        self.mixed: list[tuple[PeerId, ...]] = [()] * len(sizes)

    def left(
        self, said: Iterable[Announce], me: PeerId, fragment: int, mixed: Sequence[PeerId]
    ) -> tuple[Spread, float | None]:
        """How far islands were apart, and are now (:func:`gossip.membership.spread.in_pairs`)."""
        self.mixed[fragment] = tuple(mixed)
        return in_pairs(said, me, self.mixed, self.shares)
