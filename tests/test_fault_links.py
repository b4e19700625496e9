"""Links that fail one way, one by one, or move: whole swarms on the virtual clock."""

from __future__ import annotations

import asyncio

from exchange_kit import until
from simulated_swarm import Member, SimulatedSwarm, simulated_swarm

from protocols import virtual_time
from protocols.memory import Link

DARK = Link(latency=1e6)  # seconds


def darken(swarm: SimulatedSwarm, one: Member, others: list[Member]) -> None:
    """Nothing gets from ``one`` to the others or back, and nobody is told."""
    for other in others:
        swarm.network.set_link(one.peer, other.peer, DARK)


def test_who_loses_the_others_one_by_one_is_not_half_of_them_in_the_end() -> None:
    """It asks who is left to go on together; that nobody answers does not make it half of two."""

    async def main() -> None:
        async with simulated_swarm(4) as swarm:
            members = list(swarm.members.values())
            lost, last, *others = members
            await until(lambda: min(len(m.replica.history) for m in members) >= 4, 30.0)
            darken(swarm, lost, others)
            chain = lost.swarm.chains[0]
            await until(lambda: chain.round.agreement.promised[0] > 0, 20.0)
            darken(swarm, lost, [last])
            before = len(lost.replica.history)
            await asyncio.sleep(15.0)
            assert len(lost.replica.history) == before
            assert len(last.replica.history) > before + 5
            swarm.agree()

    virtual_time.run(main())
