"""Islands of a simulated swarm that are replaced."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from node.simulate.world import World

if TYPE_CHECKING:
    from node.simulate.swarm import Members


async def churned(world: World, members: Members) -> None:
    """Replace islands as rounds pass, however long these take, each at a moment by chance."""
    one = world.scenario
    every = 10.0 / (one.churn * one.islands)  # rounds
    due = every / 2
    while not world.done:  # else churn leaves nobody that trained for a last merge
        await asyncio.sleep(one.step_s)
        if members.progress < due:
            continue
        due += every
        await asyncio.sleep(world.random.uniform(0, one.inner_steps * one.step_s))
        if not world.done:
            await members.replace(world.nodes[world.random.choice(world.members)])
            world.notes["replaced"] = world.notes.get("replaced", 0) + 1
