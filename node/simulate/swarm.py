"""DiLoCo in simulation, by the code that runs on the wire: certified rounds of a whole swarm.

Each island is a :class:`gossip.driver.Swarm` member: announcements, leaders, plans, the exchange
in parts, votes, certificates and catching up are what ``node start`` runs. Only the replica is this
module's: it has any outer optimizer of :mod:`diloco.optimizers`, and a trainer in the same process.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import torch
from blake3 import blake3
from torch import Tensor

from bootstrap.manifest_rounds import Merge
from bootstrap.validation import bad_config
from diloco.pseudo_gradient import accounted, norm, pseudo_gradient, rebase
from gossip.certificate import genesis, outcome_hash
from gossip.chain import Chain
from gossip.driver import Swarm
from gossip.exchange import Exchange
from gossip.hooks import Hooks
from gossip.lineage import Lineage
from gossip.rules import Rules
from gossip.validity import Place
from node.mixing import mix_of
from node.residual import Residual
from node.simulate.learner import dense, new_model
from node.simulate.presence import RUN, Present
from node.simulate.streams import OuterSteps
from node.simulate.world import Node, World
from protocols.codecs import Chunk, RangeCodec
from protocols.errors import OperatorError
from protocols.identity import PeerId
from protocols.messages import Certificate, Outcome

PATIENCE = 5.0  # times what it should take; beyond, a swarm is stuck and the run fails


@dataclass
class Replica:
    """G and the outer state of one island (:class:`gossip.hooks.Replica`)."""

    node: Node
    base: Tensor  # G, float32 [n]
    sent: Tensor  # θ as it was announced; G where there is nothing to send
    codec: RangeCodec
    roster: tuple[PeerId, ...]
    residual: Residual | None
    outer: OuterSteps
    place: Place
    lineage: Lineage | None = None
    merged_mine: bool = False
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def delta(self, start: int, stop: int, out: Tensor) -> Tensor:
        """Δ = G − sent and what was lost before, of a range."""
        self._progress(start, stop, out)
        return out if self.residual is None else self.residual.add_to(out, start)

    def _progress(self, start: int, stop: int, out: Tensor) -> Tensor:
        return pseudo_gradient(self.base[start:stop], self.sent[start:stop], out)

    def note_lost(
        self, codec: RangeCodec, chunk: Chunk, mean: Tensor, data: Tensor, share: float
    ) -> None:
        """What this owner's encoding lost (:class:`gossip.slicing.KeepsLost`)."""
        if self.residual is not None:
            self.residual.note_lost(codec, chunk, mean, data, share)

    def snapshot(self) -> float:
        """Announce what there is now; its norm."""
        local = self.node.learner.params()
        progress = self.base - local
        self.sent = local if self.node.honest else self.base - self.node.outgoing(progress)
        return norm(self.delta(0, len(self.base), torch.empty_like(self.base)))

    async def apply(self, certificate: Certificate, parts: dict[tuple[int, int], Tensor]) -> None:
        """Take the outer step of a committed round, and keep local work that is not in it."""
        outcome = certificate.outcome
        mine = self._mine(outcome)
        codec = self.codec.named(outcome.codec)
        if self.residual is not None and mine:
            self.residual.settle(outcome, self.node.me, codec, self._progress)
        elif self.residual is not None:
            self.residual.forget_round()
        merged = torch.zeros_like(self.base)
        for result in outcome.parts:
            if result.digest:
                data = parts[result.start, result.stop]
                codec.decode(result.start, data, merged[result.start : result.stop])
        counted = self.sent
        if mine and not self.node.honest:  # what it says it did is not what it did
            counted = self.node.learner.params()
        old = accounted(self.base, counted, mine, torch.empty_like(self.base))
        self.outer.take(merged, self.base)
        local = self.node.learner.params()
        rebase(local, self.base, old)
        self.node.learner.load(local)
        self.sent = self.base.clone()
        self.merged_mine = bool(mine)
        if mine:  # it trains nothing while it waits
            self.node.merged = self.node.steps
        self.place = Place(
            RUN, 0, outcome.round + 1, outcome_hash(outcome), self.digest(), outcome.work
        )
        self.roster = outcome.next_roster
        self.moved.set()

    def _mine(self, outcome: Outcome) -> list[tuple[int, int]]:
        at = next((i for i, c in enumerate(outcome.contributors) if c.peer == self.node.me), None)
        return [
            (part.start, part.start + included.elements)
            for part in outcome.parts
            for included in part.included
            if included.contributor == at and included.elements
        ]

    def digest(self) -> bytes:
        """Of everything that must be equal on all islands."""
        hasher = blake3(self.base.view(torch.uint8).numpy().data)
        for name in sorted(self.outer.state.vectors):
            hasher.update(self.outer.state.vectors[name].view(torch.uint8).numpy().data)
        return hasher.digest()


