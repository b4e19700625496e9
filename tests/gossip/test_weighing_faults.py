"""What goes wrong between a draft and its plan: members that stop, and members that lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from exchange_kit import until
from simulated_swarm import Member, SimulatedSwarm, lengths, simulated_swarm
from weighing_kit import MIX

from gossip.chain.chain import Chain
from gossip.exchange.exchange import Exchange
from gossip.plans.commitments import packed
from gossip.plans.weighing import sign_gram, triangle, unpack
from gossip.rounds.instructions import Broadcast, Instruction
from gossip.rounds.round import Round
from protocols.identity import PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import Link
from protocols.messages import Gram, Plan

pytestmark = pytest.mark.usefixtures("remembered_signatures")

STALL_S = 9.0  # silence is noticed, a new leader asks for promises, slices are sent again


@dataclasses.dataclass
class Trap:
    """Strikes one member of the given role at the given moment, once it is armed."""

    swarm: SimulatedSwarm
    role: str  # "leader" or "owner"
    moment: str
    strike: Callable[[Member], None]
    armed: bool = False
    victim: Member | None = None

    def spring(self, at: Chain, moment: str, plan: Plan) -> bool:
        leads = plan.leader == at.me
        if not self.armed or moment != self.moment or leads != (self.role == "leader"):
            return False
        self.armed = False
        self.victim = self.swarm.members[at.me]
        self.strike(self.victim)
        return True


@pytest.fixture
def trapped(monkeypatch: pytest.MonkeyPatch) -> list[Trap]:
    """A list for one trap; the moments of the weighing tell it when they come."""
    traps: list[Trap] = []
    weighed, work = Chain.weighed, Exchange.work

    def on_weighed(self: Chain, gram: Gram) -> None:
        plan = self.exchange.plan
        assert plan is not None
        if traps and traps[0].spring(self, "its products are known", plan):
            return
        weighed(self, gram)
        if traps:
            traps[0].spring(self, "its products are sent", plan)

    def on_work(self: Exchange, plan: Plan) -> None:
        at = self.listener
        assert isinstance(at, Chain)
        moment = "the draft is there" if plan.draft else "the plan is there"
        if not (traps and traps[0].spring(at, moment, plan)):
            work(self, plan)

    monkeypatch.setattr(Chain, "weighed", on_weighed)
    monkeypatch.setattr(Exchange, "work", on_work)
    return traps


MOMENTS = [
    "the draft is there",
    "its products are known",
    "its products are sent",
    "the plan is there",
]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("role", ["leader", "owner"])
@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_one_stops_while_contributions_are_weighed(
    trapped: list[Trap], fault: str, role: str, moment: str
) -> None:
    async def main() -> None:
        async with simulated_swarm(4, mix=MIX, think=(0.4, 0.45)) as swarm:
            network = swarm.network
            strike = network.kill if fault == "kill" else network.freeze
            trap = Trap(swarm, role, moment, lambda member: strike(member.peer))
            trapped.append(trap)
            await until(lambda: min(lengths(swarm.living())) >= 2, 10.0)
            trap.armed = True
            await until(lambda: trap.victim is not None, 10.0)
            victim = trap.victim
            assert victim is not None
            others = [member for member in swarm.living() if member is not victim]
            if fault == "kill":
                await swarm.kill(victim)
            before = max(len(member.replica.history) for member in others)
            await until(lambda: min(lengths(others)) > before, STALL_S)
            swarm.agree()
            await until(lambda: min(lengths(others)) > before + 2, 15.0)
            if fault == "freeze":
                network.thaw(victim.peer)
            else:
                swarm.restart(victim)
            there = min(lengths(others)) + 2
            await until(lambda: min(lengths(swarm.living())) >= there, 40.0)
            swarm.agree()
            assert all(c.epoch == 0 for m in others for c in m.replica.certificates)

    virtual_time.run(main())


def test_a_liar_s_products_are_refused_and_its_part_goes_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever claims what no vectors have is passed over like one that says nothing."""
    weighed = Chain.weighed
    liar: list[PeerId] = []

    def lie(self: Chain, gram: Gram) -> None:
        if self.me in liar:
            products = unpack(gram.products, len(gram.present))
            products.diagonal().mul_(1e9)
            claim = dataclasses.replace(gram, products=packed(triangle(products)), signature=b"")
            gram = sign_gram(self.wiring.identity, self.wiring.run, claim)
        weighed(self, gram)

    monkeypatch.setattr(Chain, "weighed", lie)

    async def main() -> None:
        async with simulated_swarm(4, mix=MIX, think=(0.4, 0.45)) as swarm:
            await until(lambda: min(lengths(swarm.living())) >= 2, 10.0)
            liar.append(swarm.living()[0].peer)
            others = swarm.living()[1:]
            before = min(lengths(others))
            await until(lambda: min(lengths(others)) >= before + 2, 60.0)
            swarm.agree()
            told = [(p, why) for member in others for p, why in member.rejected]
            assert any(peer == liar[0] and "announced norms" in why for peer, why in told)
            assert all(c.epoch == 0 for m in others for c in m.replica.certificates)

    virtual_time.run(main())


