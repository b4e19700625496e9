"""Gossip in simulation, by the code that runs on the wire: islands that meet in pairs.

Each island is a :class:`gossip.roamer.Roamer`: announcements, openings and answers, patience,
letters and consensus control are what ``node start`` runs, and so are the arithmetic
(:mod:`node.blending`) and push-sum. Only the trainer is this module's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from blake3 import blake3
from torch import Tensor

from diloco import optimizers
from diloco.mixing import extra_exchanges
from diloco.optimizers import Rates
from gossip.certificate import genesis
from gossip.presence import Presence
from gossip.roamer import Roamer, Rounded
from gossip.sketch import sketch
from gossip.validity import Place
from gossip.wandering import Habits
from node.blending import Blend
from node.own_state import Exchanging
from node.simulate.learner import layout_of
from node.simulate.presence import RUN, Present
from node.simulate.world import Node, World
from protocols.codecs import RangeCodec
from protocols.virtual_time import inline

STALENESS = 4  # own rounds that an answer may be late, as in manifests of gossip


class Own(Exchanging):
    """φ and momentum of one island (:class:`gossip.roamer.Mixing`)."""

    def __init__(
        self,
        base: Tensor,
        codec: RangeCodec,
        rule: str,
        rates: tuple[float, float],
        donor: Own | None,
    ) -> None:
        self.base, self.sent, self.offload = base, base.clone(), inline
        self.blend = Blend(base, codec, shares=rule == "push-sum")
        self.rule = optimizers.named("heavyball" if rule == "noloco" else "sgd")
        self.rates = rates
        self.vectors = self.rule.init(base).vectors
        round_ = 0
        if donor is not None:
            round_ = donor.place.round
            for name in self.rule.vectors:
                self.vectors[name].copy_(donor.vectors[name])
        self._place = Place(RUN, 0, round_, genesis(RUN), self._digest(), 0)

    @property
    def place(self) -> Place:
        """At this island's own count."""
        return self._place

    async def finish(self, round_: int, *, ours: bool) -> None:
        """Take the outer step of a round."""
        self.blend.step(self.rule, self.vectors, Rates(*self.rates, round_ + 1))
        self._place = replace(self._place, round=round_ + 1, state=self._digest())

    def _digest(self) -> bytes:
        return blake3(self.base.view(torch.uint8).numpy().data).digest()


@dataclass
class Islander:
    """One island that is running."""

    node: Node
    own: Own
    presence: Presence
    roamer: Roamer
    task: asyncio.Task[None] | None = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    done: bool = False  # all steps of the run are taken


class Pairs:
    """The islands of a simulated run of gossip."""

    def __init__(self, world: World, group: asyncio.TaskGroup) -> None:
        self.world, self.group = world, group
        one = world.scenario
        self.rule = "push-sum" if one.mode == "push-sum" else one.pairs
        self.rates = (1.0, 0.0)
        if self.rule == "noloco":
            self.rates = one.noloco
        # norms and biases travel in bf16, as on the wire
        self.codec = RangeCodec(one.codec, dense=layout_of(one).dense)
        self.running: list[Islander] = []
        self.ended = asyncio.Event()
        self.met: Counter[str] = Counter()  # exchanges, by how they ended
        self.ratios: list[float] = []  # squared distance over what inner steps moved

    def start(self, node: Node, donor: Own | None = None) -> None:
        """Begin an island's part, from the beginning or from a living one's state."""
        one = self.world.scenario
        base = (donor.base if donor else self.world.start).clone()
        own = Own(base, self.codec, self.rule, self.rates, donor)
        present = Present(node, self.codec, lambda: [own.place], joining=donor is not None)

        def more(distance: float, progress: float) -> int:
            if not one.control:
                return 0
            return min(one.extra, extra_exchanges(distance, progress, one.disagreement))

        def applied(rounded: Rounded) -> None:
            self._count(node, rounded)
            islander.moved.set()

        roamer = Roamer(
            present.wiring,
            own,
            present.presence,
            Habits(RUN, STALENESS, one_way=self.rule == "push-sum"),
            len(base),
            neighbours=one.neighbours,
            more=more,
            applied=applied,
            newcomer=donor is not None,
        )
        islander = Islander(node, own, present.presence, roamer)
        others = [other.presence for other in self.running]
        self.running.append(islander)
        work = present.live(others, roamer.run(), self._train(islander))
        islander.task = self.group.create_task(work)

    def _count(self, node: Node, rounded: Rounded) -> None:
        outcomes = [one.met.outcome for one in rounded.exchanged]
        self.met.update(outcomes)
        if set(outcomes) - {"alone", "lost"}:  # somebody has a letter with all that it has learnt
            node.merged = node.steps
        if rounded.progress and rounded.spread.to_mean:
            size = len(self.world.start)
            self.ratios.append(rounded.spread.square / size / rounded.progress)

    async def _train(self, islander: Islander) -> None:
        node, own, roamer, world = islander.node, islander.own, islander.roamer, self.world
        while not world.done:
            steps = node.chosen_steps
            roamer.update(eta=steps * node.step_s)
            node.learner.load(own.base)
            for left in range(steps, 0, -1):
                roamer.note(eta=left * node.step_s)
                await node.train(1)
            moved = node.outgoing(own.base - node.learner.params())
            own.sent = own.base - moved
            roamer.note(sketch=sketch(own.sent, RUN), sketch_round=own.place.round)
            islander.moved.clear()
            roamer.update(ready=True, eta=0.0, norm=moved.norm().item())
            await islander.moved.wait()
        islander.done = True
        if all(one.done for one in self.running):
            self.ended.set()

    async def replace(self, gone: Islander) -> None:
        """Kill an island; a new one takes its text and a living one's parameters."""
        self.running.remove(gone)
        self.world.kill(gone.node)
        assert gone.task is not None
        gone.task.cancel()
        await asyncio.wait([gone.task])
        donor = self.world.random.choice(self.running)
        self.start(self.world.add(gone.node.number % self.world.scenario.islands), donor.own)


async def pairs(world: World) -> None:
    """NoLoCo (2506.10911), plain averaging, or push-sum (1811.10792), after each H steps."""
    async with asyncio.TaskGroup() as group:
        islands = Pairs(world, group)
        for me in world.members:
            islands.start(world.nodes[me])
        world.views = lambda: [one.own.base for one in islands.running]
        churn = group.create_task(_churn(world, islands)) if world.scenario.churn else None
        await islands.ended.wait()
        for task in [churn, *(one.task for one in islands.running)]:
            if task is not None:
                task.cancel()
    world.notes["disagreement"] = _spread(world.views())
    world.notes |= {f"exchanges_{outcome}": float(n) for outcome, n in islands.met.items()}
    late = islands.ratios[len(islands.ratios) // 2 :]
    if late:  # in the second half of the run
        world.notes["disagreement_by_progress"] = sum(late) / len(late)


async def _churn(world: World, islands: Pairs) -> None:
    """Kill an island now and then."""
    one = world.scenario
    every = 10.0 / (one.churn * one.islands) * one.inner_steps * one.step_s
    while True:
        await asyncio.sleep(every)
        await islands.replace(world.random.choice(islands.running))
        world.notes["replaced"] = world.notes.get("replaced", 0) + 1


def _spread(vectors: list[Tensor]) -> float:
    """RMS distance of islands from their mean, against the mean's RMS."""
    stack = torch.stack(vectors)
    mean = stack.mean(0)
    return ((stack - mean).square().mean().sqrt() / mean.square().mean().sqrt()).item()
