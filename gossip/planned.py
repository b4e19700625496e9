"""Which plan of a round asks for a part: what comes for one may overtake the plan itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gossip.transfers import Transfers
from gossip.validity import PartKey
from protocols.errors import RemoteRefused
from protocols.messages import Plan

PLAN_WAIT_S = 5.0  # a slice may be so much quicker than the plan that announces it


@dataclass
class Planned:
    """The newest plan of each part, in one exchange."""

    transfers: Transfers
    _plans: dict[PartKey, Plan] = field(default_factory=dict)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __contains__(self, key: PartKey) -> bool:
        return key in self._plans

    def __getitem__(self, key: PartKey) -> Plan:
        return self._plans[key]

    def __setitem__(self, key: PartKey, plan: Plan) -> None:
        self._plans[key] = plan

    async def announce(self) -> None:
        """There are new ones, or the round is over: whoever waits has a look."""
        async with self._changed:
            self._changed.notify_all()

    async def until(self, key: PartKey) -> Plan:
        """Wait for the plan that has this part. Raises RemoteRefused ``late``."""
        try:
            async with asyncio.timeout(PLAN_WAIT_S), self._changed:
                await self._changed.wait_for(lambda: self.transfers.closed or key in self._plans)
        except TimeoutError:
            raise RemoteRefused("late", "no plan has this part") from None
        if self.transfers.closed:
            raise RemoteRefused("late", "the round is over here")
        return self._plans[key]
