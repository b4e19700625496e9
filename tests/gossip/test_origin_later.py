"""Who is found at a place, or comes back to one, that has as many identities as it may."""

from __future__ import annotations

import asyncio

import pytest
from simulated_swarm import simulated_swarm
from strangers import MOST, Strangers

from protocols.memory import virtual_time


def test_who_is_in_office_stays_there_wherever_it_is_seen() -> None:
    """Each member has seen others first: they would fall apart over whom there is room for."""

    async def main() -> None:
        async with simulated_swarm(6) as swarm:
            await asyncio.sleep(15.0)
            presences = [member.swarm.presence for member in swarm.members.values()]
            for presence in presences:
                assert set(presence.office()) == set(swarm.members)
                presence.membership.most_from_one_place = 2
                presence.observed = lambda peer: "8.8.8.8:1"
                for peer, island in presence.membership.islands.items():
                    island.origin, island.observed = f"{peer}.example.org", False
            before = presences[0].places()[0].round
            await asyncio.sleep(35.0)
            for presence in presences:
                assert set(presence.office()) == set(swarm.members)
                assert len(presence.membership.alive(presence.wiring.now())) == 5
            rounds = [presence.places()[0].round for presence in presences]
            assert before < min(rounds)
            assert max(rounds) - min(rounds) <= 1

    virtual_time.run(main())


def test_who_leaves_office_is_one_too_many_where_it_is_seen() -> None:
    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            await asyncio.sleep(2.0)
            strangers = Strangers(swarm, next(iter(swarm.members.values())))
            assert strangers.come(2 * MOST, "", "198.51.100.*:4390", directly=False) == 2 * MOST
            office, strangers.presence.office = strangers.presence.office, lambda: strangers.at
            for number, peer in enumerate(strangers.at, 1):
                strangers.at[peer] = "8.8.8.8:1"
                _, envelope = strangers.announcement(number, "198.51.100.*:4390", sequence=2)
                strangers.presence.learn(envelope, peer)
            assert len(strangers.there) == 2 * MOST
            strangers.presence.office = office
            for peer in strangers.at:
                strangers.presence.contact(peer)
            assert len(strangers.there) == MOST

    virtual_time.run(main())


def test_who_said_farewell_comes_back_only_where_there_is_room() -> None:
    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            await asyncio.sleep(2.0)
            strangers = Strangers(swarm, next(iter(swarm.members.values())))
            for number in range(1, 3 * MOST + 1):
                assert strangers.come(1, "8.8.8.8:1") == 1
                strangers.say(number, status="leaving", sequence=2)
            assert strangers.there == []
            for number in range(1, 3 * MOST + 1):
                strangers.say(number, sequence=3)
            assert strangers.there == list(strangers.at)[:MOST]
            assert "too many identities from 8.8.8.8" in strangers.told[0]

    virtual_time.run(main())


@pytest.mark.parametrize("at_once", [True, False])
def test_who_was_silent_comes_back_only_where_there_is_room(at_once: bool) -> None:
    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            await asyncio.sleep(2.0)
            strangers = Strangers(swarm, next(iter(swarm.members.values())))
            for _ in range(4):
                assert strangers.come(MOST, "8.8.8.8:1") == MOST
                for peer in strangers.at if at_once else ():
                    strangers.presence.contact(peer)
                await asyncio.sleep(2.0)
                assert len(strangers.there) == MOST
                for _ in range(900):
                    if strangers.there:
                        await asyncio.sleep(0.07)
                if not at_once:
                    await asyncio.sleep(2.0)
            for peer in strangers.at:
                strangers.presence.contact(peer)
            await asyncio.sleep(2.0)
            assert len(strangers.there) == MOST
            # those in office come back all the same
            office = strangers.there
            strangers.presence.office = lambda: office
            await asyncio.sleep(60.0)
            assert strangers.there == []
            for number in range(1, strangers.made + 1):
                strangers.say(number, sequence=2)
            await asyncio.sleep(2.0)
            assert set(office) < set(strangers.there)
            assert len(strangers.there) == 2 * MOST

    virtual_time.run(main())


def test_who_calls_a_node_behind_a_relay_needs_no_place() -> None:
    """Such a node sees of nobody where it comes from, and names without a place cost nothing."""

    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            await asyncio.sleep(2.0)
            strangers = Strangers(swarm, next(iter(swarm.members.values())))
            strangers.presence.note(addresses=("203.0.113.1:4390",))
            assert strangers.come(2 * MOST, "", directly=False) == MOST - 1  # and the other member
            assert strangers.come(1, "") == 0
            strangers.presence.note(addresses=("relay/198.51.100.1:4390/12D3KooW",))
            assert strangers.come(1, "") == 1
            assert strangers.come(1, "", directly=False) == 0

    virtual_time.run(main())


def test_who_was_reached_on_this_machine_is_of_this_machine() -> None:
    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            await asyncio.sleep(2.0)
            strangers = Strangers(swarm, next(iter(swarm.members.values())))
            strangers.presence.note(addresses=())
            for number in range(3 * MOST):
                peer, envelope = strangers.envelope("127.0.0.1:4390")
                strangers.at[peer], strangers.found[peer] = "", "127.0.0.1:4390"
                strangers.presence.learn(envelope, None)
                assert len(strangers.there) == number + 1

    virtual_time.run(main())
