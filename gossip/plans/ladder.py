"""Which codec a round uses, where the manifest leaves that to the links (``auto``). Sans-IO.

Codecs stand on a ladder, the finest first. A round takes the finest one whose bytes pass in the
time that the run is willing to wait for them: its *budget*, a share of a round (5 % by default) and
the time that is hidden behind inner steps. Measured speeds vary from round to round, so the choice
stays as it was while it costs up to a fifth more than may be waited, and goes up only if the finer
codec would leave three tenths of the budget free; one rung at a time, since speeds measured with
few bytes are the least certain.

How long a codec takes follows from the links as they are announced, or from how long the last
exchange really took for its bytes, whichever is less: the links carried at least that. Part of
that time has nothing to do with bytes (round trips, and machines that are busy), and would count
against every finer codec if it were taken to grow with them. So where exchanges of two codecs are
known a line goes through both: the time that every exchange takes, and that of a byte. Where a
coarse codec leaves little to send neither says for certain that the next finer one fits (a router
lets the first kilobytes pass at any speed). So every step up is a *trial* (:class:`Ladder`): if the
exchange gets long by it the next round goes back, and the finer codec has to wait for eight
rounds, twice as many each time that it happens again. That bounds what trials cost.

After :data:`RECENT` rounds with one codec no other exchange says any more what of its time is that
of bytes, and none will. Then the finer one is tried although it might not fit: a swarm whose links
have become wide again would else keep to a coarse codec for good, for the sake of time that
machines take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from protocols.errors import LocalProtocolError

OVERRUN: Final = 1.2  # of what may be waited, before the ladder is stepped down
ROOM: Final = 0.7  # of the budget, at most, to step up
TRIAL: Final = 3.0  # times the budget, at most, to be tried where that may be wrong
LONGER: Final = 1.25  # times the exchange before: then, if also over budget, it was no accident
FIRST_WAIT: Final = 8  # rounds without a codec that took too long,
RECENT: Final = 16  # rounds for which an exchange with another codec says something
LONGEST_WAIT: Final = 128  # and at most this many, after it has happened again and again

Seconds = Callable[[str], float]  # that an exchange takes with a codec


class Budget(NamedTuple):
    """Seconds that an exchange may take in all, and how many of these inner steps hide."""

    whole_s: float
    hidden_s: float


def budget_s(round_s: float, exposed: float, overlapped: float) -> float:
    """Seconds that the exchange of a round may take.

    ``round_s`` is the usual time from round to round, ``exposed`` the share of it that may be
    spent waiting, ``overlapped`` the share during which inner steps go on anyway.
    """
    return round_s * (exposed + overlapped)


def hidden_share(round_s: float, steps: float, steps_per_second: float) -> float:
    """Share of a round in which so many inner steps go on; 0 if it is not known how fast they are.

    The steps are fixed, so the longer an exchange makes rounds the less of them is overlapped.
    """
    return (
        min(1.0, steps / steps_per_second / round_s) if min(steps_per_second, round_s) > 0 else 0.0
    )


@dataclass(frozen=True, slots=True)
class Chosen:
    """The codec of a round or letter, and what it follows from: to be logged as it is."""

    codec: str
    inputs: Mapping[str, float]  # seconds
    why: str


@dataclass
class Ladder:
    """What one member has seen of the rounds so far: their codecs, and how long exchanges took."""

    codec: str | None = None  # of the newest round, if known
    back_to: str | None = None  # the last step up made the exchange too long
    _took: float | None = None  # seconds of it
    _newest: tuple[float, float] | None = None  # its bytes of the busiest member, and seconds
    _other: tuple[float, float, int] | None = None  # of the last other codec; after which round
    _rounds: int = 0
    _changed: int = 0  # number of rounds that were over when the codec last changed
    _rose_at: int | None = None  # that codec was stepped up to in this round
    _waits: dict[str, tuple[int, int]] = field(default_factory=dict)  # until when; how long

    def note(
        self,
        codecs: Sequence[str],
        codec: str,
        took: float | None,
        moved: float,
        budget: float,
        hidden: float = 0.0,
    ) -> None:
        """A round with ``codec``, one of ``codecs``, is over.

        Its exchange took so many seconds (None: that is not known, or something went wrong in
        it), in which the busiest member moved ``moved`` bytes one way. Of its ``budget`` so many
        seconds were ``hidden``.
        """
        before, took_before = self.codec, self._took
        if before != codec:
            self._changed = self._rounds
            if self._newest is not None:
                self._other = (*self._newest, self._rounds)
        self.codec, self._took, self.back_to = codec, took, None
        self._newest = (moved, took) if took is not None and moved > 0 else None
        self._rounds += 1
        if before is None or before not in codecs or codec not in codecs or not budget > 0:
            self._rose_at = None
        elif codecs.index(codec) < codecs.index(before):
            self._rose_at = self._rounds
            most = max(most_s(budget, hidden), LONGER * (took_before or 0.0))
            if took is not None and took > most:
                self.back_to = before
                self._fails(codec)
        elif codec != before:
            if self._rose_at is not None:  # not for long, it seems
                self._fails(before)
        elif self._rose_at is not None and self._rounds >= self._rose_at + FIRST_WAIT:
            self._rose_at = None
            self._waits.pop(codec, None)

    def seconds(self, moved: float) -> float | None:
        """What an exchange takes if the busiest member moves ``moved`` bytes; None: not known.

        In proportion to the last one alone, if none with another codec was recent, or if the two
        contradict each other: then links have changed between them.
        """
        if self._newest is None:
            return None
        size, took = self._newest
        each = took / size
        if self._other is not None and self._rounds - self._other[2] <= RECENT:
            size_before, took_before, _ = self._other
            if size_before != size and 0 < (took_before - took) / (size_before - size) < each:
                each = (took_before - took) / (size_before - size)
        return took + each * (moved - size)

    def explained(
        self, codecs: Sequence[str], codec: str, budget: float, expected: float | None = None
    ) -> Chosen:
        """Why ``codec``, one of ``codecs``, is that of the round after those seen so far.

        ``budget`` is in seconds, and so is ``expected``, what the exchange should take with it on
        the measured links, where that is known.
        """
        inputs = {"budget_s": budget}
        if expected is not None:
            inputs["expected_s"] = expected
        if self._took is not None:
            inputs["last_s"] = self._took  # of the exchange before, with the codec before
        before = self.codec if self.codec in codecs else None
        at = codecs.index(codec) - (codecs.index(before) if before is not None else 0)
        if not budget > 0:
            why = "no round has been timed yet"
        elif before is None:
            why = "what the links carry as they were measured"
        elif codec == self.back_to:
            why = "the finer one made the exchange too long"
        elif at < 0 and self.settled:
            why = "there may be room for a finer one"
        elif at < 0:
            why = "there is room for a finer one"
        elif at > 0:
            why = "the one before takes longer than may be waited"
        else:
            why = "its bytes pass in time, and those of a finer one would not"
        return Chosen(codec, inputs, why)

    def _fails(self, codec: str) -> None:
        self._rose_at = None
        _, wait = self._waits.get(codec, (0, 0))
        wait = min(max(2 * wait, FIRST_WAIT), LONGEST_WAIT)
        self._waits[codec] = (self._rounds + wait, wait)

    @property
    def settled(self) -> bool:
        """Whether no exchange with another codec was lately."""
        return self._rounds - self._changed > RECENT

    def waits(self, codec: str) -> bool:
        """Whether it is too early to try this codec again."""
        until, _ = self._waits.get(codec, (0, 0))
        return self._rounds < until


def most_s(budget: float, hidden: float) -> float:
    """Seconds that a codec in use may take: of what is hidden there is no more than there is."""
    return hidden + OVERRUN * (budget - hidden)


def choose(
    codecs: Sequence[str],
    by_links: Seconds,
    budget: float,
    past: Ladder,
    by_pace: Seconds | None = None,
    hidden: float = 0.0,
) -> str:
    """The codec of a round, out of ``codecs``, the finest first.

    ``by_links`` tells how long the exchange takes with a codec on the links as they were measured,
    and ``by_pace`` how long at the pace of the last exchange, if that is known; both must fall
    along the ladder. ``past`` is what is known of the rounds before. Of the ``budget`` so many
    seconds are ``hidden`` behind inner steps. Where even the coarsest takes too long it is chosen
    nevertheless. Raises :class:`LocalProtocolError` for an empty ladder.
    """
    if not codecs:
        raise LocalProtocolError("a ladder without rungs")
    if math.isnan(budget):
        raise LocalProtocolError("no budget")

    def seconds(name: str) -> float:
        return min(by_links(name), by_pace(name)) if by_pace is not None else by_links(name)

    fitting = (name for name in codecs if by_links(name) <= budget)
    if past.codec is None or past.codec not in codecs:
        return next(fitting, codecs[-1])
    if past.back_to is not None:
        return past.back_to
    at = codecs.index(past.codec)
    if seconds(past.codec) > most_s(budget, hidden):
        coarser = (name for name in codecs[at:] if seconds(name) <= budget)
        return next(coarser, codecs[-1])
    if at and not past.waits(finer := codecs[at - 1]):
        unsure = past.settled and seconds(past.codec) <= ROOM * budget
        if seconds(finer) <= (TRIAL if unsure else ROOM) * budget:
            return finer
    return past.codec
