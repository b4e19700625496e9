"""How long an island's letters take, and which codec the next one gets where that is ``auto``.

Each island chooses for itself, by the rules of certified rounds (:mod:`gossip.plans.ladder`): the
finest codec whose letters fit into the share of a round that may be spent waiting and the time that
is hidden behind inner steps. Its own letters are timed from the first byte to the receiver's word
that all of it has arrived. A partner that has announced a link too narrow for that gets a coarser
letter, from which nothing is concluded about the others. The partner chooses the codec of its own
letter; an exchange moves both sides by what really travelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gossip.plans.ladder import (
    Budget,
    Chosen,
    Ladder,
    budget_s,
    choose,
    hidden_share,
    most_s,
)
from protocols.identity import PeerId
from protocols.messages import Announce


@dataclass(frozen=True, slots=True)
class LetterTerms:
    """What a run says of letters, and of the time that they may take."""

    codecs: tuple[str, ...]  # that a letter may have, the finest first
    exposed: float = 0.05  # share of a round that may be waiting, in all fragments together
    overlap_steps: float = 0.0  # inner steps that go on while a fragment is exchanged
    fragments: int = 1


class Choice(NamedTuple):
    """A letter's codec."""

    codec: str
    counts: bool  # whether what it takes tells of this island's own link


@dataclass
class LetterTimes:
    """Of one island and fragment; ``size_as(codec)`` are a letter's bytes."""

    terms: LetterTerms
    size_as: Callable[[str], int]
    ladder: Ladder = field(default_factory=Ladder)
    chosen: Chosen | None = None  # how the newest letter came to its codec, where links decide
    _last: tuple[frozenset[PeerId], float] | None = None  # letter: to whom, seconds a byte
    _other: tuple[frozenset[PeerId], float] | None = None  # the newest that went to others

    def budget(self, round_s: float, me: Announce, exchanges: int) -> Budget:
        """What a letter may take, with ``exchanges`` in turn in a usual round.

        If it is not known how fast inner steps are, nothing counts as hidden behind them.
        """
        if round_s <= 0:
            return Budget(0.0, 0.0)
        exposed = self.terms.exposed / self.terms.fragments
        share = hidden_share(round_s, self.terms.overlap_steps, me.steps_per_second)
        whole = budget_s(round_s, exposed, share)
        return Budget(whole / exchanges, share * round_s / exchanges)

    def choose(self, budget: Budget, me: Announce, to: Sequence[Announce]) -> Choice:
        """The codec of a letter to all of these, which leaves for them at the same time."""
        choice = self._choice(budget, me, to)
        if len(self.terms.codecs) > 1:
            self.chosen = self.ladder.explained(self.terms.codecs, choice.codec, budget.whole_s)
            if not choice.counts:
                self.chosen = replace(self.chosen, why="the receiver's link is narrow")
        return choice

    def _choice(self, budget: Budget, me: Announce, to: Sequence[Announce]) -> Choice:
        codecs, past = self.terms.codecs, self.ladder
        if len(codecs) == 1 or not budget.whole_s > 0:  # no round has been timed yet
            return Choice(past.codec if past.codec in codecs else codecs[0], True)
        copies = max(1, len(to))

        def seconds(name: str) -> float:
            moved = copies * self.size_as(name)
            found = past.seconds(moved)
            return found if found is not None else moved / me.upload if me.upload > 0 else 0.0

        own = choose(codecs, seconds, budget.whole_s, past, hidden=budget.hidden_s)
        narrowest = min((said.download for said in to if said.download > 0), default=math.inf)
        passing = most_s(*budget) * narrowest  # bytes
        wide = self.size_as(own) <= passing
        fitting = (name for name in codecs[codecs.index(own) :] if self.size_as(name) <= passing)
        return Choice(next(fitting, codecs[-1]), wide)

    def note(
        self,
        choice: Choice,
        took: float,
        to: Sequence[PeerId],
        budget: Budget,
        *,
        nobody_else: bool = False,
    ) -> None:
        """A letter has arrived at all of these, at the last after ``took`` seconds.

        One that was slow may have gone to a slow peer, however often: that this island is slow
        shows when one to others is slow as well, or where there are no others.
        """
        if not choice.counts:
            return
        moved = len(to) * self.size_as(choice.codec)
        peers, before = frozenset(to), self._last
        if before is not None and before[0] != peers:
            self._other = before
        self._last = (peers, took / moved)
        if self._other is not None and not nobody_else:
            took = min(took, self._other[1] * moved)
        self.ladder.note(self.terms.codecs, choice.codec, took, moved, *budget)
