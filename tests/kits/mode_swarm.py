"""Islands of any mode in real rounds, on the simulated network and in virtual time.

The replicas and the rules are those that ``node start`` makes; only trainers are played. Each
island goes down a bowl of its own, so that all together go to the mean of their goals.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from exchange_kit import until
from simulated_swarm import Member, SimulatedSwarm
from toy_replica import RUN, ToyReplica

from bootstrap.manifest import Manifest
from bootstrap.state import state_digest
from diloco.lowrank import Plan
from gossip.catchup.lineage import Lineage
from gossip.chain.chain import Chain
from gossip.membership.members import Patience
from gossip.place import Place
from gossip.plans.certificate import genesis
from node.replicas.eager_state import EagerReplica
from node.replicas.gradient_state import GradientReplica
from node.replicas.lowrank_state import LowRankReplica
from node.replicas.replica import ChainStanding, OuterReplica
from node.run_rules import REPLICAS, rules_of
from protocols.codecs import RangeCodec
from protocols.identity import Identity, PeerId
from protocols.memory.transport import Link, MemoryNetwork

SHAPES = [(0, (96, 20)), (1920, (20, 60)), (3120, (80,))]
DENSE, SIZE = 3120, 3200  # of a fragment
INNER_STEPS, RATE = 5, 0.05
CONSTANT = {"warmup_steps": 0, "schedule": "constant", "weight_decay": 0.0, "lr": 0.05}


class Plain:
    """Vectors that nobody shares."""

    def __init__(self, size: int) -> None:
        self._both = torch.zeros(size), torch.zeros(size)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._both


@dataclass
class Saved:
    """A checkpoint of one fragment."""

    state: ChainStanding
    vectors: list[torch.Tensor]
    residual: torch.Tensor | None
    theta: torch.Tensor


@dataclass
class Walker:
    """The trainer of one fragment at one island: it goes towards ``goal``."""

    replica: OuterReplica
    goal: torch.Tensor
    seen: dict[tuple[int, int], tuple[bytes, bytes]]  # head and state by place, of all islands
    theta: torch.Tensor = field(init=False)
    out: int | None = None  # the round of a snapshot that is not answered
    contributed: int = 0
    late: int = 0  # snapshots with work that the others took rounds without
    saved: Saved = field(init=False)
    lineage: Lineage | None = None  # of its chain

    def __post_init__(self) -> None:
        self.theta = self.replica.base.clone()
        self.replica.trainer = self

    async def hold(self) -> int | None:
        return self.out

    async def release(self, *, contributed: bool, reset: bool) -> None:
        one = self.replica
        place = one.place
        fact = place.previous, place.state
        assert self.seen.setdefault((place.fragment, place.round), fact) == fact, place
        assert state_digest(one.state)[0] == place.state
        lost = reset or isinstance(one, GradientReplica)
        if one.voids:
            one.sent.copy_(torch.where(one.sent.isnan(), self.theta, one.sent))
        self.theta = one.base.clone() if lost else one.base + (self.theta - one.sent)
        self.out, self.contributed = None, self.contributed + contributed
        self.save()

    def late_s(self) -> float:
        return 0.0

    def save(self) -> None:
        one = self.replica
        self.saved = Saved(
            ChainStanding(one.place, one.roster, one.certificate, cast(Lineage, self.lineage)),
            [vector.clone() for vector in one.state],
            one.residual.values.clone() if one.residual is not None else None,
            self.theta.clone(),
        )

    async def snapshot(self) -> float:
        """Train, and leave what there is now; returns the norm of what is to be sent."""
        one = self.replica
        if isinstance(one, GradientReplica):
            one.sent.copy_(one.base - self.goal)
        else:
            if one.turning is not None:
                one.turning.train()
            for _ in range(INNER_STEPS):
                self.theta += RATE * (self.goal - self.theta)
            one.sent.copy_(self.theta)
        self.out = one.place.round
        norm = one.norm()
        self.late += one.turning is not None and one.turning.gone >= 1
        if isinstance(one, EagerReplica):
            await one.aim()
            self.theta += one.sent
            await one.arrived()
        return norm


@dataclass
class ModeSwarm(SimulatedSwarm):
    """As :class:`SimulatedSwarm`, with the replicas of a run's mode."""

    manifest: Manifest = field(default_factory=Manifest)
    goals: dict[PeerId, torch.Tensor] = field(default_factory=dict)
    common: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # what goals share
    walkers: dict[PeerId, list[Walker]] = field(default_factory=dict)  # by fragment
    seen: dict[tuple[int, int], tuple[bytes, bytes]] = field(default_factory=dict)

    # --- islands

    async def first(self, identity: Identity) -> Member:
        """One that is there from the beginning."""
        return self._start(identity, [await self._new(identity.peer_id, f) for f in self._all()])

    async def join(self, identity: Identity) -> Member:
        """One that downloads the state of whoever is furthest."""
        donor = max(self.living(), key=lambda m: self.walkers[m.peer][0].replica.place.round)
        made = []
        async with donor.swarm.still():
            for fragment in self._all():
                source = self.walkers[donor.peer][fragment].saved
                made.append(await self._new(identity.peer_id, fragment, source))
        return self._start(identity, made, status="joining", new_identity=True)

    async def again(self, member: Member) -> Member:
        """A killed one, from its checkpoint of the last round."""
        old = [walker.saved for walker in self.walkers[member.peer]]
        made = [await self._new(member.peer, f, old[f], own=True) for f in self._all()]
        return self._start(member.identity, made, status="joining")

    def _all(self) -> range:
        return range(self.manifest.rounds.fragments)

    def _start(self, identity: Identity, made: list[Walker], **how: Any) -> Member:
        self.walkers[identity.peer_id] = made
        for walker in made:
            walker.replica.lineage = walker.lineage  # type: ignore[attr-defined]
        replicas = cast(list[ToyReplica], [walker.replica for walker in made])
        member = self.start(identity, replicas=replicas, **how)
        for walker in made:
            walker.lineage = walker.replica.lineage  # type: ignore[attr-defined]
            walker.save()
        return member

    async def _new(
        self, peer: PeerId, fragment: int, source: Saved | None = None, *, own: bool = False
    ) -> Walker:
        if peer not in self.goals:
            generator = torch.Generator().manual_seed(len(self.goals))
            self.goals[peer] = self.common + 0.2 * torch.randn(SIZE, generator=generator)

        async def offload(work: Callable[[], Any]) -> Any:
            await asyncio.sleep(0)
            return work()

        kind: Callable[..., OuterReplica] = REPLICAS.get(self.manifest.mode, OuterReplica)
        options: dict[str, Any] = {}
        if self.manifest.outer.optimizer == "powersgd":
            kind, options = LowRankReplica, {"plan": Plan.of(SHAPES, self.manifest.outer.rank)}
        codec = RangeCodec(self.manifest.rounds.allowed_codecs[0], DENSE)
        one = kind(
            self.manifest, peer, Plain(SIZE), codec, offload, self.roster, fragment, **options
        )
        one.residual = one.new_residual()
        one._place = Place(RUN, fragment, 0, genesis(RUN), b"", 0)
        walker = Walker(one, self.goals[peer], self.seen)
        if source is None:
            await one.settle()
            return walker
        for mine, theirs in zip(one.state, source.vectors, strict=True):
            mine.copy_(theirs)
        walker.theta = one.base.clone()
        if own:
            walker.theta, one.inherited = source.theta.clone(), True
            if one.residual is not None and source.residual is not None:
                one.residual.values.copy_(source.residual)
        text = source.state.lineage.encode()
        walker.lineage = Lineage.decode(RUN, self.roster, text, fragment)
        await one.settle(source.state)
        assert one.place.state == source.state.place.state
        return walker

    async def _train(self, chain: Chain, replica: ToyReplica, moved: asyncio.Event) -> None:
        walker = self.walkers[chain.me][chain.fragment]
        while True:
            think = self.random.uniform(*self.think) / self.hurry.get(chain.me, 1.0)
            chain.update(eta=think, ready=False)
            await asyncio.sleep(think)
            round_ = replica.place.round  # what is learnt late is for the round that there is
            norm = await walker.snapshot()
            tokens = self.tokens.get(chain.me, 1000)
            chain.update(
                ready=True, tokens=tokens, steps=10, weight=float(tokens), eta=0.0, norm=norm
            )
            while replica.place.round == round_:
                moved.clear()
                await moved.wait()

    # --- what is looked at

    def round_of(self, member: Member, fragment: int = 0) -> int:
        return self.walkers[member.peer][fragment].replica.place.round

    def rounds(self) -> list[int]:
        """Of all fragments of all who live."""
        return [self.round_of(m, f) for m in self.living() for f in self._all()]

    def far(self, member: Member) -> float:
        """How far the common parameters are from what goals share, of how far they were at first.

        The mean over fragments.
        """
        found = [(w.replica.base - self.common).norm() for w in self.walkers[member.peer]]
        return (torch.stack(found).mean() / self.common.norm()).item()

    async def go_on_by(self, rounds: int, seconds: float = 240.0) -> None:
        """Until everybody who lives has come through so many rounds more."""
        goal = max(self.rounds()) + rounds
        await until(lambda: min(self.rounds()) >= goal, seconds)


