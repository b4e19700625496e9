"""How a round of an island that meets in pairs ended, and with whom it has mixed its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gossip.exchange.transfers import Transfers
from gossip.membership.spread import Spread, in_pairs
from gossip.pairs.meeting import Met
from protocols.identity import PeerId
from protocols.messages import Announce


@dataclass(frozen=True)
class PairExchange:
    """One exchange as it ended, for the report."""

    met: Met
    sent: int  # bytes
    received: int
    difference: float | None  # RMS of the parameters' difference to the partner's
    codec: str = ""  # of this island's letter; empty: it has sent none
    elements: int = 0  # that were sent: what ``sent`` bytes decode to


@dataclass(frozen=True)
class Rounded:
    """A round of this island's that is through."""

    fragment: int
    round: int
    began: float
    ended: float
    exchanged: tuple[PairExchange, ...]
    spread: Spread
    after: float | None  # mean relative distance to the mean after this island's exchanges
    exchanges: int  # in the next round, and what that follows from
    progress: float  # mean square of what the inner steps moved
    lost: float  # mean square of what the codec loses


@dataclass
class RoundLog:
    """What is to be told of a round, gathered while it is under way; ``transfers`` are letters'."""

    transfers: Transfers
    began: float = 0.0
    codecs: dict[int, str] = field(default_factory=dict)  # of own letters, by exchange
    timed: list[float] = field(default_factory=list)  # seconds of exchanges, until they are told of
    _exchanged: list[PairExchange] = field(default_factory=list)
    _counted: tuple[int, int, int] = (0, 0, 0)

    def begin(self, now: float) -> None:
        """A round begins."""
        self.began, self.codecs, self._exchanged = now, {}, []

    def ended(self, met: Met, difference: float | None) -> None:
        """An exchange is over."""
        codec = self.codecs.get(met.exchange, "")
        sent, received, elements = self._count()
        self._exchanged.append(PairExchange(met, sent, received, difference, codec, elements))
        if met.moving_s:
            self.timed.append(met.moving_s)

    def through(self, all_: Iterable[Met]) -> tuple[PairExchange, ...]:
        """The round's exchanges in order, also those that nothing was mixed in."""
        told = {one.met.exchange for one in self._exchanged}
        for met in all_:
            if met.exchange not in told:
                self.ended(met, None)
        return tuple(sorted(self._exchanged, key=lambda one: one.met.exchange))

    def _count(self) -> tuple[int, int, int]:
        """Bytes of letters sent and received since the last time, and elements sent."""
        moved, before = self.transfers, self._counted
        now = moved.bytes_sent, moved.bytes_received, moved.elements_sent
        self._counted = now
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]


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
