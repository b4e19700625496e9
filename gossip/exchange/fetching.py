"""Fetching parts that are merged already, from their owner or from whoever else holds them.

A member needs this when a part was not pushed to it: it came late, or the push failed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from gossip.exchange.buffers import Whole
from gossip.exchange.gathering import unless
from gossip.exchange.lateness import TransferPace
from gossip.exchange.listener import ExchangeListener
from gossip.exchange.part_states import PartStates
from gossip.exchange.receiving import Inflow, PartPull
from gossip.exchange.transfers import Transfers
from gossip.plans.validity import PartKey, key_of
from protocols.errors import RemoteProtocolError, TransportError
from protocols.identity import PeerId
from protocols.messages import PartResult, Plan


@dataclass
class Fetching:
    """The fetches of one exchange. ``held`` are the parts that are here; those that are
    ``planned`` may be on their way. ``hold`` gets what is fetched."""

    transfers: Transfers
    listener: ExchangeListener
    me: PeerId
    held: Mapping[PartKey, tuple[PartResult, torch.Tensor]]
    planned: PartStates
    whole: Whole
    hold: Callable[[PartResult, torch.Tensor], None]
    news: asyncio.Event = field(default_factory=asyncio.Event)  # each part wakes the waiting
    # by part, with the digest that is wanted
    _tasks: dict[PartKey, tuple[bytes, asyncio.Task[None]]] = field(default_factory=dict)

    def want(self, result: PartResult, plan: Plan) -> None:
        """Fetch a part that is merged already, if it is not held or on its way.

        Where an earlier plan has named other bytes of it, these are fetched no more.
        """
        key = key_of(result)
        digest, running = self._tasks.get(key, (b"", None))
        if not result.digest or self._has(result):
            return
        if running is not None and not running.done():
            if digest == result.digest:
                return
            running.cancel()
        self._tasks[key] = result.digest, self.transfers.start(self._fetch(result, plan))

    def drop(self, key: PartKey) -> None:
        """Nobody wants this part any more."""
        _, running = self._tasks.pop(key, (b"", None))
        if running is not None:
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
        ended = [task for _, task in self._tasks.values()]
        for task in ended:
            task.cancel()
        self._tasks.clear()
        self.hold = keep_nothing  # breaks the cycle with whoever holds this
        return ended

    async def _fetch(self, result: PartResult, plan: Plan) -> None:
        """Pull a part from its owner or from any other member, each where the last one ended."""
        here = await self._left_over(key_of(result), plan)
        if self._has(result):
            return
        pulled = PartPull(self.transfers.wiring, result, self.whole, here)
        sources = [peer for peer in plan.roster if peer != result.owner]
        sources.insert(0 if here is None else len(sources), result.owner)
        left = deque([peer for peer in sources if peer != self.me] * 2)
        allowed = 1.0  # times what it may take
        while left and not self._has(result):
            peer = left.popleft()
            inflow = pulled.before(peer)
            before, complete = inflow.elements, False
            # else no other is left
            judged = bool(left)
            too_slow = self._judge(inflow, plan, allowed=allowed) if judged else never
            try:
                async with unless(too_slow):
                    await pulled.pull(peer, plan.patience_s, judged=judged)
                    complete = True
            except RemoteProtocolError as error:
                if pulled.spoilt_by(peer):
                    self.listener.refused(peer, error)
                else:  # the bytes from those before it may be the wrong ones
                    left.append(peer)
            except TransportError:
                if pulled.inflow.elements > before:  # it did give something: ask it again later
                    left.append(peer)
            else:
                if not complete:
                    left.append(peer)
                    if pulled.alone:  # the next one has to give all of it: somebody gets the time
                        allowed *= 2
                    continue
                data = pulled.inflow.data
                self.transfers.bytes_received += data.numel()
                self.hold(result, data)
                return
        if not self._has(result):
            self.listener.lost(result)

    async def while_it_comes(self, key: PartKey, plan: Plan) -> None:
        """Wait while a part is on its way here and moves, so that it is not sent twice.

        It may stand still for the plan's patience, or a quarter of that with no connection open,
        and at its pace it has to be here about when the plan expects all parts to be.
        """
        state, now = self.planned.get(key), self.transfers.wiring.now
        inflow = state.inflow if state is not None else None
        if state is None or inflow is None:
            return
        pace = TransferPace(now(), plan.patience_s)
        too_slow = self._judge(inflow, plan, pace)
        while state.inflow is inflow and not self.transfers.closed:
            slow = too_slow()
            still = plan.patience_s if inflow.open else plan.patience_s / 4
            if slow or now() >= pace.since + still:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(plan.patience_s / 8):
                    await self.news.wait()

    async def _left_over(self, key: PartKey, plan: Plan) -> Inflow | None:
        """What has arrived of a part whose transfer has stopped, to be completed by a fetch."""
        await self.while_it_comes(key, plan)
        state = self.planned.get(key)
        if state is None or state.passed_on is not None:
            return None  # what comes of that one is passed on to a group
        inflow, state.inflow = state.inflow, None
        return inflow

    def _judge(
        self, inflow: Inflow, plan: Plan, pace: TransferPace | None = None, *, allowed: float = 1.0
    ) -> Callable[[], bool]:
        """A check to call repeatedly: whether a transfer will end long after the plan expects.

        That is, after ``allowed`` times as long. It is False until the plan's patience is over.
        ``pace`` is told how much has come.
        """
        now = self.transfers.wiring.now
        pace = pace or TransferPace(now(), plan.patience_s)
        first, size = inflow.moved, inflow.left
        slowest = allowed * (plan.expected_s + plan.patience_s)

        def too_slow() -> bool:
            pace.note(now(), inflow.moved - first)
            judged = now() >= pace.started + plan.patience_s
            return judged and pace.end(now(), size) > now() + slowest

        return too_slow


def never() -> bool:
    """Never too slow."""
    return False


def keep_nothing(result: PartResult, data: torch.Tensor) -> None:
    """In place of what keeps merged parts, once the round is over."""
