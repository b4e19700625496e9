"""Members that lie, or die two at a time: whole swarms on the virtual clock."""

from __future__ import annotations

import asyncio

import pytest
from exchange_kit import until
from simulated_swarm import Member, contributes, lengths, simulated_swarm

from gossip.membership.members import Liveness
from gossip.plans.certificate import leader_order, sign_vote
from gossip.rounds.instructions import FollowPlan, Instruction, Send
from gossip.rounds.round import Round
from protocols.memory import virtual_time
from protocols.messages import Vote


def lie(member: Member) -> None:
    """From now on it votes for what it has not got, and then as the others do, to everybody."""
    chain, honest = member.swarm.chains[0], member.swarm.chains[0].carry_out

    def carry_out(of: Round, instructions: list[Instruction]) -> None:
        place, others = of.place, [peer for peer in of.roster if peer != member.peer]
        votes = []
        for instruction in instructions:
            if isinstance(instruction, FollowPlan):
                at = (place.run, place.fragment, place.round, place.previous)
                ballot = (instruction.plan.epoch, instruction.plan.ballot)
                votes.append(sign_vote(member.identity, *at, ballot, b"x" * 32))
            elif isinstance(instruction, Send) and isinstance(instruction.message, Vote):
                votes.append(instruction.message)
        for vote in votes:
            for peer in others:
                chain.sending.tell(of, (peer,), vote)
        honest(of, instructions)

    chain.carry_out = carry_out  # type: ignore[method-assign]


def test_who_votes_for_two_outcomes_is_named_and_left_out() -> None:
    async def main() -> None:
        async with simulated_swarm(4) as swarm:
            members = list(swarm.members.values())
            liar, *honest = members
            await until(lambda: min(lengths(members)) >= 3, 30.0)
            lie(liar)
            await until(
                lambda: all(
                    any(who == liar.peer and "two outcomes" in why for who, why in one.rejected)
                    for one in honest
                ),
                30.0,
            )
            begun = max(lengths(honest))
            await until(lambda: min(lengths(honest)) >= begun + 6, 30.0)
            now = asyncio.get_running_loop().time()
            for one in honest:
                view = one.swarm.presence.membership
                assert view.liveness(liar.peer, now) is Liveness.DEAD
                assert liar.peer not in one.replica.roster
                assert not contributes(liar, one, begun + 2)
                assert not {who for who, _ in one.rejected} & {other.peer for other in honest}
            swarm.agree()

    virtual_time.run(main())


@pytest.mark.parametrize("after", [0.0, 0.03, 0.08, 0.2, 0.5])
def test_the_leader_and_an_owner_die_at_once(after: float) -> None:
    """Two of five, so many seconds after the round's plan: the others commit it, and go on."""

    async def main() -> None:
        async with simulated_swarm(5, size=400_000, codec="int8") as swarm:
            members = list(swarm.members.values())
            await until(lambda: min(lengths(members)) >= 4, 30.0)
            chain = members[0].swarm.chains[0]
            number = chain.round.place.round
            await until(
                lambda: (
                    chain.round.place.round > number
                    and (plan := chain.exchange.plan) is not None
                    and plan.ballot == 0
                ),
                30.0,
            )
            await asyncio.sleep(after)
            place, roster = chain.round.place, chain.round.roster
            order = leader_order(place.run, place.fragment, place.round, roster)
            dying = [swarm.members[order[0]], swarm.members[order[2]]]
            survivors = [member for member in members if member not in dying]
            at = asyncio.get_running_loop().time()
            for member in dying:
                await swarm.kill(member)
            begun = max(lengths(survivors))
            end = await until(lambda: min(lengths(survivors)) > begun, 30.0)
            assert end - at < 8.0
            await until(lambda: min(lengths(survivors)) >= begun + 5, 30.0)
            left = {member.peer for member in survivors}
            await until(lambda: set(survivors[0].replica.roster) == left, 20.0)
            swarm.agree()

    virtual_time.run(main())
