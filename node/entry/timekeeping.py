"""Whether this node's own clock is still right, and putting it right where it is not.

:data:`node.clock.wall` counts the seconds since boot, whoever sets the machine's clock. They stand
still where a machine is paused from outside (a virtual machine that is saved, WSL while the laptop
sleeps). All that this node says of itself has expired by then once it is said, so nobody hears that
it is ready. Neither the machine's clock alone is believed, nor what others say alone: the node's is
put to the machine's where that agrees with most of those who are asked.

>>> keeper = Timekeeper(clock.wall, clocks, events)
>>> keeper.greet = lambda peer: entrance.measure(peer, run)
>>> keeper.presence = swarm.presence
>>> spawn(keeper.run())
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import nan
from statistics import median

from bootstrap.dht import CLOCK_LIMIT
from bootstrap.handshake import GREET_TIMEOUT, Clocks, Greeting
from bootstrap.seeds import backoff
from gossip.membership.members import Liveness
from gossip.membership.presence import Presence
from node.clock import SteadyClock
from node.headway import counted
from node.monitor.event_log import EventLog
from node.monitor.events import ClockPut, Problem
from node.monitor.wording import duration
from protocols.errors import OperatorError, RemoteProtocolError, TransportError
from protocols.identity import PeerId

LOOK_S = 5.0  # between two looks, at which mostly nobody is asked
ASKED = 3  # peers
AGAIN_S, LAST_AGAIN_S = 10.0, 600.0  # until others are asked again: the pauses


async def _nobody(peer: PeerId) -> Greeting:
    raise TransportError("no peer can be asked yet")


@dataclass
class Timekeeper:
    """Looks after one node's clock; ``clocks`` is measured by it."""

    steady: SteadyClock
    clocks: Clocks
    events: EventLog
    greet: Callable[[PeerId], Awaitable[Greeting]] = _nobody
    presence: Presence | None = None  # once this node takes part
    now: Callable[[], float] = time.monotonic
    _rng: random.Random = field(default_factory=random.Random)
    _judged: float = nan  # how far the machine's clock was ahead when others were last asked
    _again_at: float = 0.0
    _told: bool = False  # that this node's clock is wrong, and that the machine's is no help

    def __post_init__(self) -> None:
        self._settle()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Ask others where the node's clock may be wrong, and put it right if it is."""
        ahead = self.steady.behind()
        behind = self.presence.clock_behind_s() if self.presence is not None else 0.0
        if abs(ahead) <= CLOCK_LIMIT and behind <= CLOCK_LIMIT:
            self._settle()
            return
        if abs(ahead - self._judged) <= CLOCK_LIMIT:
            if self.now() < self._again_at:
                return  # as it was when others were asked
        else:
            self._settle()
        known = self._known()
        greetings = await self._ask(known)
        if abs(self.steady.behind() - ahead) > CLOCK_LIMIT:
            return  # set or paused meanwhile, so nothing is measured
        self._judged, self._again_at = ahead, self.now() + next(self._pauses)
        if greetings:
            self._judge(ahead, greetings)
        elif not known and abs(ahead) > CLOCK_LIMIT:
            self._put(ahead, [])  # nobody else is there: the machine's is all there is

    def _settle(self) -> None:
        self._pauses = backoff(self._rng, first=AGAIN_S, last=LAST_AGAIN_S)
        self._judged, self._told = nan, False

    def _known(self) -> list[PeerId]:
        """Who may be asked: those who live, else those who did a while ago."""
        if self.presence is None:
            return self.clocks.peers
        membership, now = self.presence.membership, self.presence.wiring.now()
        left = (p for p in membership.islands if membership.liveness(p, now) is not Liveness.LEFT)
        return membership.alive(now) or list(left)

    async def _ask(self, known: list[PeerId]) -> list[Greeting]:
        """Greet some of these; what took too long says nothing of a clock."""
        asked = self._rng.sample(known, min(ASKED, len(known)))
        answers = await asyncio.gather(*map(self._answer, asked))
        return [one for one in answers if one is not None and one.round_trip <= GREET_TIMEOUT]

    async def _answer(self, peer: PeerId) -> Greeting | None:
        try:
            return await self.greet(peer)
        except (OperatorError, TransportError, RemoteProtocolError):
            return None  # gone, or it has another run by now

    def _judge(self, ahead: float, greetings: list[Greeting]) -> None:
        measured = Clocks()
        for one in greetings:
            measured.add(one.peer, one.offset, one.round_trip)
        try:
            measured.check()
            self._told = False  # somebody has set the machine's clock, which is no matter here
        except OperatorError as error:
            theirs = median(one.offset for one in greetings)
            doubt = median(one.round_trip for one in greetings) / 2
            if abs(ahead - theirs) - doubt <= CLOCK_LIMIT:
                self._put(ahead, greetings)
            elif not self._told:
                self._told = True
                fix = f"{error.fix}; the node goes by it then, as it runs"
                self.events.emit(Problem.of(error, fix=fix))

    def _put(self, by: float, greetings: list[Greeting]) -> None:
        self.steady.put(by)
        self.clocks.forget()
        for one in greetings:
            self.clocks.add(one.peer, one.offset - by, one.round_trip)
        side = "behind" if by > 0 else "ahead"
        asked = counted(len(greetings), "peer")
        why = f"which agrees with {asked}" if greetings else "as nobody else is here"
        text = (
            f"the clock of this node was {duration(abs(by))} {side}: it goes by the machine's now, "
            f"{why}"
        )
        self.events.emit(ClockPut(seconds=by, text=text))
        self._settle()
