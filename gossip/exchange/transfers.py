"""What all transfers of one exchange share: retries that resume, bounds, counts, tasks.

A push whose connection broke is resumed: a call of the same name asks the receiver how much it
has, and only the rest is sent.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from gossip.exchange.bodies import chunk_at
from gossip.place import Place
from gossip.plans.validity import PartKey
from gossip.wiring import Wiring
from protocols.errors import Malformed, RemoteRefused, Unreachable, Why
from protocols.identity import PeerId
from protocols.messages import Plan, TransferHeader
from protocols.transport import Drain, Feed, Incoming

TRIES = 5  # at least, of a push that breaks again and again without progress
FIRST_PAUSE_S, LAST_PAUSE_S = 0.01, 0.25  # before it is tried again
MOST_DOUBLINGS = 8  # of the pause: it is the longest by then, and no power of two overflows
AT_ONCE = 2  # pushes of one thing by one peer: the one that broke, and the next try
ASK_S = 5.0  # at most, for the answer of where to resume


def header_of(place: Place, key: PartKey, plan: Plan) -> TransferHeader:
    """The header of a slice of a part, or of the merged part, when sent from the beginning."""
    start, stop, _, basis = key
    return TransferHeader(place.run, place.fragment, place.round, start, stop, plan.codec, basis, 0)


class CountingFeed(Feed, Protocol):
    """A feed that knows how many bytes it has handed out."""

    given: int


class SizedDrain(Drain, Protocol):
    """A drain for a body of one length only."""

    length: int


def check_length(incoming: Incoming, drain: SizedDrain) -> None:
    """Raise Malformed for a body that is not as long as its drain."""
    if incoming.length != drain.length:
        raise Malformed(f"{incoming.length} bytes where {drain.length} belong")


@dataclass
class Transfers:
    """The transfers of one exchange."""

    wiring: Wiring
    judged: bool = True  # by its round: what comes may move as slowly as that bears
    bytes_sent: int = 0
    elements_sent: int = 0  # that those bytes decode to, each as often as it was sent
    bytes_received: int = 0
    closed: bool = False  # the round is over here
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    receiving: Counter[tuple[object, ...]] = field(default_factory=Counter)  # tries of each body

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that nobody waits for, owned by the node."""
        task = self.wiring.spawn(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def push(
        self,
        peer: PeerId,
        name: str,
        header: TransferHeader,
        feed_from: Callable[[int], CountingFeed],
        timeout: float,
        *,
        ask: bool = False,
    ) -> None:
        """Push ``feed_from(first)``; if the connection breaks, from the first missing chunk on.

        ``ask``: some of it may be there already. Raises TransportError, RemoteProtocolError for an
        answer that makes no sense, and whatever the feed raises.
        """
        breaks = _Breaks(self.wiring.now, timeout)
        while True:
            try:
                if ask:
                    header = await self._reached(peer, name, header, min(ASK_S, timeout))
                    breaks.reached(header.done)
                    if name != "merged" and header.done == header.stop - header.start:
                        return
                first = chunk_at(self.wiring.codec, header)
                feed = feed_from(first)
                try:
                    await self.wiring.transport.push(
                        peer, name, header.encode(), feed, timeout=timeout
                    )
                finally:
                    self.bytes_sent += feed.given
                    self.elements_sent += self._elements(header, first, feed.given)
                    del feed  # it may keep a part in memory during the pause
            except Unreachable as error:
                if error.why is not Why.RESET or self.closed or not breaks.bearable():
                    raise
            except RemoteRefused as error:
                if error.code not in ("again", "early") or not breaks.bearable():
                    raise
            else:
                return
            await asyncio.sleep(breaks.pause)
            ask = True

    def _elements(self, header: TransferHeader, first: int, given: int) -> int:
        """What the first ``given`` bytes from a chunk on decode to; seals and trailers are none."""
        codec = self.wiring.codec.named(header.codec)
        chunks = codec.chunks(header.start, header.stop)
        if first == len(chunks):
            return 0
        given += chunks[first].offset
        return codec.complete(header.start, header.stop, given) - header.done

    async def _reached(
        self, peer: PeerId, name: str, header: TransferHeader, timeout: float
    ) -> TransferHeader:
        reply = await self.wiring.transport.call(peer, name, header.encode(), timeout=timeout)
        done = TransferHeader.decode(reply).done
        if done > header.stop - header.start:
            raise Malformed("it has more than there is")
        return dataclasses.replace(header, done=done)

    async def receive(
        self,
        sender: PeerId,
        header: TransferHeader,
        incoming: Incoming,
        drain: SizedDrain,
        patience: float = 0.0,
    ) -> None:
        """Take a body into ``drain``; raises what the drain raises, and RemoteRefused ``busy``.

        Its sender may stand still for ``patience`` seconds.
        """
        check_length(incoming, drain)
        what = (sender, header.start, header.stop, header.basis)
        if self.receiving[what] >= AT_ONCE:
            raise RemoteRefused("busy", "it is on its way already")
        self.receiving[what] += 1
        try:
            await incoming.into(drain, stall=patience, slow=self.judged)
            self.bytes_received += drain.length
        finally:
            self.receiving[what] -= 1
            if not self.receiving[what]:  # letters add keys for as long as a run lasts
                del self.receiving[what]


class _Breaks:
    """Counts how often one transfer broke since it last made progress.

    It may break any number of times with progress in between. Without progress it is given up
    after :data:`TRIES` tries, but not before ``patience`` seconds.
    """

    def __init__(self, now: Callable[[], float], patience: float) -> None:
        self._now, self._patience = now, patience
        self._done = -1
        self._count = 0
        self._since = 0.0

    @property
    def pause(self) -> float:
        """Seconds to wait before the next try."""
        doublings = min(self._count - 1, MOST_DOUBLINGS)
        return min(FIRST_PAUSE_S * 2.0**doublings, LAST_PAUSE_S)

    def reached(self, done: int) -> None:
        """The receiver has ``done`` elements."""
        if done > self._done:
            self._done, self._count = done, 0

    def bearable(self) -> bool:
        """It broke again: whether to try once more."""
        if not self._count:
            self._since = self._now()
        self._count += 1
        return self._count < TRIES or self._now() < self._since + self._patience
