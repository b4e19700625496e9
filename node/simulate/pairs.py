"""Gossip: islands that meet one other island, or send to a few, and never all of them."""

from __future__ import annotations

import asyncio
import struct

import torch
from torch import Tensor

from diloco import mixing
from diloco.mixing import PushSum
from gossip.collective import encoded
from gossip.meeting import Meetings
from node.simulate.world import Node, World
from protocols.codecs import codec
from protocols.errors import RemoteProtocolError
from protocols.identity import PeerId

PATIENCE_S = 10.0
SMOOTHED = 0.3  # weight of the newest measurement of disagreement


async def gossip(world: World) -> None:
    """NoLoCo (2506.10911), or plain averaging, with a random partner after each H steps."""
    slow: dict[PeerId, Tensor] = {}
    world.views = lambda: [slow[me] for me in world.members if me in slow] or [world.start]
    async with asyncio.TaskGroup() as group:
        tasks = {
            me: group.create_task(_gossip(world.nodes[me], slow, world.start))
            for me in world.members
        }
        if world.scenario.churn:
            await _churn(world, slow, tasks, group)
    world.notes["disagreement"] = _spread([slow[me] for me in world.members])


async def _churn(
    world: World,
    slow: dict[PeerId, Tensor],
    tasks: dict[PeerId, asyncio.Task[None]],
    group: asyncio.TaskGroup,
) -> None:
    """Kill an island now and then; a new one takes its text and a living one's parameters."""
    one = world.scenario
    every = 10.0 / (one.churn * one.islands) * one.inner_steps * one.step_s
    while not world.done:
        await asyncio.sleep(every)
        gone = world.nodes[world.random.choice(world.members)]
        tasks.pop(gone.me).cancel()
        world.kill(gone)
        slow.pop(gone.me, None)
        donor = world.random.choice([me for me in world.members if me in slow])
        node = world.add(gone.number % one.islands)
        world.notes["replaced"] = world.notes.get("replaced", 0) + 1
        tasks[node.me] = group.create_task(_gossip(node, slow, slow[donor].clone()))


async def _gossip(node: Node, slow: dict[PeerId, Tensor], start: Tensor) -> None:
    world, one = node.world, node.world.scenario
    how = codec(one.codec)
    meetings = Meetings(node.box, node.me, b"gossip", PATIENCE_S)
    slow[node.me] = mine = start.clone()
    momentum = torch.zeros_like(mine)
    distance, extra = 0.0, 0
    span = one.inner_steps * one.step_s
    while not world.done:
        # rounds are counted by the clock: whoever joins or is slow knows which one it is
        round_ = round(asyncio.get_running_loop().time() / span)
        node.learner.load(mine)
        await node.train(one.inner_steps)
        moved = node.outgoing(mine - node.learner.params())
        fast = mine - moved
        for meeting in range(1 + extra):
            said = encoded(how, fast - world.start)
            theirs = await meetings.meet(world.members, round_, said, meeting)
            other = fast if theirs is None else _decoded(theirs, fast, world.start, one.codec)
            if theirs is not None:
                sample = mixing.disagreement(fast, other)
                distance += (SMOOTHED if distance else 1.0) * (sample - distance)
            if one.pairs == "noloco" and meeting == extra:
                mixing.noloco(mine, momentum, fast, other, alpha=mixing.ALPHA, beta=mixing.BETA)
            else:
                mixing.average(fast, other)
        if one.pairs == "average":
            mine.copy_(fast)
        if one.control:
            extra = mixing.extra_exchanges(distance, moved.square().mean().item())
            world.notes["extra"] = world.notes.get("extra", 0) + extra
    world.notes["missed"] = world.notes.get("missed", 0) + meetings.missed


def _decoded(data: Tensor, mine: Tensor, start: Tensor, name: str) -> Tensor:
    values = torch.empty_like(mine)
    try:
        codec(name).decode(data, values)
    except RemoteProtocolError:  # garbage: as if nobody had come
        return mine
    return values.add_(start)


async def push_sum(world: World) -> None:
    """Stochastic gradient push (1811.10792): shares go to neighbours, no answer is awaited."""
    states = {me: PushSum(world.start.clone()) for me in world.members}
    world.views = lambda: [states[me].estimate() for me in world.members]
    async with asyncio.TaskGroup() as group:
        for me in world.members:
            group.create_task(_push(world.nodes[me], states[me]))
    world.notes["disagreement"] = _spread([states[me].estimate() for me in world.members])


async def _push(node: Node, state: PushSum) -> None:
    world, one = node.world, node.world.scenario
    how = codec(one.codec)
    meetings = Meetings(node.box, node.me, b"push", PATIENCE_S)
    for round_ in range(one.rounds):
        here = state.estimate()
        node.learner.load(here)
        await node.train(one.inner_steps)
        state.x = state.x - node.outgoing(here - node.learner.params())
        x, w = state.share(one.neighbours)
        body = torch.cat([_number(w), encoded(how, x)])
        lost = await meetings.spread(world.members, round_, body, one.neighbours)
        for _ in lost:
            state.take(x, w)
        while (came := await node.box.receive_any("share", timeout=0)) is not None:
            weight = struct.unpack(">d", bytes(came[1][:8].tolist()))[0]
            values = torch.empty_like(x)
            how.decode(came[1][8:].clone(), values)
            state.take(values, weight)


def _number(value: float) -> Tensor:
    return torch.tensor(list(struct.pack(">d", value)), dtype=torch.uint8)


def _spread(vectors: list[Tensor]) -> float:
    """RMS distance of islands from their mean, against the mean's RMS."""
    stack = torch.stack(vectors)
    mean = stack.mean(0)
    return ((stack - mean).square().mean().sqrt() / mean.square().mean().sqrt()).item()
