"""What somebody who is not in office can have the members of a round do."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest
from exchange_kit import until
from simulated_swarm import Member, SimulatedSwarm, simulated_swarm
from toy_replica import RUN

from gossip.chain.sending import NOTES
from gossip.plans.certificate import sign_vote
from gossip.rounds.spreading import check_passed, passed
from protocols.errors import RemoteProtocolError, RemoteRefused
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import MemoryTransport
from protocols.messages import Passed, Plan, PlanRequest, Votes
from protocols.wire import decode_any

STRANGER = Identity.from_seed(b"s" * 32)


def passed_on(swarm: SimulatedSwarm) -> list[tuple[PeerId, PeerId]]:
    """Notes that go from hand to hand from now on: from whom, to whom."""
    found: list[tuple[PeerId, PeerId]] = []

    def tap(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
        if name == "round" and data and isinstance(_decoded(data), Passed):
            found.append((sender, receiver))
        return data

    swarm.network.tamper = tap
    return found


def _decoded(data: bytes) -> object:
    try:
        return decode_any(data, Passed)
    except Exception:  # noqa: BLE001  # any other message
        return None


async def said_by(swarm: SimulatedSwarm, author: Identity, round_: int) -> None:
    """A note of ``author`` to the first member, for all others."""
    first, *others = swarm.living()
    note = passed(author, RUN, Votes(0, round_, bytes(32), 0, 0, bytes(32), ()))
    told = Passed(
        note.fragment,
        note.round,
        note.author,
        tuple(member.peer for member in others),
        note.body,
        note.signature,
    )
    transport = swarm.network.join(author.peer_id)
    await transport.call(first.peer, "round", told.encode(), timeout=5.0)


@pytest.mark.parametrize("round_", [0, 1])
def test_nothing_of_a_stranger_is_passed_on(round_: int) -> None:
    async def main() -> None:
        async with simulated_swarm(4, think=(30.0, 31.0)) as swarm:
            await asyncio.sleep(0.5)
            found = passed_on(swarm)
            with pytest.raises(RemoteRefused, match="stranger"):
                await said_by(swarm, STRANGER, round_)
            await asyncio.sleep(6.0)
            assert found == [(STRANGER.peer_id, swarm.living()[0].peer)]

    virtual_time.run(main())


@pytest.mark.parametrize("there", [False, True])
def test_a_stranger_is_not_asked_for_its_plan(there: bool) -> None:
    """Its votes speak of plans that nobody knows; ``there``: of the round under way."""

    async def main() -> None:
        async with simulated_swarm(4, think=(30.0, 31.0)) as swarm:
            await asyncio.sleep(0.5)
            first, asked = swarm.living()[0], list[PeerId]()

            def tap(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
                if name == "plan":
                    asked.append(receiver)
                return data

            swarm.network.tamper = tap
            transport = swarm.network.join(STRANGER.peer_id)
            place = first.replica.place
            previous = place.previous if there else b"x" * 32
            at = (RUN, 0, place.round, previous)
            vote = sign_vote(STRANGER, *at, (0, 7), b"o" * 32)
            with pytest.raises(RemoteRefused):
                await transport.call(first.peer, "round", vote.encode(), timeout=5.0)
            await asyncio.sleep(3.0)
            assert asked == []

    virtual_time.run(main())


def test_plans_are_handed_to_members_alone_and_only_that_of_the_round() -> None:
    async def main() -> None:
        async with simulated_swarm(4) as swarm:
            first, second, *_ = swarm.living()
            chain = first.swarm.chains[0]
            await until(lambda: chain.round.place.round >= 2 and chain.under_way, 30.0, every=0.01)
            plan, number = chain.round.agreement.plan, chain.round.place.round
            assert plan is not None

            async def asked(transport: MemoryTransport, round_: int) -> bytes:
                request = PlanRequest(0, round_).encode()
                return await transport.call(first.peer, "plan", request, timeout=1.0)

            member = swarm.network.node(second.peer)
            assert member is not None
            note: Passed = Passed.decode(await asked(member.transport, number))
            assert note.author == plan.leader
            assert Plan.decode(note.body) == plan
            check_passed(RUN, note)
            with pytest.raises(RemoteRefused, match="unknown"):
                await asked(member.transport, number + 1)
            with pytest.raises(RemoteRefused, match="stranger"):
                await asked(swarm.network.join(STRANGER.peer_id), number)

    virtual_time.run(main())


def test_what_one_member_has_others_pass_on_is_bounded() -> None:
    """In notes and in those told; beyond that it is refused, so that its author tells them."""

    async def main() -> None:
        async with simulated_swarm(24, size=40_000, think=(30.0, 31.0)) as swarm:
            await asyncio.sleep(1.0)
            here, liar, *others = swarm.living()
            found = passed_on(swarm)

            async def said(number: int, to: list[Member]) -> None:
                votes = Votes(0, 0, bytes(32), 0, number, bytes(32), ())
                note = replace(passed(liar.identity, RUN, votes), to=tuple(m.peer for m in to))
                node = swarm.network.node(liar.peer)
                assert node is not None
                await node.transport.call(here.peer, "round", note.encode(), timeout=5.0)

            with pytest.raises(RemoteRefused, match="more than is passed on"):
                await said(0, others)
            for number in range(NOTES + 4):
                for _ in range(3):
                    with contextlib.suppress(RemoteProtocolError, RemoteRefused):
                        await said(number, others[:2])
            await asyncio.sleep(6.0)
            assert sum(sender == here.peer for sender, _ in found) == 2 * NOTES

    virtual_time.run(main())
