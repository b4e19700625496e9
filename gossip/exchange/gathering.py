"""Pulling the parts of a certified round from all who hold them, but not from far slower donors.

Each part is pulled from one donor at a time, and how much comes is looked at again and again. If
another donor would give far more, the part's rest is asked of that one. What a donor gives is
measured; a donor not tried yet is assumed to give what it announces and this node's link carries.
So where this node's own link is the bottleneck, no donor seems slow.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch

from gossip.exchange.buffers import Whole
from gossip.exchange.ledger import NOT_KEPT
from gossip.exchange.receiving import Inflow, PartPull
from gossip.plans.estimating import UNKNOWN_SPEED
from gossip.wiring import Wiring
from protocols.errors import RemoteProtocolError, RemoteRefused, TransportError
from protocols.identity import PeerId
from protocols.messages import PartResult
from protocols.tasks import every

LOOK_S = 0.5  # how often a donor's rate is checked
JUDGED_S = 2.0  # a donor is judged by this much time, not earlier; what ends sooner is awaited
FAR = 4.0  # times: another donor has to be this much quicker
STALL_S = 5.0  # without a byte, or less than the transport's least rate: the donor has failed


# The bytes of a part that is here, or comes: waited for. None: it has to be fetched.
Held = Callable[[PartResult], Awaitable[torch.Tensor | None]]


class NotKeptError(TransportError):
    """Nobody asked for a part gives it, and at least one does not keep it any more."""


@dataclass
class Paces:
    """Bytes a second that donors give to one pull. Sans-IO.

    ``announced`` says what a donor's link carries, ``link`` what ours does; 0: not known.
    """

    announced: Callable[[PeerId], float]
    link: Callable[[], float]
    pulls: int = 0  # going on
    _given: dict[PeerId, float] = field(default_factory=dict)
    _failed: set[PeerId] = field(default_factory=set)  # the last time they were asked

    def order(self, donors: Iterable[PeerId]) -> list[PeerId]:
        """Whom to ask first: as they are given, those that are far slower or failed at the end."""
        donors = list(donors)
        best = max((self._given.get(peer, 0.0) for peer in donors), default=0.0)

        def last(peer: PeerId) -> tuple[bool, bool]:
            return peer in self._failed, FAR * self._given.get(peer, best) < best

        return sorted(donors, key=last)

    def keep(self, donors: Set[PeerId]) -> None:
        """Forget all others: members come and go for as long as a run lasts."""
        self._given = {peer: rate for peer, rate in self._given.items() if peer in donors}
        self._failed &= donors

    def gives(self, donor: PeerId, rate: float) -> None:
        """A donor was measured to give ``rate`` bytes a second."""
        self._failed.discard(donor)
        self._given[donor] = rate

    def ended(self, donor: PeerId, moved: int, seconds: float) -> None:
        """A donor has given all; a very short pull only gives a lower bound of its rate."""
        rate = moved / seconds if seconds > 0 else 0.0
        if seconds < JUDGED_S:
            rate = max(rate, self._given.get(donor, 0.0))
        if rate > 0:
            self.gives(donor, rate)

    def failed(self, donor: PeerId) -> None:
        """A donor did not answer, or stood still."""
        self._failed.add(donor)
        self._given.pop(donor, None)

    def better(self, rate: float, others: Iterable[PeerId]) -> PeerId | None:
        """Who would be far quicker than a donor that gives ``rate``."""
        paces = {peer: self._expected(peer) for peer in others if peer not in self._failed}
        best = max(paces, key=paces.__getitem__, default=None)
        return best if best is not None and paces[best] > FAR * rate else None

    def _expected(self, peer: PeerId) -> float:
        if peer in self._given:
            return self._given[peer]
        carried = min(self.announced(peer) or UNKNOWN_SPEED, self.link() or UNKNOWN_SPEED)
        return carried / max(1, self.pulls)


class _Moving:
    """What one donor gives to one pull, and when it is to be left."""

    def __init__(self, now: Callable[[], float], inflow: Inflow) -> None:
        self._now, self._inflow = now, inflow
        self._first = inflow.moved
        self.began = now()
        self._seen: deque[tuple[float, int]] = deque([(self.began, self._first)])

    @property
    def moved(self) -> int:
        """Bytes so far."""
        return self._inflow.moved - self._first

    def rate(self) -> float | None:
        """Bytes a second lately; None where it is too early to say, or it is nearly here."""
        now, moved = self._now(), self._inflow.moved
        self._seen.append((now, moved))
        while len(self._seen) > 2 and self._seen[1][0] <= now - JUDGED_S:
            self._seen.popleft()
        since, before = self._seen[0]
        if now - since < JUDGED_S:
            return None
        rate = (moved - before) / (now - since)
        return rate if self._inflow.left > JUDGED_S * rate else None


@dataclass
class Gathering:
    """Pulls parts from several donors at once, except those that are ``held``.

    ``rejected`` is told of wrong bytes.
    """

    wiring: Wiring
    paces: Paces
    held: Held
    rejected: Callable[[PeerId, RemoteProtocolError], None]

    async def gather(
        self, wanted: Mapping[PartResult, Sequence[PeerId]], size: int
    ) -> dict[tuple[int, int], torch.Tensor]:
        """The encoded bytes of these parts of ``size`` elements in all, each from its donors.

        Raises TransportError when one is not to be had, :class:`NotKeptError` where waiting will
        not help.
        """
        self.paces.keep({donor for donors in wanted.values() for donor in donors})
        whole = Whole(size)
        found: dict[tuple[int, int], torch.Tensor] = {}

        async def get(result: PartResult, donors: Sequence[PeerId]) -> None:
            data = await self.held(result)
            if data is None:
                data = await self._get(result, donors, whole)
            found[result.start, result.stop] = data

        await every(get(result, donors) for result, donors in wanted.items())
        return found

    async def _get(
        self, result: PartResult, donors: Sequence[PeerId], whole: Whole
    ) -> torch.Tensor:
        left = deque(self.paces.order(donors))
        pulled = PartPull(self.wiring, result, whole)
        forgotten = False  # by somebody who had it
        while left:
            donor = left.popleft()
            try:
                better = await self._from(donor, () if pulled.alone else left, pulled)
            except RemoteProtocolError as error:
                if pulled.spoilt_by(donor):
                    self.rejected(donor, error)
                else:  # which of them it was is not known
                    left.appendleft(donor)
            except TransportError as error:
                self.paces.failed(donor)
                forgotten |= isinstance(error, RemoteRefused) and error.code == NOT_KEPT
            else:
                if better is None:
                    return pulled.inflow.data
                left.remove(better)
                left.appendleft(better)
                left.append(donor)
        failure = NotKeptError if forgotten else TransportError
        raise failure(f"nobody has part {result.start}-{result.stop}")

    async def _from(
        self, donor: PeerId, others: Iterable[PeerId], pulled: PartPull
    ) -> PeerId | None:
        """Pull the rest from a donor; returns whom to go on with, None: all of it is here.

        Raises TransportError or RemoteProtocolError.
        """
        moving = _Moving(self.wiring.now, pulled.before(donor))
        found: list[PeerId] = []

        def slow() -> bool:
            rate = moving.rate()
            if rate is None:
                return False
            self.paces.gives(donor, rate)
            better = self.paces.better(rate, others)
            if better is not None:
                found.append(better)
            return better is not None

        self.paces.pulls += 1
        try:
            async with unless(slow):
                await pulled.pull(donor, STALL_S)
        finally:
            self.paces.pulls -= 1
        if found:
            return found[0]
        self.paces.ended(donor, moving.moved, self.wiring.now() - moving.began)
        return None


@asynccontextmanager
async def unless(given_up: Callable[[], bool]) -> AsyncIterator[None]:
    """Leave a block once ``given_up``, which is asked every :data:`LOOK_S`, says so."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as limit:

            def look() -> None:
                if given_up():
                    limit.reschedule(loop.time())
                else:
                    timers[0] = loop.call_later(LOOK_S, look)

            timers = [loop.call_later(LOOK_S, look)]
            try:
                yield
            finally:
                timers[0].cancel()
    except TimeoutError:
        if not limit.expired():
            raise
