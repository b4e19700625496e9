"""A leader whose link fails in the middle of its round: whole swarms on the virtual clock.

The cells of the fault matrix (:mod:`test_fault_matrix`) in which the leader is the one, with the
same bound on how long the others may be held up, and all moments that a seed brings about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from exchange_kit import until
from simulated_swarm import Member, SimulatedSwarm, simulated_swarm

from gossip.plans.certificate import leader_order
from gossip.rounds.instructions import FollowPlan, Instruction
from gossip.rounds.round import Round
from protocols.errors import TransferStalled
from protocols.identity import PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import Link
from protocols.messages import Plan

UPLOAD = 40e6 / 8  # bytes a second, both ways
SIZE = 1_000_000  # elements, as many bytes: a third of a second
SLOWER = 20
ROUND = 4  # by then round trips are measured


@dataclass
class Scene:
    """A round whose leader something happens to, as soon as ``moment`` says so."""

    swarm: SimulatedSwarm
    harm: Callable[[SimulatedSwarm, Member], None]
    share: float  # of its bytes that the leader has sent by then
    plans: list[Plan] = field(default_factory=list)  # of that round, as they were adopted
    leader: Member | None = None
    at: float = 0.0

    def watch(self) -> None:
        """Look at the plans of all members."""
        for member in self.swarm.members.values():
            chain = member.swarm.chains[0]
            honest = chain.carry_out

            def carry_out(
                of: Round,
                instructions: list[Instruction],
                member: Member = member,
                honest: Callable[[Round, list[Instruction]], None] = honest,
            ) -> None:
                for instruction in instructions:
                    if isinstance(instruction, FollowPlan):
                        self.planned(member, instruction.plan)
                honest(of, instructions)

            chain.carry_out = carry_out  # type: ignore[method-assign]

    def planned(self, member: Member, plan: Plan) -> None:
        """A member adopts a plan."""
        if plan.round < ROUND or (self.plans and plan.round != self.plans[0].round):
            return
        self.plans.append(plan)
        if self.leader is None:
            self.leader = member
            self.swarm.group.create_task(self.strike(plan))

    async def strike(self, plan: Plan) -> None:
        """Wait for the moment, and do it."""
        assert self.leader is not None
        node = self.swarm.network.node(self.leader.peer)
        assert node is not None
        stats = node.transport.stats

        def sent() -> int:
            return sum(peer.bytes_out for peer in stats.by_peer.values())

        before = sent()
        own = sum(part.stop - part.start for part in plan.parts if part.owner == plan.leader)
        wanted = before + self.share * (SIZE - own)
        await until(lambda: sent() >= wanted or self.share == 0, 5.0, every=0.002)
        self.at = asyncio.get_running_loop().time()
        self.harm(self.swarm, self.leader)

    @property
    def bound(self) -> float:
        """The longest stall that the deadlines of the round allow, as in the matrix."""
        patience, expected = self.plans[0].patience_s, self.plans[0].expected_s
        return 2.75 * patience + 4 * expected + patience + patience + 4 * expected


async def stall(scene: Scene) -> float:
    """Let it happen; seconds until all others have applied the round. They go on after it."""
    scene.watch()
    await until(lambda: scene.at > 0, 60.0)
    others = [m for m in scene.swarm.members.values() if m is not scene.leader]
    number = scene.plans[0].round
    end = await until(lambda: min(m.replica.place.round for m in others) > number, 60.0, every=0.01)
    await until(lambda: min(m.replica.place.round for m in others) > number + 2, 60.0)
    scene.swarm.agree()
    return end - scene.at


def slow(swarm: SimulatedSwarm, member: Member) -> None:
    """Its link carries a twentieth from now on."""
    node = swarm.network.node(member.peer)
    assert node is not None
    node.upload /= SLOWER
    node.download /= SLOWER


def dark(swarm: SimulatedSwarm, member: Member) -> None:
    """Nothing passes from or to it."""
    swarm.network.freeze(member.peer)


def struck(
    harm: Callable[[SimulatedSwarm, Member], None],
    share: float,
    seed: int,
    before: Callable[[SimulatedSwarm], object] = lambda swarm: None,
) -> Scene:
    """What came of it. ``share`` of its bytes have left the leader by then."""
    found: list[Scene] = []

    async def main() -> None:
        async with simulated_swarm(
            4,
            seed=seed,
            size=SIZE,
            codec="int8",
            think=(0.75, 0.76),
            uploads=[UPLOAD] * 4,
            link=Link(latency=0.001, jitter=0.002),
        ) as swarm:
            scene = Scene(swarm, harm, share)
            found.append(scene)
            before(swarm)
            took = await stall(scene)
            assert took < scene.bound, [(p.epoch, p.ballot, p.leader) for p in scene.plans]

    virtual_time.run(main())
    return found[0]


def untold(swarm: SimulatedSwarm) -> dict[int, PeerId]:
    """Of each round from :data:`ROUND` on the last in the leading order hears nothing of its leader
    but bodies: its control messages, that is the plan, get nowhere. Who that was, by round."""
    found: dict[int, PeerId] = {}

    def deafen(member: Member) -> None:
        transport = member.swarm.wiring.transport
        honest = transport.call

        async def call(
            peer: PeerId, name: str, body: bytes, *, timeout: float, **more: Any
        ) -> bytes:
            chain = member.swarm.chains[0]
            place, roster = chain.round.place, chain.round.roster
            order = leader_order(place.run, place.fragment, place.round, roster)
            theirs = place.round >= ROUND and (member.peer, peer) == (order[0], order[-1])
            if name == "round" and theirs:
                found[place.round] = peer
                await asyncio.sleep(timeout)
                raise TransferStalled("lost")
            return await honest(peer, name, body, timeout=timeout, **more)

        transport.call = call  # type: ignore[method-assign]

    for member in swarm.members.values():
        deafen(member)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_a_leader_whose_link_gets_slow_hands_over(seed: int) -> None:
    """It sees the others fail one after the other, and does not lead plan after plan for it."""
    scene = struck(slow, 0.0, seed)
    assert scene.leader is not None
    by_it = {plan.ballot for plan in scene.plans if plan.leader == scene.leader.peer}
    assert by_it == {0}
    assert len({(plan.epoch, plan.ballot) for plan in scene.plans}) == 2


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_a_leader_that_is_dark_owns_nothing_in_the_plan_after_its_own(
    seed: int, share: float
) -> None:
    scene = struck(dark, share, seed)
    assert scene.leader is not None
    for plan in scene.plans:
        if plan.ballot > 0:
            assert all(p.owner != scene.leader.peer or p.result is not None for p in plan.parts)


@pytest.mark.parametrize("seed", range(4))
def test_who_has_not_got_the_plan_is_handed_it_and_takes_part(seed: int) -> None:
    """The leader ends with its plan at some of the others: nobody else is taken out for that."""
    told: dict[int, PeerId] = {}

    def deafen(swarm: SimulatedSwarm) -> None:
        nonlocal told
        told = untold(swarm)

    scene = struck(dark, 0.5, seed, deafen)
    assert scene.leader is not None
    last = told[scene.plans[0].round]
    active = {c.peer for c in scene.plans[0].contributors if c.active}
    for plan in scene.plans:
        gone = active - {c.peer for c in plan.contributors if c.active}
        assert gone <= {scene.leader.peer}, plan.ballot
        assert last in {part.owner for part in plan.parts}


def test_a_plan_that_gets_lost_on_its_way_to_one_costs_no_second_one() -> None:
    scene = struck(lambda swarm, member: None, 0.0, 1, untold)
    assert {(plan.epoch, plan.ballot) for plan in scene.plans} == {(0, 0)}
    assert len(scene.plans) == 4
