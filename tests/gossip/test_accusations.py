"""Accusations of an owner: those that are false speak against who makes them, and cost little."""

from __future__ import annotations

import asyncio

import pytest
from exchange_kit import until
from simulated_swarm import Member, expelled, lengths, simulated_swarm
from toy_replica import RUN
from weighing_kit import MIX

from protocols.bodies import read_into
from protocols.errors import RemoteRefused
from protocols.identity import Identity
from protocols.memory import virtual_time
from protocols.messages import Accusation, EvidenceRequest

pytestmark = pytest.mark.usefixtures("remembered_signatures")


@pytest.mark.parametrize("shown", [False, True], ids=["without evidence", "with evidence"])
def test_a_false_accusation_speaks_against_who_makes_it(shown: bool) -> None:
    async def main() -> None:
        async with simulated_swarm(4, mix=MIX, think=(0.4, 0.45)) as swarm:
            await until(lambda: min(lengths(swarm.living())) >= 3, 10.0)
            outcome = swarm.living()[0].replica.certificates[-1].outcome
            part = outcome.parts[0]
            owner = swarm.members[part.owner]
            other, accuser = [m for m in swarm.living() if m is not owner][:2]
            if shown:
                accuser = owner  # that what it did itself is wrong: nobody else has the evidence
            said = Accusation(0, outcome.round, part.start, part.stop, 0)
            transport = accuser.swarm.wiring.transport
            with pytest.raises(RemoteRefused, match="is not true" if shown else "without"):
                await transport.call(other.peer, "accuse", said.encode(), timeout=10.0)
            assert accuser.peer in {peer for peer, _ in other.rejected}
            assert not expelled(other)

    virtual_time.run(main())


def test_accusations_of_one_member_are_judged_one_at_a_time() -> None:
    """The evidence of each has room here before any of it has come."""

    async def main() -> None:
        async with simulated_swarm(4, mix=MIX, think=(0.4, 0.45)) as swarm:
            await until(lambda: min(lengths(swarm.living())) >= 3, 10.0)
            other, *accusers = swarm.living()

            async def accuse(accuser: Member) -> str:
                outcome = other.replica.certificates[-1].outcome
                part = next(part for part in outcome.parts if part.owner != accuser.peer)
                said = Accusation(0, outcome.round, part.start, part.stop, 0)
                transport = accuser.swarm.wiring.transport
                with pytest.raises(RemoteRefused) as refused:
                    await transport.call(other.peer, "accuse", said.encode(), timeout=10.0)
                return refused.value.code

            first, second = accusers[:2]
            found = await asyncio.gather(*(accuse(one) for one in (first, first, first, second)))
            assert found == ["protocol", "busy", "busy", "protocol"]
            assert await accuse(first) == "protocol", "it is judged once the one before is"

    virtual_time.run(main())


def test_who_was_not_in_a_round_sees_nothing_of_it_and_accuses_nobody() -> None:
    """Evidence is as large as what came in a round, and looking at it is work."""

    async def main() -> None:
        async with simulated_swarm(4, mix=MIX, think=(0.4, 0.45)) as swarm:
            await until(lambda: min(lengths(swarm.living())) >= 3, 10.0)
            stranger = swarm.network.join(Identity.from_seed(b"s" * 32).peer_id)
            outcome = swarm.living()[0].replica.certificates[-1].outcome
            part = outcome.parts[0]
            other = next(member for member in swarm.living() if member.peer != part.owner)
            where = (0, outcome.round, part.start, part.stop, 0)
            asked = EvidenceRequest(RUN, *where).encode()
            with pytest.raises(RemoteRefused, match="stranger"):
                async with stranger.pull(
                    part.owner, "evidence", asked, max_length=10**7, timeout=5.0
                ) as incoming:
                    await read_into(incoming, bytearray(1))
            said = Accusation(*where).encode()
            with pytest.raises(RemoteRefused, match="stranger"):
                await stranger.call(other.peer, "accuse", said, timeout=5.0)

    virtual_time.run(main())
