"""How a node leaves: with a checkpoint of all it has to itself, and nothing owed to others."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from gossip.membership import MEMBERS
from gossip.presence import THERE
from node.modes import is_over

if TYPE_CHECKING:
    from node.participation import Participation

LINGER_S = 20.0  # after the last round: others may still need our parts
FAREWELL_S = 3.0


async def leave(part: Participation, stack: AsyncExitStack) -> None:
    """Final checkpoint, stop the trainer, let others finish, say farewell.

    ``stack`` is unwound when nothing of the node runs any more.
    """
    if part.config.checkpoint_every and part.island is not None:
        await save_last(part, stack)
    if part.island is not None:
        await part.island.stop()
    if part.finishing:
        await _linger(part)
    try:
        async with asyncio.timeout(FAREWELL_S):
            await part.swarm.presence.leave()
    except TimeoutError:
        return  # they will notice


async def save_last(part: Participation, stack: AsyncExitStack) -> None:
    """The final checkpoint. Who is alone takes no round after it: nobody else would have that.

    Among others rounds go on meanwhile, and are theirs to keep: whoever stood still for as long as
    a large checkpoint takes would hold them up. Where they too have gone by then it is made again.
    """
    while True:
        alone, before = not _others(part), _rounds(part)
        await part.keeper.save(wait=True, last=stack if alone else None)
        if alone or _others(part) or _rounds(part) == before:
            return


def _others(part: Participation) -> bool:
    """Whether anybody else has the rounds that are made."""
    membership, now = part.swarm.membership, part.swarm.now()
    return any(
        island.announce.role in MEMBERS and membership.liveness(peer, now) in THERE
        for peer, island in membership.islands.items()
    )


def _rounds(part: Participation) -> list[int]:
    return [replica.place.round for replica in part.replicas]


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