@pytest.mark.parametrize("present", ["nobody", "itself"])
@pytest.mark.parametrize("size", [20_000, 200_000], ids=["one owner", "all own a part"])
def test_an_owner_that_says_that_no_slice_came_does_not_have_the_round_to_itself(
    monkeypatch: pytest.MonkeyPatch, size: int, present: str
) -> None:
    """What is missing in one part counts in none; so it could void every round, or be it alone."""
    weighed = Chain.weighed
    liar: list[PeerId] = []
    lies: list[int] = []  # in which rounds

    def lie(self: Chain, gram: Gram) -> None:
        plan = self.exchange.plan
        assert plan is not None
        if self.me in liar and plan.leader != self.me:
            names = [plan.contributors[index].peer for index in gram.present]
            at = [names.index(self.me)] if present == "itself" and self.me in names else []
            products = unpack(gram.products, len(names))[at][:, at]
            claim = dataclasses.replace(
                gram,
                present=tuple(gram.present[index] for index in at),
                roots=tuple(gram.roots[index] for index in at),
                signatures=tuple(gram.signatures[index] for index in at),
                products=packed(triangle(products)),
                signature=b"",
            )
            gram = sign_gram(self.wiring.identity, self.wiring.run, claim)
            lies.append(gram.round)
        weighed(self, gram)

    monkeypatch.setattr(Chain, "weighed", lie)

    async def main() -> None:
        async with simulated_swarm(5, size=size, mix=MIX, think=(0.4, 0.45)) as swarm:
            await until(lambda: min(lengths(swarm.living())) >= 2, 10.0)
            honest = swarm.living()[0].replica
            owner = next(part.owner for part in honest.certificates[-1].outcome.parts)
            liar.append(owner)
            await until(lambda: len(lies) > 0, 60.0)
            others = [member for member in swarm.living() if member.peer != owner]
            await until(lambda: min(lengths(others)) > lies[0] + 1, 30.0)
            swarm.agree()
            for certificate in others[0].replica.certificates:
                honest_ones = [c for c in certificate.outcome.contributors if c.peer != owner]
                assert len(honest_ones) > 1
                assert all(c.scale > 0.5 for c in honest_ones)
            assert all(c.epoch == 0 for c in others[0].replica.certificates)

    virtual_time.run(main())


def test_a_leader_that_makes_scales_up_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Round._propose
    liar: list[PeerId] = []

    def favour_itself(self: Round, plan: Plan, now: float) -> list[Instruction]:
        if plan.draft or self.me not in liar:
            return honest(self, plan, now)
        contributors = tuple(
            dataclasses.replace(c, scale=float(c.peer == self.me)) for c in plan.contributors
        )
        lie = dataclasses.replace(plan, contributors=contributors)
        return [Broadcast(tuple(peer for peer in plan.roster if peer != self.me), lie)]

    monkeypatch.setattr(Round, "_propose", favour_itself)

    async def main() -> None:
        async with simulated_swarm(4, mix=MIX, think=(0.4, 0.45)) as swarm:
            await until(lambda: min(lengths(swarm.living())) >= 2, 10.0)
            liar.append(swarm.living()[0].peer)
            others = swarm.living()[1:]
            await until(
                lambda: any(p == liar[0] and "follow" in w for m in others for p, w in m.rejected),
                60.0,
            )
            before = min(lengths(others))
            await until(lambda: min(lengths(others)) >= before + 2, 60.0)
            swarm.agree()
            for member in others:
                for certificate in member.replica.certificates:
                    scales = {c.peer: c.scale for c in certificate.outcome.contributors}
                    assert sum(scale > 0 for scale in scales.values()) > 1 or len(scales) == 1

    virtual_time.run(main())


@pytest.mark.parametrize("seed", range(3))
def test_links_that_lose_and_break(seed: int) -> None:
    async def main() -> None:
        link = Link(latency=0.02, jitter=0.02, loss=0.02, drop=0.02)
        async with simulated_swarm(4, seed=seed, mix=MIX, link=link) as swarm:
            await until(lambda: min(lengths(swarm.living())) >= 6, 60.0)
            swarm.agree()

    virtual_time.run(main())


def test_a_contributor_that_cannot_reach_one_owner() -> None:
    """Its slice is missing in one part: the round goes on all the same, with equal bits."""

    async def main() -> None:
        async with simulated_swarm(5, mix=MIX, think=(0.4, 0.45)) as swarm:
            await until(lambda: min(lengths(swarm.living())) >= 2, 10.0)
            first, second = swarm.living()[:2]
            swarm.network.set_link(first.peer, second.peer, Link(latency=0.02, drop=1.0))
            before = min(lengths(swarm.living()))
            await until(lambda: min(lengths(swarm.living())) >= before + 4, 60.0)
            swarm.agree()

    virtual_time.run(main())
