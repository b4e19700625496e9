"""How fast to send: as fast as the link carries, found out from what arrives. Sans-IO.

Senders that run free fill the queue in front of a slow link until it overflows, and what several
connections lose there costs a tenth to a third of the link. Sent at just the speed of the link
they take no longer than they must. Nobody tells that speed, so it is measured, much as BBR does for
one connection (Cardwell et al. 2016), but for all connections of a node together:

- *search*: without a limit, for the first windows, and on while each new one brings more;
- *cruise*: at the speed found, nearly the highest mean of four windows in a row among the last
  ones. The highest, since a wrong speed is only one of many reasons for less to arrive; and of
  four, since one window is off by a tenth: acknowledgements come late, in lumps, behind what
  travels the other way;
- *probe*: somewhat faster for one window; if more arrived that is the speed now, and the next
  probe follows at once and is bolder, so that a link that is twice as fast is found within
  seconds; if not, a window *drains* what the probe left in the queue.

Only windows in which there was something to send all the time count
(:mod:`protocols.lanes.arrivals`); if they stay slow, the speed falls in the end. What arrived is
known where the system says how much of what it was given is acknowledged; elsewhere what it
accepted counts, which is less exact.

Where the system says that, one also knows how long bytes stand in queues
(:mod:`protocols.lanes.standing_queue`). That tells more than arrivals, which vary by a tenth from
window to window:

- what arrives in windows with too long a queue is what the link carries; their median counts;
- the rate is *trimmed* so that a few packets stand there all the time;
- a probe is gentler, and drains by itself: in the window after it (the *echo*, over long ways two
  or more) what it sent too fast stands in the queue, or the link is faster than was thought. Where
  there is nothing left to send by then, the probe tells nothing, and the next one comes soon. After
  a few of these, arrivals decide, as where the system tells nothing: all bodies may be that short.

Where all bodies are so short that no window is ever full, pacing must not hold them for good to
what the link once carried. So when some of them in a row took as long as pacing made them, the next
is a probe at twice the speed. A body that was limited by pacing or by its sender gives only a lower
bound: it can raise the speed and never lowers it. The bound is void as soon as a whole window has
seen much less (routers let the first kilobytes pass at any speed), or when enough windows have been
seen since to tell the speed by themselves.

A window in a good part of which all bytes went to one of several peers may show the speed of that
peer's link. If it is much slower than usual it is put aside: a node that helps a slow peer to catch
up must not be slow to all others afterwards. It counts as soon as the next peer, or several at
once, are as slow with no quick window in between: then it is the node's own link.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from math import ceil, inf
from statistics import fmean, median

from protocols.lanes.arrivals import KEPT, SEARCHED, SPAN, Burst, Windows, lasting, most
from protocols.lanes.standing_queue import StandingQueue

CRUISED = 6  # windows from probe to probe,
SOON = 2  # or as soon as that, where the queue says that the link is not busy
PROBE, GENTLE, BOLDEST = 1.12, 1.05, 2.0  # times the speed
BOLDEST_AT = 4  # probes in a row that have found more
PATIENCE, MOST_PATIENCE = 3, 16  # probes in a row without an echo; then arrivals decide
LATE = 1 / 4  # of a window: over longer round trips a probe's bytes arrive after its window
ROOM = 1 / 3  # of what a probe sent too fast: with less of it in the queue the link is faster
GROWS = 1.25  # times the best window before: if the newest has this, speed still grows
MUCH = 1.1  # times the speed: a single window is hardly off by more
CAME = 0.98  # of the rate: all that was sent has arrived
FULL_KEPT, FULL_LEAST = 16, 3  # windows with a queue: most that are kept, least that count
DRAIN = 0.88  # times the speed after a probe, to empty the queue
ALONE = 1 / 4  # of a window: with one peer served alone for this long it may tell of its link
HELD = 0.6  # of the rate: a short body this fast was held up by pacing
RAISED = 1.25  # times the speed: a short body this fast has shown a faster link
LEAST = 2e3  # bytes a second; in slower windows peers do not read, or the link is down
MOST = 125e6  # bytes a second; beyond 1 Gbit/s the link is not the bottleneck


class Phase(Enum):
    """What the present rate is for; see above."""

    SEARCH, CRUISE, PROBE, DRAIN, ECHO = range(5)


@dataclass
class Pacer:
    """The rate at which a node may send, in bytes a second, and what its link carries."""

    rate: float = inf
    speed: float | None = None  # None: not known yet
    windows: int = 0  # how many have been seen
    _phase: Phase = Phase.SEARCH
    _windows: Windows = field(default_factory=Windows)
    _burst: Burst = field(default_factory=Burst)
    _held: int = 0  # short bodies, one after the other, that pacing held up
    _at_least: float = 0.0  # what short bodies have shown, and no window has refuted
    _shown: int = 0  # ``windows`` when they did
    _looks: Counter[str] = field(default_factory=Counter)  # in this window, by lone host
    _slow_to: set[str] = field(default_factory=set)  # since the last quick window, hosts
    _aside: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))  # slow windows
    _seen: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _faster: int = SPAN  # windows since a probe has found more, up to SPAN
    _left: int = SEARCHED  # windows left of this phase
    _bolder: int = 0  # probes in a row that have found more
    _standing: StandingQueue = field(default_factory=StandingQueue)
    _full: deque[float] = field(default_factory=lambda: deque(maxlen=FULL_KEPT))  # with a queue
    _stood: float | None = None  # seconds in queues before a probe; None: it has no echo
    _sure: float = 0.0  # bytes a second that arrived of that probe,
    _tried: float = 0.0  # and that were sent
    _echo: int = 1  # windows of an echo; more than one over long round trips (LATE)
    _untold: int = 0  # windows in a row that did not tell what stands in queues
    _unheard: int = 0  # probes in a row without an echo
    _patience: int = PATIENCE  # this many of these, then arrivals decide

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
        have not arrived; ``alone``: the host, one of several, that all of it is for. ``stands``:
        the bytes under way by :func:`~protocols.lanes.standing_queue.standing`, None where the
        system does not tell. ``round_trip``: seconds, the mean of the sending connections' shortest
        ones.
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
        """A burst shorter than a window has arrived, at ``short`` bytes a second."""
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
        """Count a window, unless it may be slow only because the peer it was ``to`` is."""
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
        self._untold = self._untold + 1 if self._standing.seconds is None else 0
        # a bound that is too high by little would be refuted by no window
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
        elif self._full and 0 < self._untold < CRUISED and self._hears:
            self._enter(Phase.CRUISE, 1)  # the first of a body: the next one tells more
        else:
            self._enter(Phase.PROBE, 1)

    @property
    def _grows(self) -> bool:
        """Whether connections still come up to speed, which takes several round trips."""
        *before, newest = self._seen
        return newest >= GROWS * max(before)

    def _end_search(self) -> None:
        """Go on at the speed of the windows with a queue, without those slow by one slow peer."""
        best = most(self._seen)
        alike = [one for one in self._full if one >= HELD * best]
        if len(alike) < FULL_LEAST:
            self._carries(best)
        else:
            self._full.clear()
            self._full.extend(alike)
        self._enter(Phase.CRUISE, SOON)

    def _learn(self, found: float) -> None:
        """Learn from a window, by what stood in queues during it."""
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
        """The link has been seen to carry ``speed``: forget what was known before."""
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
            if not self._hears or (self._full and self._untold >= CRUISED):
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
