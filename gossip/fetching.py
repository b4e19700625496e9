"""Fetching parts that are merged already, from their owner or from whoever else holds them.

A member needs this when a part was not pushed to it: it came late, or the push failed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch

from gossip.buffers import Whole
from gossip.gathering import unless
from gossip.lateness import Pace
from gossip.planned import Planned
from gossip.receiving import Inflow, Pieced
from gossip.transfers import Transfers
from gossip.validity import PartKey, key_of
from protocols.errors import RemoteProtocolError, TransportError
from protocols.identity import PeerId
from protocols.messages import PartResult, Plan


class Told(Protocol):
    """Who is told of a part that nobody has, and of what is no such part."""

    def lost(self, result: PartResult) -> None: ...
    def refused(self, peer: PeerId, error: RemoteProtocolError) -> None: ...


@dataclass
class Fetching:
    """The fetches of one exchange. ``held`` are the parts that are here; those that are
    ``planned`` may be on their way. ``hold`` gets what is fetched."""

    transfers: Transfers
    listener: Told
    me: PeerId
    held: Mapping[PartKey, tuple[PartResult, torch.Tensor]]
    planned: Planned
    whole: Whole
    hold: Callable[[PartResult, torch.Tensor], None]
    news: asyncio.Event = field(default_factory=asyncio.Event)  # who waits is woken by each part
    _tasks: dict[PartKey, asyncio.Task[None]] = field(default_factory=dict)

    def want(self, result: PartResult, plan: Plan) -> None:
        """Fetch a part that is merged already, if it is not held or on its way."""
        key = key_of(result)
        running = self._tasks.get(key)
        if result.digest and not self._has(result) and (running is None or running.done()):
            self._tasks[key] = self.transfers.start(self._fetch(result, plan))

    def drop(self, key: PartKey) -> None:
        """Nobody wants this part any more."""
        if (running := self._tasks.pop(key, None)) is not None:
            running.cancel()

    def __contains__(self, key: PartKey) -> bool:
        """Whether a part is, or was, fetched for a plan that may want it still."""
        return key in self._tasks

    def _has(self, result: PartResult) -> bool:
        """Whether these very bytes are here."""
        here = self.held.get(key_of(result))
        return here is not None and here[0].digest == result.digest

    def stop(self) -> list[asyncio.Task[None]]:
        """Fetch no more; returns what has yet to end."""
        ended = list(self._tasks.values())
        for task in ended:
            task.cancel()
        self._tasks.clear()
        self.hold = nobody  # whoever that was is not to wait for the collector
        return ended

    async def _fetch(self, result: PartResult, plan: Plan) -> None:
        """Pull a part from its owner or from any other member, each where the last one ended."""
        here = await self._left_over(key_of(result), plan)
        if self._has(result):
            return
        pieced = Pieced(self.transfers.wiring, result, self.whole, here)
        sources = [peer for peer in plan.roster if peer != result.owner]
        sources.insert(0 if here is None else len(sources), result.owner)
        left = deque([peer for peer in sources if peer != self.me] * 2)
        while left and not self._has(result):
            peer = left.popleft()
            inflow = pieced.before(peer)
            before, complete = inflow.elements, False
            too_slow = self._judge(inflow, plan) if left else no  # else nobody is quicker
            try:
                async with unless(too_slow):
                    await pieced.pull(peer, plan.patience_s)
                    complete = True
            except RemoteProtocolError as error:
                if pieced.spoilt_by(peer):
                    self.listener.refused(peer, error)
                else:  # it may have been what came before
                    left.append(peer)
            except TransportError:
                if pieced.inflow.elements > before:  # it gives, if not all at once
                    left.append(peer)
            else:
                if not complete:
                    left.append(peer)
                    continue
                data = pieced.inflow.data
                self.transfers.bytes_received += data.numel()
                self.hold(result, data)
                return
        if not self._has(result):
            self.listener.lost(result)

    async def while_it_comes(self, key: PartKey, plan: Plan) -> None:
        """Wait as long as a part is on its way here already and moves: nobody sends it twice.

        As long as its connection stands it may stand still for the plan's patience, but is to end
        at its pace about when the plan expects all to.
        """
        route, now = self.planned.get(key), self.transfers.wiring.now
        inflow = route.inflow if route is not None else None
        if route is None or inflow is None:
            return
        pace = Pace(now(), plan.patience_s)
        too_slow = self._judge(inflow, plan, pace)
        while route.inflow is inflow and not self.transfers.closed:
            slow = too_slow()
            still = plan.patience_s if inflow.open else plan.patience_s / 4
            if slow or now() >= pace.since + still:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(plan.patience_s / 8):
                    await self.news.wait()

    async def _left_over(self, key: PartKey, plan: Plan) -> Inflow | None:
        """What has come of a part that comes no further, to go on with."""
        await self.while_it_comes(key, plan)
        route = self.planned.get(key)
        if route is None or route.passed_on is not None:
            return None  # that one goes on to a group
        inflow, route.inflow = route.inflow, None
        return inflow

    def _judge(self, inflow: Inflow, plan: Plan, pace: Pace | None = None) -> Callable[[], bool]:
        """To be asked again and again: whether what moves will end long after the plan expects.

        Not before the plan's patience is over. ``pace`` is told how much has come.
        """
        now = self.transfers.wiring.now
        pace = pace or Pace(now(), plan.patience_s)
        first, size = inflow.moved, inflow.left
        slowest = plan.expected_s + plan.patience_s

        def too_slow() -> bool:
            pace.note(now(), inflow.moved - first)
            judged = now() >= pace.started + plan.patience_s
            return judged and pace.end(now(), size) > now() + slowest

        return too_slow


def no() -> bool:
    """It is not."""
    return False


def nobody(result: PartResult, data: torch.Tensor) -> None:
    """Who held what is merged: the round is over."""
