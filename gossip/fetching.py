"""Getting parts that are merged already: from their owner, or from whoever else holds them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from gossip.buffers import Whole
from gossip.planned import Planned
from gossip.receiving import pull_part
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
    _tasks: dict[PartKey, asyncio.Task[None]] = field(default_factory=dict)

    def want(self, result: PartResult, plan: Plan) -> None:
        """Fetch a part that is merged already, if it is not held or on its way."""
        key = key_of(result)
        running = self._tasks.get(key)
        if result.digest and not self._has(result) and (running is None or running.done()):
            self._tasks[key] = self.transfers.start(self._fetch(result, plan))

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
        """Pull a part from its owner or from any other member."""
        key, wiring = key_of(result), self.transfers.wiring
        await self._while_it_comes(key, plan.patience_s)
        sources = [result.owner, *(peer for peer in plan.roster if peer != result.owner)]
        for peer in [peer for peer in sources if peer != self.me] * 2:
            if self._has(result):
                return
            try:
                data = await pull_part(wiring, peer, result, plan.patience_s, self.whole)
            except RemoteProtocolError as error:
                self.listener.refused(peer, error)
            except TransportError:
                continue
            else:
                self.transfers.bytes_received += data.numel()
                self.hold(result, data)
                return
        if not self._has(result):
            self.listener.lost(result)

    async def _while_it_comes(self, key: PartKey, patience: float) -> None:
        """Wait as long as a part is on its way here already and moves: nobody sends it twice."""
        moved, route = -1, self.planned.get(key)
        while route and (inflow := route.inflow) is not None and inflow.moved != moved:
            moved = inflow.moved
            await asyncio.sleep(patience / 4)


def nobody(result: PartResult, data: torch.Tensor) -> None:
    """Who held what is merged: the round is over."""
