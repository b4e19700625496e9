"""Thousands of rounds on the virtual clock: no objects are left behind by them."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
from exchange_kit import until
from simulated_swarm import SimulatedSwarm, simulated_swarm

from protocols.memory import virtual_time

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def forget(swarm: SimulatedSwarm) -> None:
    """What the test's own members note for comparison, and real ones do not."""
    swarm.agree()
    for member in swarm.members.values():
        member.rejected.clear()
        for replica in member.replicas:
            replica.certificates.clear()
            replica.means.clear()


def census() -> Counter[str]:
    """How many objects there are, by kind."""
    gc.collect()
    return Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())


@pytest.mark.parametrize("fragments", [1, 2])
def test_no_object_is_left_behind_by_a_round(fragments: int) -> None:
    async def main() -> None:
        swarms = simulated_swarm(3, size=3000, think=(0.05, 0.1), fragments=fragments)
        async with swarms as swarm:
            members = list(swarm.members.values())

            async def after(rounds: int) -> Counter[str]:
                replicas = [one for member in members for one in member.replicas]
                while min(replica.place.round for replica in replicas) < rounds:
                    done = min(replica.place.round for replica in replicas)
                    await until(lambda done=done: min(r.place.round for r in replicas) > done, 60.0)
                    if done % 20 == 0:
                        forget(swarm)
                forget(swarm)
                return census()

            before = await after(200)
            later = await after(1200)
            noted = 1000 * len(members) * fragments  # heads and states, for swarm.agree()
            few = noted // 10  # weak references wait for their owner's next look
            grown = {kind: n - before[kind] for kind, n in later.items() if n - before[kind] > few}
            assert grown.pop("builtins.tuple", 0) <= noted + few
            assert grown == {}

    virtual_time.run(main())
