"""A simulated island's presence in the swarm, by the code that runs on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gossip.membership.members import Membership, Patience
from gossip.membership.presence import Presence
from gossip.membership.standing import first_announcement
from gossip.place import Place
from gossip.wiring import Wiring
from node.simulate.world import Node
from protocols.codecs import RangeCodec
from protocols.memory.virtual_time import inline
from protocols.tasks import Tasks

EPOCH_S = 1_000_000.0  # what the wall clock shows when the virtual one shows zero


@dataclass
class Present:
    """What a swarm needs of an island; what it spawns belongs to :meth:`live`."""

    node: Node
    codec: RangeCodec
    places: Callable[[], Sequence[Place]]  # of each fragment
    joining: bool  # others have yet to let it take part
    run: bytes
    role: str = "island"
    wiring: Wiring = field(init=False)
    presence: Presence = field(init=False)
    _group: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    def __post_init__(self) -> None:
        node, loop = self.node, asyncio.get_running_loop()
        self.wiring = Wiring(
            node.transport,
            node.identity,
            self.run,
            self.codec,
            Tasks(self._group).spawn,
            inline,
            loop.time,
        )
        announce = first_announcement(
            node.me,
            self.places()[0],
            version="0",
            role=self.role,
            status="joining" if self.joining else "active",
            upload=node.bandwidth,
            download=node.bandwidth,
        )
        self.presence = Presence(
            self.wiring,
            Membership(node.me, Patience()),
            announce,
            self.places,
            wall=lambda: EPOCH_S + loop.time(),
        )

    async def live(self, others: Iterable[Presence], *work: Coroutine[Any, Any, None]) -> None:
        """Learn who is there, and do the work until cancelled, or until all of it has ended."""
        async with self._group as group:
            self._learn(others)
            del others  # of whom some may be gone long before this ends
            for one in work:
                group.create_task(one)

    def _learn(self, others: Iterable[Presence]) -> None:
        for other in others:
            if other is not self.presence:
                self.presence.learn(other.envelope())
