"""Modes that meet after every inner step: data parallelism, and coarse forms of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import torch
from torch import Tensor

from bootstrap.validation import bad_config
from diloco import feedback, lowrank, optimizers
from node.simulate.learner import new_model, parameters, rate_factor
from node.simulate.streams import Sender
from node.simulate.world import Node, World
from protocols.codecs import Codec, codec

WARMUP_SHARE = 0.15  # of the steps, before 1-bit Adam freezes its second moments
EPSILON = 1e-8
BETA1, BETA2 = 0.9, 0.95  # as the inner AdamW's in the other modes is near enough


async def _all(
    world: World,
    island: Callable[[Node], Awaitable[None]],
    views: Callable[[], list[Tensor]] | None = None,
) -> None:
    async def one(node: Node) -> None:
        node.learner.load(world.start)
        await island(node)

    first = world.nodes[world.members[0]]
    first.learner.load(world.start)
    world.views = views or (lambda: [first.learner.params()])
    async with asyncio.TaskGroup() as group:
        for me in world.members:
            group.create_task(one(world.nodes[me]))


async def _mean(node: Node, subject: str, vector: Tensor, one: Codec) -> Tensor:
    members = node.world.members
    shares = [1.0 / len(members)] * len(members)
    return (await node.collective.mean(members, subject, vector, one, shares)).mean


async def _stepped(node: Node) -> None:
    """A gradient was merged, and the common step taken."""
    node.merged = node.steps + 1
    await node.rest(1)


async def allreduce(world: World) -> None:
    """Classic data parallelism: the mean gradient in every step, in any codec."""

    async def island(node: Node) -> None:
        one, sender = world.scenario, Sender(world.scenario, len(world.start))
        members = world.members
        shares = [1.0 / len(members)] * len(members)
        for step in range(one.rounds * one.inner_steps):
            node.learner.gradient()
            vector = sender.vector(node.outgoing(node.learner.flat_gradient()))
            found = await node.collective.mean(members, str(step), vector, sender.codec, shares)
            node.learner.set_gradient(sender.merged(found, shares[0]))
            node.learner.step(world.share)
            await _stepped(node)

    await _all(world, island)


async def powersgd(world: World) -> None:
    """Data parallelism with gradients as products of thin matrices.

    Raises OperatorError E204 where the rank leaves nothing to gain.
    """
    one = world.scenario
    if not any(min(p.shape) > 2 * one.rank for p in parameters(new_model(one)) if p.ndim == 2):
        why = f"no matrix of this model has more than {2 * one.rank} rows and columns"
        raise bad_config(f"rank {one.rank} is too large", why, "take a smaller one: --set rank=4")
    await (_in_turn if world.scenario.alternate else _both_factors)(world)


async def _in_turn(world: World) -> None:
    """One factor a step, as in rounds of ``node start`` (2306.08881)."""
    one, size = world.scenario, len(world.start)
    shapes = [parameter.shape for parameter in parameters(new_model(one))]
    ends = itertools.accumulate(shape.numel() for shape in shapes)
    entries = [(end - shape.numel(), shape) for end, shape in zip(ends, shapes, strict=True)]
    plan = lowrank.Plan.of(entries, one.rank)

    async def island(node: Node) -> None:
        bases, errors = lowrank.first_bases(plan, one.seed), torch.zeros(size)
        for step in range(one.rounds * one.inner_steps):
            node.learner.gradient()
            own = node.outgoing(node.learner.flat_gradient())
            sent = lowrank.contribution(plan, step, bases, own, errors, 1.0)
            mean = await _mean(node, str(step), sent, codec("fp32"))
            lowrank.keep_lost(plan, step, bases, own, sent, errors, 1.0)
            common = torch.empty(size)
            for here, values in lowrank.expanded(plan, step, bases, mean):
                common[here] = values
            lowrank.turn(plan, step, bases, mean, one.seed)
            node.learner.set_gradient(common)
            node.learner.step(world.share)
            await _stepped(node)

    await _all(world, island)


async def _both_factors(world: World) -> None:
    """Both factors in every step, one after the other (1905.13727)."""

    async def island(node: Node) -> None:
        one, exact = world.scenario, codec("fp32")
        shapes = [p.shape for p in node.learner.model.parameters()]
        wide = [s for s in shapes if len(s) == 2 and min(s) > 2 * one.rank]
        factors = [lowrank.first_factor(s[1], one.rank, i) for i, s in enumerate(wide)]
        errors = [torch.zeros(s) for s in wide]
        for step in range(one.rounds * one.inner_steps):
            node.learner.gradient()
            parameters = list(node.learner.model.parameters())
            gradients = [p.grad for p in parameters if p.grad is not None and p.shape in wide]
            rest = [p.grad for p in parameters if p.grad is not None and p.shape not in wide]
            meant = [g + e for g, e in zip(gradients, errors, strict=True)]
            lefts = [lowrank.left(m, q) for m, q in zip(meant, factors, strict=True)]
            found = await _mean(node, f"p {step}", _flat([*lefts, *rest]), exact)
            (*lefts,) = _unflat(found, [*lefts, *rest])
            for gradient, mean in zip(rest, lefts[len(meant) :], strict=True):
                gradient.copy_(mean)
            bases = [
                lowrank.orthogonal(p, f"{step} {i}") for i, p in enumerate(lefts[: len(meant)])
            ]
            rights = [lowrank.right(m, p) for m, p in zip(meant, bases, strict=True)]
            factors = _unflat(await _mean(node, f"q {step}", _flat(rights), exact), rights)
            for index, gradient in enumerate(gradients):
                gradient.copy_(lowrank.product(bases[index], factors[index]))
                # what this island's own approximation, not the mean's, lost of its own matrix
                own = lowrank.product(bases[index], rights[index])
                torch.sub(meant[index], own, out=errors[index])
            node.learner.step(world.share)
            await _stepped(node)

    await _all(world, island)


async def onebit_adam(world: World) -> None:
    """1-bit Adam: plain Adam first, then signs of the momentum (2102.02888)."""

    async def island(node: Node) -> None:
        one, size = world.scenario, len(world.start)
        total, members = one.rounds * one.inner_steps, world.members
        warm, shares = max(1, int(WARMUP_SHARE * total)), [1.0 / len(members)] * len(members)
        exact, coarse, error = codec("fp32"), codec("int1"), torch.zeros(size)
        params, rule = world.start.clone(), optimizers.named("onebit-adam")
        vectors = rule.init(params).vectors
        assert rule.brings is not None
        assert rule.end is not None
        for step in range(total):
            node.learner.gradient()
            own = node.learner.flat_gradient()
            lr = one.inner_lr * rate_factor(one, world.share)
            rates = optimizers.Rates(lr, BETA1, step + 1, beta2=BETA2, epsilon=EPSILON, warmup=warm)
            rule.brings(vectors, own, rates)
            if step < warm:
                mean = await _mean(node, str(step), own, exact)
            else:
                meant = feedback.compensate(own, error, 1.0)
                found = await node.collective.mean(members, str(step), meant, coarse, shares)
                # the owner's own slice travels nowhere; what merging loses, it keeps as its own
                error = meant - found.sent + found.lost / shares[0]
                mean = found.mean
            rule.step(vectors, mean, params, rates)
            rule.end(vectors, params, rates)
            node.learner.load(params)
            await _stepped(node)

    await _all(world, island)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _unflat(vector: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = torch.split(vector, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
