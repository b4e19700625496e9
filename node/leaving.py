"""How a node leaves: with a checkpoint of all it has to itself, and nothing owed to others."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

from gossip.membership import MEMBERS
from gossip.presence import THERE
from node.modes import is_over

if TYPE_CHECKING:
    from node.participation import Participation

LINGER_S = 20.0  # after the last round: others may still need our parts
FAREWELL_S = 3.0


async def leave(part: Participation, stack: AsyncExitStack) -> None:
    """Say farewell, make the final checkpoint, stop the trainer; at the end let others finish.

    The farewell comes first: then nobody waits for this node, which takes no round after that
    checkpoint. Where all leave at once a later one would be in nobody's. ``stack``, until which it
    stands still, is unwound when nothing of the node runs any more.
    """
    if not part.finishing:
        await _farewell(part)
    if part.config.checkpoint_every and part.island is not None:
        # who is at the end of the run may owe others their last rounds of other fragments
        last = None if part.finishing and _others(part) else stack
        await part.keeper.save(wait=True, last=last)
    if part.island is not None:
        await part.island.stop()
    if part.finishing:
        await _linger(part)
        await _farewell(part)


async def _farewell(part: Participation) -> None:
    with suppress(TimeoutError):  # they will notice
        async with asyncio.timeout(FAREWELL_S):
            await part.swarm.presence.leave()


def _others(part: Participation) -> bool:
    membership, now = part.swarm.membership, part.swarm.now()
    return any(
        island.announce.role in MEMBERS and membership.liveness(peer, now) in THERE
        for peer, island in membership.islands.items()
    )


async def _linger(part: Participation) -> None:
    """Stay while a live island has not come to the end of the run yet."""

    def all_done() -> bool:
        return not any(
            announce.status == "active"
            and not is_over(part.manifest, announce.round, announce.work)
            for chain in part.swarm.chains
            for announce in chain.membership.islands_alive(part.swarm.now())
        )

    try:
        async with asyncio.timeout(LINGER_S):
            while not all_done():
                part.news.clear()
                await part.news.wait()
    except TimeoutError:
        return
