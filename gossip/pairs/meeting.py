"""The values that pass between deciding and acting where islands meet in pairs.

:mod:`gossip.pairs.wandering` decides, :mod:`gossip.pairs.roamer` acts; here is what is known of
letters, the instructions, and what was done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from protocols.identity import PeerId

Key = tuple[int, int]  # round and exchange of a letter of this island's
ANSWERS = 2  # of one peer that are kept


@dataclass(frozen=True, slots=True)
class Habits:
    """How an island gossips."""

    seed: bytes  # the run's
    max_staleness: int = 4  # own rounds that an answer may be late
    one_way: bool = False


@dataclass(frozen=True, slots=True)
class Stamp:
    """What is known of a letter that is here."""

    sender: PeerId
    round: int  # by the sender's count
    exchange: int
    answers: Key | None  # which of our letters; None: it opens an exchange
    number: int  # of all letters that came


def replaced(held: Iterable[Stamp], newer: Stamp, counts: Callable[[Stamp], bool]) -> list[Stamp]:
    """Of letters that are here, the oldest first, those that ``newer`` replaces.

    An opening replaces an opening of its sender, and an answer one to the same letter, but nothing
    else: an answer's sender has moved by it already. Of a peer's answers two can count, to a letter
    that is open and to one that was taken for lost. Of three the newest that does not count goes,
    which may be ``newer`` itself; if all seem to count, the oldest.
    """
    alike = [
        one
        for one in held
        if one.sender == newer.sender and (one.answers is None) == (newer.answers is None)
    ]
    same = [one for one in alike if one.answers == newer.answers]
    if same or newer.answers is None:
        return same
    alike.append(newer)
    in_vain = [one for one in reversed(alike) if not counts(one)]
    return [*in_vain, *(one for one in alike if one not in in_vain)][: len(alike) - ANSWERS]


@dataclass(frozen=True, slots=True)
class Post:
    """Send the parameters as they are now; ``awaited``: tell of the end."""

    to: PeerId
    round: int
    exchange: int
    answers: Key | None  # which of the other's letters; None: it opens an exchange
    awaited: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """A letter to move towards, from ``mine``, this island's letter of that exchange."""

    stamp: Stamp
    mine: Key


@dataclass(frozen=True, slots=True)
class Take:
    """Mix these letters in; then tell."""

    letters: tuple[Taken, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Throw these letters away: they are too old."""

    letters: tuple[Stamp, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """All exchanges are through: take the outer step, as round ``round``."""

    round: int


Instruction = Post | Take | Drop | Finish


# mixed with the partner's answer, answered openings of others, open (the answer has yet to come),
# lost (the partner is gone), alone, or sent one way
MeetingOutcome = Literal["mixed", "answered", "open", "lost", "alone", "sent"]


@dataclass(frozen=True, slots=True)
class Met:
    """One exchange as it ended."""

    round: int
    exchange: int
    partner: PeerId | None
    outcome: MeetingOutcome
    seconds: float
    # of these, while a letter of the two was on its way, or for the longest time that it may be;
    # None: it went to somebody who is gone
    moving_s: float | None = 0.0
    others: tuple[PeerId, ...] = ()  # whose letters were mixed in, beside the partner's

    @property
    def mixed(self) -> tuple[PeerId, ...]:
        """All whose letters were mixed in."""
        own = (self.partner,) if self.partner and self.outcome == "mixed" else ()
        return own + self.others