@asynccontextmanager
async def mode_swarm(
    given: dict[str, Any], count: int = 4, *, seed: int = 0, think: tuple[float, float] = (0.3, 0.6)
) -> AsyncIterator[ModeSwarm]:
    """``count`` islands of a run; all are stopped at the end."""
    manifest = Manifest.model_validate(given)
    identities = [Identity.from_seed((i + 1).to_bytes(32, "big")) for i in range(count)]
    network = MemoryNetwork(seed, link=Link(latency=0.02), upload=12.5e6, download=12.5e6)
    roster = tuple(sorted(identity.peer_id for identity in identities))
    codec = RangeCodec(manifest.rounds.allowed_codecs[0], DENSE)
    async with asyncio.TaskGroup() as group:
        swarm = ModeSwarm(
            network, SIZE, codec, think, roster, group, random.Random(seed), Patience(),
            cast(Any, None), manifest.rounds.fragments, manifest=manifest,
            common=torch.randn(SIZE, generator=torch.Generator().manual_seed(1000)),
        )  # fmt: skip
        walker = await swarm._new(roster[0], 0)
        swarm.rules, swarm.codec = rules_of(manifest, walker.replica), walker.replica.codec
        started: list[Awaitable[Member]] = [swarm.first(identity) for identity in identities]
        for one in started:
            await one
        yield swarm
        for member in swarm.members.values():
            member.task.cancel()
