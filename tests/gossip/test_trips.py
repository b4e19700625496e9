"""Patience from measured round trips: the arithmetic, and in whole swarms on the virtual clock."""

from __future__ import annotations

import pytest
from exchange_kit import until
from simulated_swarm import simulated_swarm

from gossip.membership.trips import LEAST_S, MOST_S, RoundTrip, stillness_s
from gossip.plans.rules import PATIENCE_S
from protocols.memory import virtual_time
from protocols.memory.transport import Link


def steady(seconds: float, count: int = 60) -> RoundTrip:
    trip = RoundTrip.first(seconds)
    for _ in range(count):
        trip.add(seconds)
    return trip


def test_a_steady_link_needs_no_more_than_its_round_trip() -> None:
    assert RoundTrip.first(0.1).longest == pytest.approx(0.3)  # RFC 6298, 2.2
    assert steady(0.1).longest == pytest.approx(0.1, rel=0.01)


def test_one_that_varies_is_given_time_and_loses_it_again() -> None:
    trip = steady(0.1)
    for seconds in (0.1, 0.5) * 10:
        trip.add(seconds)
    assert 0.5 < trip.longest < 1.3
    for _ in range(60):
        trip.add(0.1)
    assert trip.longest < 0.12


def test_an_outage_is_no_round_trip_and_a_longer_link_is_believed_after_a_few() -> None:
    trip = steady(0.01)
    trip.add(4.5)  # dark for so long
    assert stillness_s([trip], 9.0) < 1.0
    for _ in range(6):
        trip.add(0.6)  # by way of a satellite from now on
    assert trip.longest > 0.6


def test_stillness_follows_from_the_longest_way_between_two() -> None:
    assert stillness_s([], 1.5) == 1.5
    assert stillness_s([RoundTrip.first(0.3)], 1.5) == 1.5
    assert stillness_s([steady(0.001)] * 5, 9.0) == pytest.approx(3 * LEAST_S)
    trips = [steady(0.3), steady(0.01), steady(0.2)]
    assert stillness_s(trips, 9.0) == pytest.approx(3 * 0.5, rel=0.01)
    assert stillness_s([steady(60.0), steady(0.01)], 9.0) == MOST_S


@pytest.mark.parametrize(("latency", "least", "most"), [(0.01, 0.6, 0.65), (0.2, 2.3, 3.5)])
def test_a_swarm_waits_as_its_links_ask_for(latency: float, least: float, most: float) -> None:
    """A guess before much is measured, soon what the round trips say."""

    async def main() -> None:
        async with simulated_swarm(4, link=Link(latency=latency), think=(1.0, 1.0)) as swarm:
            members = list(swarm.members.values())
            chains = [member.swarm.chains[0] for member in members]
            patience: list[float] = []

            def watch() -> bool:
                plan = chains[0].exchange.plan
                if plan is not None and plan.patience_s not in patience:
                    patience.append(plan.patience_s)
                return len(members[0].replica.history) >= 12

            await until(watch, 120.0)
            assert patience[0] >= PATIENCE_S  # few measurements are not trusted
            assert least <= patience[-1] <= most
            assert not any(member.rejected for member in members)
            swarm.agree()

    virtual_time.run(main())


def test_a_dead_owner_is_replaced_sooner_where_links_are_short() -> None:
    """The stall follows from what was measured, not from a constant."""

    async def stall(latency: float) -> float:
        async with simulated_swarm(4, link=Link(latency=latency), think=(1.0, 1.0)) as swarm:
            members = list(swarm.members.values())
            await until(lambda: min(len(m.replica.history) for m in members) >= 10, 120.0)
            number = len(members[0].replica.history)
            await until(lambda: members[0].swarm.chains[0].exchange.plan is not None)
            dark, *rest = members
            swarm.network.freeze(dark.peer)
            began = await until(lambda: True)
            await until(lambda: all(len(m.replica.history) > number for m in rest))
            ended = await until(lambda: True)
            swarm.agree()
            return ended - began

    short, long = virtual_time.run(stall(0.01)), virtual_time.run(stall(0.25))
    assert short < 2.5
    assert long > short + 0.5
