"""Streaming DiLoCo in a stable group that meets at fixed steps, with equal parts as fragments."""

from __future__ import annotations

import asyncio
import itertools

import torch
from torch import Tensor

from diloco import feedback, optimizers, outer
from diloco.fragments import Schedule, blend
from gossip.collective import Mean
from node.simulate.scenario import Scenario
from node.simulate.world import Node, World
from protocols.codecs import codec


class OuterSteps:
    """An outer optimizer with the scenario's rates."""

    def __init__(self, scenario: Scenario, params: Tensor) -> None:
        self.scenario, self.rule = scenario, optimizers.named(scenario.outer)
        self.state = self.rule.init(params)

    def take(self, merged: Tensor, params: Tensor) -> None:
        """One step on ``params`` [n] in place."""
        lr, momentum = rates(self.scenario, self.state.count)
        self.rule.update(self.state, merged, params, lr=lr, momentum=momentum)


def rates(scenario: Scenario, round_: int) -> tuple[float, float]:
    """(η, μ) of a round: only Nesterov is warmed up, as the others' papers know no warm-up."""
    rule = optimizers.named(scenario.outer)
    lr = rule.lr if scenario.outer_lr is None else scenario.outer_lr
    momentum = rule.momentum if scenario.outer_momentum is None else scenario.outer_momentum
    if scenario.outer != "nesterov":
        return lr, momentum
    return outer.outer_rates(
        round_,
        lr=lr,
        momentum=momentum,
        lr_start=1.0,
        momentum_start=min(0.5, momentum),
        warmup_rounds=scenario.warmup_rounds,
    )


class Sender:
    """What an island sends of a vector: with what coarse codecs have lost before."""

    def __init__(self, scenario: Scenario, size: int) -> None:
        self.codec = codec(scenario.codec)
        self.decay = scenario.feedback if scenario.coarse else 0.0
        self.residual = torch.zeros(size)
        self.meant = torch.zeros(size)

    def vector(self, delta: Tensor) -> Tensor:
        """Δ + decay · e."""
        self.meant = feedback.compensate(delta.clone(), self.residual, self.decay)
        return self.meant

    def merged(self, result: Mean, share: float) -> Tensor:
        """D; what was lost on the way is kept for the next time."""
        if self.decay:
            torch.sub(self.meant, result.sent, out=self.residual)
            self.residual += feedback.lost_by_owner(result.lost, torch.zeros(1), share)
        return result.mean


async def streaming(world: World) -> None:
    """Fragments that are sent one after the other while inner steps go on (2501.18512)."""
    one = world.scenario
    base = world.start.clone()  # of the first island; all have the same
    world.views = lambda: [base]
    async with asyncio.TaskGroup() as group:
        for index, me in enumerate(world.members):
            mine = base if index == 0 else base.clone()
            group.create_task(_stream(world.nodes[me], mine, one))


def pieces(scenario: Scenario, size: int) -> list[slice]:
    """The fragments of the flat vector: equal parts. (The model has too few layers to stride.)"""
    cuts = [size * p // scenario.fragments for p in range(scenario.fragments + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(cuts)]


async def _stream(node: Node, base: Tensor, one: Scenario) -> None:
    world, members = node.world, node.world.members
    schedule = Schedule(one.inner_steps, one.fragments, one.delay)
    parts = pieces(one, len(base))
    outers = [OuterSteps(one, base[part]) for part in parts]
    senders = [Sender(one, part.stop - part.start) for part in parts]
    share = 1.0 / len(members)
    flights: dict[int, asyncio.Task[Mean]] = {}
    node.learner.load(world.start)
    taken, sent_at, reached = 0, [0] * one.fragments, [0] * one.fragments
    async with asyncio.TaskGroup() as group:
        for step in range(1, one.rounds * one.inner_steps + one.delay + 1):
            last = step >= one.rounds * one.inner_steps
            due, sent = (
                schedule.due(step),
                [] if step > one.rounds * one.inner_steps else (schedule.sent(step)),
            )
            if not (due or sent or last):
                continue
            await node.train(min(step, one.rounds * one.inner_steps) - taken)
            taken = min(step, one.rounds * one.inner_steps)
            if not (due or sent):
                continue
            local = node.learner.params()
            for p in sent:
                here = parts[p]
                vector = senders[p].vector(node.outgoing(base[here] - local[here]))
                subject, sent_at[p] = f"{p} {schedule.turn(p, step)}", node.steps
                flights[p] = group.create_task(
                    node.collective.mean(
                        members, subject, vector, senders[p].codec, [share] * len(members)
                    )
                )
            for p in due:
                here = parts[p]
                merged = senders[p].merged(await flights.pop(p), share)
                outers[p].take(merged, base[here])
                blend(local[here], base[here], one.alpha)
                reached[p] = sent_at[p]
                node.merged = min(reached)
            if due:
                node.learner.load(local)
