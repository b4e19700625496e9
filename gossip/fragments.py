"""A member's fragments, side by side: what they share, and what runs for each of them.

A model is merged as a whole, or in fragments each of which has rounds of its own. Several rounds
are then in flight at once, and one that stalls holds up none of the others. They share the
transport, one announcement and one membership.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Generic, TypeVar

from gossip.common import AnyChain, SwarmPresence
from gossip.hooks import Hooks
from gossip.membership.presence import Presence
from gossip.wiring import Wiring
from protocols.identity import PeerId
from protocols.messages import Announce

F = TypeVar("F", bound=AnyChain)


class Fragments(SwarmPresence, Generic[F]):
    """This node's part in one run. :meth:`run` runs until cancelled.

    ``chains`` are those of fragments 0, 1, …, made with one presence.
    """

    def __init__(self, chains: Sequence[F], hooks: Hooks) -> None:
        self.chains = tuple(chains)
        if [chain.fragment for chain in self.chains] != list(range(len(self.chains))):
            raise ValueError("the chains of a swarm are those of fragments 0, 1, ...")
        self.wiring: Wiring = self.chains[0].wiring
        self.presence: Presence = self.chains[0].presence
        self.hooks = hooks
        self.presence.places = lambda: [chain.announced_place() for chain in self.chains]
        self.presence.on_news = self._on_news
        self.presence.on_change = self._on_change
        self.presence.on_rejected = hooks.rejected

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """No outer step is taken while this is held: all replicas can be read as a whole."""
        async with AsyncExitStack() as stack:
            for chain in self.chains:  # always in this order, so two never wait for each other
                await stack.enter_async_context(chain.still())
            yield

    async def run(self) -> None:
        """Announce, keep the membership in order, and drive the chains, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.presence.heartbeats())
            for chain in self.chains:
                group.create_task(chain.run())

    def _on_news(self, announce: Announce) -> None:
        self.hooks.learned(announce)
        for chain in self.chains:
            chain.on_news(announce)

    def _on_change(self, peer: PeerId, now: str, before: str) -> None:
        self.hooks.peer(peer, now, before)
        for chain in self.chains:
            chain.kick()
