"""Links that fail one way, one by one, or move: whole swarms on the virtual clock."""

from __future__ import annotations

import asyncio

import pytest
from exchange_kit import until
from simulated_swarm import Member, SimulatedSwarm, contributes, lengths, simulated_swarm

from protocols.memory import virtual_time


def darken(swarm: SimulatedSwarm, one: Member, others: list[Member]) -> None:
    for other in others:
        swarm.network.cut(one.peer, other.peer)


def test_who_loses_the_others_one_by_one_is_not_half_of_them_in_the_end() -> None:
    """It asks who is left to go on together; that nobody answers does not make it half of two."""

    async def main() -> None:
        async with simulated_swarm(4) as swarm:
            members = list(swarm.members.values())
            lost, last, *others = members
            await until(lambda: min(lengths(members)) >= 4, 30.0)
            darken(swarm, lost, others)
            chain = lost.swarm.chains[0]
            await until(lambda: chain.round.agreement.promised[0] > 0, 60.0)
            darken(swarm, lost, [last])
            before = len(lost.replica.history)
            await asyncio.sleep(15.0)
            assert len(lost.replica.history) == before
            assert len(last.replica.history) > before + 5
            swarm.agree()

    virtual_time.run(main())


@pytest.mark.parametrize("both", [True, False], ids=["dark both ways", "dark one way"])
@pytest.mark.parametrize("count", [4, 6])
def test_two_who_do_not_hear_each_other_hold_nobody_up(count: int, both: bool) -> None:
    """All others hear both. Each round may leave one of them out; none is lost for good."""

    async def main() -> None:
        async with simulated_swarm(count) as swarm:
            members = list(swarm.members.values())
            await until(lambda: min(lengths(members)) >= 6, 30.0)
            one, other, *rest = members
            swarm.network.cut(one.peer, other.peer, both=both)
            begun = len(rest[0].replica.history)
            await asyncio.sleep(30.0)
            swarm.agree()
            assert min(lengths(rest)) >= begun + 20
            assert min(lengths(members)) >= begun + 10  # and neither of the two stands still
            assert contributes(one, rest[0], begun)
            assert contributes(other, rest[0], begun)
            swarm.network.splice(one.peer, other.peer)
            healed = len(rest[0].replica.history)
            await until(
                lambda: (
                    max(lengths(members)) - min(lengths(members)) <= 1
                    and all(contributes(member, rest[0], healed) for member in members)
                ),
                30.0,
            )
            swarm.agree()

    virtual_time.run(main())
