"""The rules of a run that rounds follow: codecs, quorum, patience, staleness, how work is merged.

They come from the manifest, and are the same on all members.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gossip.place import Place
from gossip.plans.grouping import UNGROUPED, Grouping
from gossip.plans.mix import MEAN, Mix
from gossip.plans.validity import MAX_TOKENS, Shape
from protocols.bounds import NO_BOUND
from protocols.identity import PeerId

# How far from the median, below and above it, announced speeds are believed. Among strangers nobody
# gets more to merge by claiming a fast link, nor the others to wait long by claiming a slow one.
FRIENDS, STRANGERS = (1e4, 1e4), (32.0, 1.0)
PATIENCE_S = 1.0  # for a transfer that stands still, before round trips are measured

Clients = Callable[[Place, Sequence[PeerId]], Collection[PeerId]]
"""Which of the live islands in office train in the round at a place; the others rest."""


@dataclass(frozen=True)
class Rules:
    """The run's rules as far as rounds are concerned."""

    size: int  # elements of the vector
    codecs: tuple[str, ...]  # that a round may have, the finest first
    encoded_bytes: Callable[[str, int, int], int]  # with a codec, of a range [start, stop)
    quorum: float = 0.5
    grace_fraction: float = 0.1
    min_grace_s: float = 0.25
    least_patience_s: float = 0.0  # for a transfer that stands still, whatever was measured
    mix: Mix = MEAN  # how contributions become one
    sharing: int = 1  # rounds (of different fragments) that may share the links at a time
    exposed: float = 0.05  # share of a round that may be spent waiting for bytes
    # inner steps that go on during an exchange, by the most that anybody's links ask for
    overlap_steps: Callable[[int], float] = lambda wanted: 0.0
    grouping: Grouping = UNGROUPED
    staleness: int = NO_BOUND  # rounds that a live member may miss before the others wait for it
    clients: Clients | None = None  # who trains in a round; None: all
    servers: bool = False  # those merge, while one is there
    switch: int | None = None  # rounds before this one have all codecs but the last, later ones it
    believed: tuple[float, float] = FRIENDS  # of announced speeds
    state_bytes: int = 0  # of the outer state, 0: it cannot be downloaded
    strangers: bool = False  # they come into office a few at a time (:mod:`gossip.rounds.trial`)
    most_tokens: int = MAX_TOKENS  # of one contribution; what is beyond does not count
    calls: bool = False  # the roll is called for newcomers, instead of having them wait for a round

    def at(self, round_: int) -> Rules:
        """The same with the codecs that a round may have."""
        if self.switch is None:
            return self
        codecs = self.codecs[-1:] if round_ >= self.switch else self.codecs[:-1]
        return dataclasses.replace(self, codecs=codecs)

    @property
    def shape(self) -> Shape:
        """What is merged."""
        return Shape(self.size, self.codecs, self.mix, self.grouping.on, self.most_tokens)

    @property
    def most_bytes(self) -> int:
        """Bytes of the whole vector in the codec that takes the most."""
        return max(self.encoded_bytes(name, 0, self.size) for name in self.codecs)

    def grace_s(self, round_s: float) -> float:
        """How long the ready wait for the late, given the usual length of a round."""
        return max(self.min_grace_s, self.grace_fraction * round_s)
