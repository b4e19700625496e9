"""Slices that others bring to this member in one round, or the sums of their groups.

Each goes to what merges it here for everybody (:mod:`gossip.exchange.owning`), or collects it for
this member's group (:mod:`gossip.exchange.relaying`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gossip.exchange.collecting import Collecting
from gossip.exchange.owning import Owning
from gossip.exchange.part_states import ANSWER_S, PLAN_WAIT_S, PartState, PartStates
from gossip.exchange.relaying import Relaying
from protocols.identity import PeerId
from protocols.messages import TransferHeader
from protocols.transport import Incoming


@dataclass
class IncomingSlices:
    """What comes in one exchange of parts that this member merges or relays."""

    planned: PartStates
    owning: Owning
    relaying: Relaying

    async def on_slice(self, sender: PeerId, header: TransferHeader, incoming: Incoming) -> bytes:
        """Take a contributor's slice. Raises RemoteRefused ``early`` or ``late``."""
        await self._asked_for(header)
        await self._merging(header).take(sender, header, incoming)
        return b""

    async def slice_reached(self, sender: PeerId, header: TransferHeader) -> bytes:
        """How much of the sender's slice is here. Raises RemoteRefused ``early`` or ``late``."""
        await self._asked_for(header, ANSWER_S)
        return self._merging(header).reached(sender, header).encode()

    async def on_sum(self, sender: PeerId, header: TransferHeader, incoming: Incoming) -> bytes:
        """Take the sum of a group from its relay. Raises RemoteRefused ``early`` or ``late``."""
        state = await self._asked_for(header)
        await self.owning.take_sum(sender, state.key, header, incoming)
        return b""

    async def sum_reached(self, sender: PeerId, header: TransferHeader) -> bytes:
        """How much of a group's sum is here. Raises RemoteRefused ``early`` or ``late``."""
        state = await self._asked_for(header, ANSWER_S)
        return self.owning.sum_reached(sender, state.key, header).encode()

    async def give(self, sender: PeerId, header: TransferHeader) -> bytes:
        """A member asks for a part of mine that its relay does not pass on."""
        await self._asked_for(header)
        self.owning.give(sender, header)
        return b""

    async def _asked_for(self, header: TransferHeader, wait: float = PLAN_WAIT_S) -> PartState:
        """Wait for the plan in which I merge or relay this part.

        Raises RemoteRefused: ``early`` where it has not come, ``late`` where it is past.
        """
        mine = (header.start, header.stop, self.owning.me, header.basis)
        return await self.planned.until(mine, wait)

    def _merging(self, header: TransferHeader) -> Collecting:
        return self.relaying if self.relaying.collects_range(header) else self.owning
