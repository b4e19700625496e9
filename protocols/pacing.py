"""How fast to send: as fast as the link carries, found out from what arrives. Sans-IO.

Senders that run free fill the queue in front of a slow link until it overflows, and what several
connections lose there costs a tenth to a third of the link. Sent at just the speed of the link the
same bytes take what they need. Nobody tells that speed, so it is measured, much as BBR does for one
connection (Cardwell et al. 2016), but for all connections of a node together:

- *search*: without a limit, for the first windows, and until no more arrives in the next;
- *cruise*: at the speed found, which is nearly the most that arrived in any four windows in a row
  of the last ones: that less arrives has many causes, a wrong speed is only one of them. A single
  window shows a tenth more or less, as acknowledgements come late, in lumps, behind what travels
  the other way;
- *probe*: somewhat faster for one window; if more arrived that is the speed now, and the next
  probe follows at once and is bolder, so that a link that is twice as fast is found within
  seconds; if not, a window *drains* what the probe left in the queue.

Only windows in which there was something to send all the time count (:mod:`protocols.arrivals`);
of them the slow ones lower the speed in the end. What arrives can be counted where the system says
how much of what it was given is acknowledged; else what it took counts, which is less exact.

Where the system says that, it is known besides how long bytes stand in queues
(:mod:`protocols.standing`), and that tells more than arrivals do, which vary by a tenth from window
to window:

- what arrives in windows with too long a queue is what the link carries; their median counts;
- the rate is *trimmed* so that a few packets stand there all the time;
- a probe is gentler, and drains by itself: in the window after it (the *echo*, over long ways two
  or more) what it sent too fast stands in the queue, or the link is faster than was thought. Where
  there is no more to send by then nothing is known, and the next probe comes soon. After some of
  these one goes by what arrives, as where the system tells nothing: bodies may always be over by
  then.

Where all bodies are so short that no window is ever full they must not be held for good to what
the link once carried. So when some of them in a row took as long as pacing made them, the next is
a probe at twice the speed. A body that was limited by pacing or by its sender says only that the
link carries *at least* so much: it can raise the speed and never lowers it, and what it said is
void as soon as a whole window has seen much less (routers let the first kilobytes pass at any
speed), or as many have been seen as tell the speed by themselves.

A window in a good part of which all was for one of several peers may tell the speed of its link and
not of the node's, so one that is much slower than usual is put aside: who helps a slow peer to
catch up is not to be slow to all others after it. It counts as soon as the next peer, or several at
once, are as slow with no quick window in between: then it is the node's own link.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from math import ceil, inf
from statistics import fmean, median

from protocols.arrivals import KEPT, SEARCHED, SPAN, Burst, Windows, lasting, most
from protocols.standing import Standing

CRUISED = 6  # windows from probe to probe,
SOON = 2  # or as soon as that, where the queue says that the link is not busy
PROBE, GENTLE, BOLDEST = 1.12, 1.05, 2.0  # times the speed
BOLDEST_AT = 4  # probes in a row that have found more
PATIENCE, MOST_PATIENCE = 3, 16  # probes whose queue is gone too soon
LATE = 1 / 4  # of a window: over longer round trips a probe's bytes arrive after its window
ROOM = 1 / 3  # of what a probe sent too fast: with less of it in the queue the link is faster
GROWS = 1.25  # times the most of all windows before, in the newest one
MUCH = 1.1  # times the speed: a single window is hardly off by more
CAME = 0.98  # of the rate: all that was sent has arrived
FULL_KEPT, FULL_LEAST = 16, 3  # windows with a queue that count
DRAIN = 0.88  # after a probe: queues are to stay short
ALONE = 1 / 4  # of a window: what was sent to one peer for so long may tell of its link
HELD = 0.6  # of the rate: what was as fast was held up by pacing
RAISED = 1.25  # times the speed: a short body that was as fast has shown a faster link
LEAST = 2e3  # bytes a second; with less the other ends do not read, or the link is dark
MOST = 125e6  # bytes a second; beyond 1 Gbit/s it is not the link that is short


class Phase(Enum):
    """What the rate is good for; see above."""

    SEARCH, CRUISE, PROBE, DRAIN, ECHO = range(5)


@dataclass
class Pacer:
    """The rate at which a node may send, in bytes a second, and what its link carries."""

    rate: float = inf
    speed: float | None = None  # None: not known yet
    windows: int = 0  # so many have been seen
    _phase: Phase = Phase.SEARCH
    _windows: Windows = field(default_factory=Windows)
    _burst: Burst = field(default_factory=Burst)
    _held: int = 0  # short bodies, one after the other, that pacing held up
    _at_least: float = 0.0  # what short bodies have shown, and no window has refuted
    _shown: int = 0  # windows that had been seen by then
    _looks: Counter[str] = field(default_factory=Counter)  # in this window, by whom all is for
    _slow_to: set[str] = field(default_factory=set)  # since the last quick window
    _aside: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))  # as slow
    _seen: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _faster: int = SPAN  # windows since a probe has found more, up to SPAN
    _left: int = SEARCHED  # windows of this phase
    _bolder: int = 0  # probes in a row that have found more
    _standing: Standing = field(default_factory=Standing)
    _full: deque[float] = field(default_factory=lambda: deque(maxlen=FULL_KEPT))  # with a queue
    _stood: float | None = None  # seconds in queues before a probe, if that will tell
    _sure: float = 0.0  # what came of that probe,
    _tried: float = 0.0  # and what was sent
    _echo: int = 1  # windows; more than one: what a probe sends arrives in them (LATE)
    _unheard: int = 0  # probes in a row whose queue nobody has seen
    _patience: int = PATIENCE  # so many of these, then one goes by what arrives

    @property
    def looks_closely(self) -> bool:
        """Whether it helps to be told often: short bodies are over soon."""
        return self.rate < inf and self._burst.short

    def note(
        self,
        now: float,
        arrived: int,
        wanting: bool,
        under_way: int = 0,
        *,
        alone: str = "",
        stands: float | None = None,
        round_trip: float = 0.0,
    ) -> None:
        """``arrived`` bytes of all that was ever sent have arrived by ``now``.

        ``wanting``: there is more to send; ``under_way`` bytes have been given to the system and
        have not arrived; ``alone``: it is all for this one of several peers. ``stands``: so many
        are under way, by :func:`~protocols.standing.standing`, on connections whose shortest round
        trip is ``round_trip`` seconds; None where the system does not tell.
        """
        if wanting:
            self._looks[alone] += 1
        else:
            self._looks.clear()
        found = self._windows.note(now, arrived, wanting)
        self._standing.look(now, arrived + under_way, stands, round_trip, wanting)
        if self._stood is not None and not wanting:  # the probe's queue is gone, unheard
            self._bolder = 0
            self._unheard += 1
            self._enter(Phase.CRUISE, SOON if self._hears else 1)
        if found is not None:
            self._burst.lasts()
            self._held = 0
            enough = ALONE * self._looks.total()
            to = {one for one, looks in self._looks.items() if one and looks >= enough}
            self._looks.clear()
            if found >= LEAST:
                windows = round_trip / self._windows.window_s
                self._echo = 1 + ceil(windows) if windows >= LATE else 1
                self._weigh(found, to)
        short = self._burst.note(now, arrived, wanting, under_way > 0)
        if short is not None and self.speed is not None:
            self._consider(short, self.speed)

    def _consider(self, short: float, speed: float) -> None:
        """Some bytes have arrived in less than a window, so fast."""
        if self._held >= CRUISED:  # it was a probe
            if short >= RAISED * speed:
                self._at_least, self._shown = short, self.windows
                self._enter(Phase.PROBE, 1)
            else:
                self._held = self._bolder = 0
                self._enter(Phase.CRUISE, CRUISED)
        elif short >= HELD * self.rate:
            self._held += 1
            if self._held >= CRUISED:
                self._bolder = BOLDEST_AT
                self._enter(Phase.PROBE, 1)

    def _weigh(self, found: float, to: set[str]) -> None:
        """Count a window, unless it may be slow only since the one that it was ``to`` is."""
        usual = self.speed or max(self._seen, default=0.0)
        if found >= HELD * usual:
            self._slow_to.clear()
            self._aside.clear()
        elif to and len(self._slow_to | to) == 1:
            self._slow_to = to
            self._aside.append(found)
            self._standing.leave_out()
            return
        else:
            self._slow_to |= to
        came = found >= CAME * self.rate
        speed = min(self.speed or found, found)
        self._standing.over(self._windows.window_s, speed, came)
        for one in (*self._aside, found):
            self.windows += 1
            self._judge(one)
        self._aside.clear()

    def _judge(self, found: float) -> None:
        self._seen.append(found)
        self._learn(found)
        self._faster = min(self._faster + 1, SPAN)
        # too fast by little it would be refuted by no window
        if found < self._at_least / RAISED or self.windows >= self._shown + KEPT:
            self._at_least = 0.0
        if self._phase is Phase.ECHO and self._echo > 1:
            self._sure = max(self._sure, min(found, self._tried))
        self._left -= 1
        if self._left > 0:
            self._enter(self._phase, self._left)
        elif self._phase is Phase.PROBE:
            self._probed(found)
        elif self._phase is Phase.ECHO:
            self._heard()
        elif self._phase is Phase.SEARCH and self._grows:
            self._enter(Phase.SEARCH, 1)
        elif self._phase is Phase.SEARCH and (self._full or self._standing.full):
            self._end_search()
        elif self._phase is Phase.DRAIN:
            self._enter(Phase.CRUISE, CRUISED)
        elif self._standing.long:
            self._enter(Phase.CRUISE, SOON)
        elif self._full and self._standing.seconds is None and self._hears:
            self._enter(Phase.CRUISE, 1)  # the first of a body: the next one tells more
        else:
            self._enter(Phase.PROBE, 1)

    @property
    def _grows(self) -> bool:
        """Connections come up to speed, which takes them several round trips."""
        *before, newest = self._seen
        return newest >= GROWS * max(before)

    def _end_search(self) -> None:
        """Go on at what the windows with a queue say, but for those that one slow peer explains."""
        best = most(self._seen)
        alike = [one for one in self._full if one >= HELD * best]
        if len(alike) < FULL_LEAST:
            self._carries(best)
        else:
            self._full.clear()
            self._full.extend(alike)
        self._enter(Phase.CRUISE, SOON)

    def _learn(self, found: float) -> None:
        """What a window says by what stood in queues meanwhile."""
        speed, sure = self.speed or 0.0, min(found, self.rate)
        if self._standing.long:
            if self._standing.tells or found >= MUCH * self.rate:  # more than was sent meanwhile
                self._full.append(found)
        elif self._standing.full:
            if found >= CAME * self.rate:  # pacing was the limit
                self._full.append(max(found, speed))
        elif self._standing.seconds is not None and self._phase is Phase.CRUISE:
            if sure > speed > 0:
                self._carries(sure)
            self._left = min(self._left, SOON)

    def _carries(self, speed: float) -> None:
        """The link has been seen to carry so much, whatever was known before."""
        self._full.clear()
        self._full.extend([speed] * FULL_LEAST)

    def _probed(self, found: float) -> None:
        """The window of a probe is over."""
        assert self.speed is not None
        if self._stood is not None:
            self._sure, self._tried = min(found, self.rate), self.rate
            self._enter(Phase.ECHO, self._echo)
        elif found >= self.speed * (1 + self._times) / 2:
            self._faster = 1  # it was slower before, or this window was a lucky one
            self._bolder += 1
            if not self._hears:
                self._carries(min(found, self.rate))
            self._enter(Phase.PROBE, 1)
        else:
            if not self._hears:
                self._unheard, self._patience = 0, min(2 * self._patience, MOST_PATIENCE)
            self._bolder = 0
            self._enter(Phase.DRAIN, 1)

    def _heard(self) -> None:
        """A probe's echo is over: all that it sent too fast stands in a queue now."""
        assert self.speed is not None
        assert self._stood is not None
        self._unheard, self._patience = 0, PATIENCE
        grown = (self._standing.seconds or 0.0) - self._stood
        half = self.speed * (1 + self._times) / 2
        room = grown < (self._times - 1) * self._windows.window_s * ROOM
        faster = room and self._sure >= half
        if faster or self._sure >= MUCH * self.speed:
            self._carries(self._sure)
        if faster:
            self._bolder += 1
            self._enter(Phase.PROBE, 1)
        else:
            self._bolder = 0
            self._enter(Phase.CRUISE, CRUISED)

    @property
    def _hears(self) -> bool:
        """Whether the next probe's queue will be seen, as far as that is known."""
        return self._unheard < self._patience

    @property
    def _times(self) -> float:
        """The rate of a probe, in times the speed."""
        step = (PROBE if self._stood is None else GENTLE) - 1
        return min(1 + step * 2.0**self._bolder, BOLDEST)

    def _enter(self, phase: Phase, windows: int) -> None:
        self._phase, self._left = phase, windows
        if phase is Phase.SEARCH:
            return
        if phase is not Phase.ECHO:
            told = self._standing.seconds if self._hears else None
            self._stood = told if phase is Phase.PROBE else None
        seen = list(self._seen)
        newest = fmean(seen[-self._faster :]) if self._faster < SPAN else 0.0
        self.speed = max(lasting(seen) if seen else 0.0, newest, self._at_least)
        if len(self._full) >= FULL_LEAST:
            self.speed = max(median(self._full), self._at_least)
        times = {Phase.PROBE: self._times, Phase.DRAIN: DRAIN}.get(phase, self._standing.trim)
        self.rate = times * self.speed if self.speed < MOST else inf
