"""Islands of a simulated swarm that are replaced."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from node.simulate.world import World

if TYPE_CHECKING:
    from node.simulate.swarm import Members


class Churn:
    """Replaces islands as rounds pass, however long these take, each at a moment by chance.

    Several may be on their way at once. But half of the islands stay that take part by now: if all
    went before the first newcomer is let in, nobody would be left who can decide on a round.
    """

    def __init__(self, world: World, members: Members) -> None:
        self._world, self._members = world, members
        self._tasks: set[asyncio.Task[None]] = set()
        self._tasks.add(members.group.create_task(self._begin()))

    def end(self) -> None:
        """Replace nobody else; who is on its way does not come."""
        for task in self._tasks:
            task.cancel()

    async def _begin(self) -> None:
        """Begin each replacement when it is due, until the run's inner steps are taken."""
        one, members = self._world.scenario, self._members
        every = 10.0 / (one.churn * one.islands)  # rounds
        last = one.rounds - 1  # a round may be the next that is seen, and then it is over
        due, under_way = every / 2, set[asyncio.Task[None]]()
        while not self._world.done:
            under_way = await self._pause(under_way)
            while due < one.rounds and members.progress >= min(due, last):
                due += every
                steps = (one.rounds - members.progress) * one.inner_steps
                if steps < one.inner_steps:
                    steps = max(0.0, steps - 1)  # the last one counts when it begins
                within = min(steps, one.inner_steps) * one.step_s
                after = self._world.random.uniform(0, within)
                task = members.group.create_task(self._replace(after))
                under_way.add(task)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _pause(self, under_way: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        """Let an inner step's time pass, since the last of these has ended; those still going on.

        So it is looked as often, and at the same moments, where one comes after the other.
        """
        step_s, ended = self._world.scenario.step_s, True
        while under_way and ended:
            done, under_way = await asyncio.wait(
                under_way, timeout=step_s, return_when=asyncio.FIRST_COMPLETED
            )
            ended = bool(done)
        if ended:
            await asyncio.sleep(step_s)
        return under_way

    async def _replace(self, after: float) -> None:
        await asyncio.sleep(after)
        world, members = self._world, self._members
        while not world.done:  # else churn leaves nobody that trained for a last merge
            if 2 * (self._taking_part() - 1) >= world.scenario.islands:
                there = [me for me in world.members if me in members.running]
                await members.replace(world.nodes[world.random.choice(there)])
                return
            await asyncio.sleep(world.scenario.step_s)

    def _taking_part(self) -> int:
        """How many islands the others have let in."""
        said = [member.present.presence.status for member in self._members.islands]
        return sum(s.status == "active" and all(o.active for o in s.others) for s in said)
