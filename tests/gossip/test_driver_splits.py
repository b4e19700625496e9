"""Swarms that fall apart and meet again, on the simulated network: the heavier chain leads."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest
from exchange_kit import until
from simulated_swarm import Member, lengths, simulated_swarm

from gossip.catchup.replay import Ending
from node.errors import OperatorError, operator_error
from protocols.identity import PeerId
from protocols.memory import virtual_time

pytestmark = pytest.mark.usefixtures("remembered_signatures")


def heads(members: list[Member]) -> list[list[bytes]]:
    return [[head for head, _ in m.replica.history] for m in members]


def test_a_minority_that_was_cut_off_ends_on_the_majoritys_chain() -> None:
    async def main() -> None:
        async with simulated_swarm(5) as swarm:
            await asyncio.sleep(4.0)
            members = list(swarm.members.values())
            many, few = members[:3], members[3:]
            swarm.network.partition({m.peer for m in many}, {m.peer for m in few})
            await asyncio.sleep(15.0)  # long enough to take each other for dead
            before = [len(m.replica.history) for m in members]
            assert min(before[:3]) > max(before[3:]) + 8
            swarm.network.heal()
            await asyncio.sleep(12.0)
            swarm.agree()
            lengths = [len(m.replica.history) for m in members]
            assert min(lengths) > max(before)
            assert max(lengths) - min(lengths) <= 1
            newest = members[0].swarm.chains[0].ledger.newest()
            assert newest is not None
            assert len(newest.outcome.next_roster) == 5
            assert not any(m.behind for m in members)

    virtual_time.run(main())


def test_two_halves_both_go_on_and_the_lighter_one_finds_out() -> None:
    async def main() -> None:
        async with simulated_swarm(4) as swarm:
            await asyncio.sleep(4.0)
            members = list(swarm.members.values())
            heavy, light = members[:2], members[2:]
            for member in light:
                swarm.tokens[member.peer] = 500
            swarm.network.partition({m.peer for m in heavy}, {m.peer for m in light})
            await asyncio.sleep(15.0)
            swarm.network.heal()
            for side in (heavy, light):  # no member ever left its side's chain
                chains = sorted(heads(side), key=len)
                assert chains[0] == chains[1][: len(chains[0])]
                assert len(chains[0]) > 10
            assert not set(heads(heavy)[0][-5:]) & set(heads(light)[0])
            assert heavy[0].replica.place.work > light[0].replica.place.work
            await asyncio.sleep(10.0)
            assert all("FORKED" in m.behind for m in light)
            assert not any(m.behind for m in heavy)

    virtual_time.run(main())


def test_a_side_that_cannot_be_left_goes_on() -> None:
    async def main() -> None:
        async with simulated_swarm(4) as swarm:
            await asyncio.sleep(4.0)
            members = list(swarm.members.values())
            heavy, light = members[:2], members[2:]
            for member in light:
                swarm.tokens[member.peer] = 500
            failed: list[PeerId] = []

            async def download(member: Member, fragment: int, ending: Ending) -> None:
                following = member.swarm.chains[fragment].following
                if following.approach.downloading:
                    return
                with suppress(OperatorError), following.downloading():
                    await asyncio.sleep(20.0)
                    failed.append(member.peer)
                    raise operator_error("E206")

            swarm.on_behind = download
            swarm.network.partition({m.peer for m in heavy}, {m.peer for m in light})
            await asyncio.sleep(15.0)
            swarm.network.heal()
            await until(lambda: all(m.swarm.chains[0].following.changes_sides for m in light), 5.0)
            before = [lengths(light), lengths(heavy)]
            await asyncio.sleep(10.0)
            assert lengths(light) == before[0]  # it decides nothing of its own meanwhile
            assert min(lengths(heavy)) > max(before[1]) + 5
            await until(lambda: set(failed) == {m.peer for m in light}, 15.0)
            await until(lambda: min(lengths(light)) > max(before[0]) + 5, 20.0)

    virtual_time.run(main())


def test_a_lighter_side_with_more_rounds_finds_out() -> None:
    async def main() -> None:
        async with simulated_swarm(4) as swarm:
            await asyncio.sleep(3.0)
            *many, one = swarm.members.values()
            swarm.tokens[one.peer], swarm.hurry[one.peer] = 100, 4.0
            swarm.network.partition({m.peer for m in many}, {one.peer})
            for member in many:
                swarm.hurry[member.peer] = 0.2
            await asyncio.sleep(45.0)
            assert one.replica.place.round > many[0].replica.place.round
            assert one.replica.place.work < many[0].replica.place.work
            swarm.network.heal()
            await asyncio.sleep(12.0)
            assert "FORKED" in one.behind
            assert not any(m.behind for m in many)
            chains = sorted(heads(many), key=len)
            assert chains[0] == chains[-1][: len(chains[0])]

    virtual_time.run(main())


def test_the_heavier_chain_leads_not_the_longer_one() -> None:
    async def main() -> None:
        async with simulated_swarm(2, think=(1.0, 1.1)) as swarm:
            await asyncio.sleep(4.0)
            mine, other = (m.swarm.chains[0] for m in swarm.members.values())
            here = mine.replica.place

            def ahead(**changes: object) -> bool:
                return mine.following.is_ahead(
                    replace(
                        other.status,
                        **{  # type: ignore[arg-type]
                            "status": "active",
                            "round": here.round,
                            "work": here.work,
                            "head": here.previous,
                            **changes,
                        },
                    )
                )

            assert not ahead()
            assert ahead(work=here.work + 1, round=here.round - 3, head=b"x" * 32)
            assert not ahead(work=here.work - 1, round=here.round + 30, head=b"x" * 32)
            assert ahead(work=here.work + 1, round=here.round + 1, head=b"x" * 32)
            assert ahead(round=here.round + 1, head=b"x" * 32)
            assert ahead(head=b"\xff" * 32)
            assert not ahead(head=b"\x00" * 32)

    virtual_time.run(main())