class Islands:
    """The members of a simulated swarm."""

    def __init__(self, world: World, group: asyncio.TaskGroup) -> None:
        self.world, self.group = world, group
        one, size = world.scenario, len(world.start)
        # norms and biases travel in bf16, as on the wire
        self.codec = RangeCodec(one.codec, dense=dense(new_model(one)))
        rule = "auto" if one.rule == "open" else one.rule
        trust = "open" if one.rule == "open" else "friendly"
        self.rules = Rules(
            size,
            (one.codec,),
            self.codec.size_as,
            quorum=one.quorum,
            mix=mix_of(Merge.model_validate({"trust": trust, "rule": rule})),
        )
        self.running: dict[PeerId, tuple[Swarm, Replica, asyncio.Task[None]]] = {}
        self.finished = asyncio.Event()

    def start(self, node: Node, donor: Replica | None = None) -> None:
        """Begin an island's part, from the beginning or from a living one's state."""
        one, world = self.world.scenario, self.world
        size = len(world.start)
        base = (donor.base if donor else world.start).clone()
        outer = OuterSteps(one, base)
        if donor is not None:
            outer.state.count = donor.outer.state.count
            for name, vector in donor.outer.state.vectors.items():
                outer.state.vectors[name] = vector.clone()
        residual = Residual(size, one.feedback) if one.coarse else None
        roster = donor.roster if donor else tuple(world.members)
        place = donor.place if donor else Place(RUN, 0, 0, genesis(RUN), b"", 0)
        replica = Replica(node, base, base.clone(), self.codec, roster, residual, outer, place)
        if donor is None:
            replica.place = Place(RUN, 0, 0, genesis(RUN), replica.digest(), 0)
        replica.lineage = donor.lineage if donor else None
        node.learner.load(base)
        self._begin(node, replica, joining=donor is not None)

    def _begin(self, node: Node, replica: Replica, *, joining: bool) -> None:
        present = Present(node, self.codec, lambda: replica.place, joining)
        presence = present.presence

        def applied(certificate: Certificate, exchange: Exchange | None) -> None:
            presence.note(
                upload=node.transport.stats.upload.read() or self.world.scenario.bandwidth,
                download=node.transport.stats.download.read() or self.world.scenario.bandwidth,
            )

        chain = Chain(
            present.wiring,
            replica,
            self.rules,
            presence,
            Hooks(applied=applied),
            keep_rounds=20,
            known_lineage=replica.lineage,
            new_identity=joining,
        )
        replica.lineage = chain.lineage
        swarm = Swarm([chain])

        others = [other.presence for other, _, _ in self.running.values()]
        work = present.live(others, swarm.run(), self._train(node, chain, replica))
        self.running[node.me] = (swarm, replica, self.group.create_task(work))

    async def _train(self, node: Node, chain: Chain, replica: Replica) -> None:
        one = self.world.scenario
        while True:
            steps = node.chosen_steps
            chain.update(eta=steps * node.step_s, ready=False)
            for left in range(steps, 0, -1):
                chain.note(eta=left * node.step_s)
                await node.train(1)
            replica.merged_mine = False
            while not replica.merged_mine:  # what came too late for a round is for the next one
                round_ = replica.place.round
                if round_ >= self.world.rounds:
                    self.finished.set()
                tokens = steps * one.batch
                chain.update(
                    ready=True,
                    tokens=tokens,
                    steps=steps,
                    weight=float(tokens),
                    eta=0.0,
                    norm=replica.snapshot(),
                )
                while replica.place.round == round_:
                    replica.moved.clear()
                    await replica.moved.wait()

    async def replace(self, gone: Node) -> None:
        """Kill an island; a new one takes its text and a living one's state."""
        _, _, task = self.running.pop(gone.me)
        self.world.kill(gone)
        task.cancel()
        await asyncio.wait([task])
        # it would ask whoever is furthest on
        donor = max(self.running.values(), key=lambda one: one[1].place.round)[1]
        self.start(self.world.add(gone.number % self.world.scenario.islands), donor)


async def diloco(world: World) -> None:
    """Certified rounds until so many are committed."""
    one = world.scenario
    async with asyncio.TaskGroup() as group:
        islands = Islands(world, group)
        for me in world.members:
            islands.start(world.nodes[me])

        def views() -> list[Tensor]:
            ahead = max(islands.running.values(), key=lambda one: one[1].place.round)
            return [ahead[1].base]

        world.views = views
        churn = group.create_task(_churn(world, islands)) if one.churn else None
        expected = world.rounds * one.inner_steps * one.step_s * max(1.0, one.straggler_factor)
        patience = PATIENCE * expected + 600.0
        try:
            async with asyncio.timeout(patience):
                await islands.finished.wait()
        except TimeoutError:
            raise _still(world, islands, patience) from None
        if churn is not None:
            churn.cancel()
        world.notes["rounds"] = max(r.place.round for _, r, _ in islands.running.values())
        for _, _, task in islands.running.values():
            task.cancel()


def _still(world: World, islands: Islands, seconds: float) -> OperatorError:
    done = max(replica.place.round for _, replica, _ in islands.running.values())
    return bad_config(
        "the simulated swarm does not come to its end",
        f"{done} of {world.rounds} rounds were committed in {seconds:,.0f} virtual seconds",
        "give it faster links, or less churn or loss",
    )


async def _churn(world: World, islands: Islands) -> None:
    one = world.scenario
    every = 10.0 / (one.churn * one.islands) * one.inner_steps * one.step_s
    while True:
        await asyncio.sleep(every)
        await islands.replace(world.nodes[world.random.choice(world.members)])
        world.notes["replaced"] = world.notes.get("replaced", 0) + 1
