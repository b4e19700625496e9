"""Modes with owners that islands bring their work to: asynchronous, parameter server, FedAvg."""

from __future__ import annotations

import asyncio
import functools
import itertools
import struct

import torch
from torch import Tensor

from diloco import asynchronous, federated, merge, optimizers
from gossip.collective import encoded
from gossip.owner import Owner, Take
from node.simulate.scenario import Scenario
from node.simulate.streams import OuterSteps, Sender, rates
from node.simulate.world import Node, World
from protocols.codecs import codec
from protocols.identity import PeerId

LONG_S = 1e6  # virtual seconds: until cancelled


def parts_of(size: int, count: int) -> list[slice]:
    """Equal parts of the vector, one an owner."""
    cuts = [size * index // count for index in range(count + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(cuts)]


async def asynchronously(world: World) -> None:
    """Nobody waits: each island's work is taken when it comes, by delayed Nesterov."""
    hosts = [world.nodes[me] for me in world.members]
    count = world.scenario.owners or len(hosts)
    await _serve(world, hosts[:count], sampled=False)


async def server(world: World) -> None:
    """A parameter server: in lock-step with bound 0, stale-synchronous or asynchronous else."""
    hosts = [world.add_server() for _ in range(world.scenario.owners or 1)]
    await _serve(world, hosts, sampled=world.scenario.bound == 0, share=1.0)


async def fedavg(world: World) -> None:
    """Federated averaging: a server sends to a part of the clients in each round."""
    hosts = [world.add_server() for _ in range(world.scenario.owners or 1)]
    await _serve(world, hosts, sampled=True, share=world.scenario.sample)


async def _serve(world: World, hosts: list[Node], *, sampled: bool, share: float = 1.0) -> None:
    one = world.scenario
    parts = parts_of(len(world.start), len(hosts))
    clients = world.members
    gather = max(1, len(federated.sampled(clients, share, 0, one.seed))) if sampled else 1
    owners = []
    for part in parts:
        params = world.start[part].clone()
        take = _lock_step(one, params) if sampled else _delayed(one, params, len(clients))
        bound = asynchronous.NO_BOUND if sampled else one.bound
        may_start = functools.partial(asynchronous.may_start, bound=bound)
        owner = Owner(params, codec(_back(one)), take, gather, may_start)
        for client in clients:
            owner.join(client, world.start[part])
        owners.append(owner)
    world.views = lambda: [torch.cat([owner.params for owner in owners])]
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_own(world, host, owner, stop, share if sampled else None))
            for host, owner in zip(hosts, owners, strict=True)
        ]
        tasks += [
            group.create_task(_client(world.nodes[me], hosts, parts, wait=sampled))
            for me in clients
        ]
        await stop.wait()
        for task in tasks:
            task.cancel()
    world.notes["versions"] = float(owners[0].version)


def _back(one: Scenario) -> str:
    """The codec of replies: differences that are made up for later, so any will do but sparse."""
    return "int4" if one.codec in ("top12", "top3") else one.codec


def _lock_step(one: Scenario, params: Tensor) -> Take:
    steps = OuterSteps(one, params)

    def take(params: Tensor, work: list[tuple[Tensor, float, int]]) -> None:
        deltas, weights = [w[0] for w in work], [w[1] for w in work]
        steps.take(merge.weighted_mean(deltas, weights, torch.empty_like(params)), params)

    return take


def _delayed(one: Scenario, params: Tensor, count: int) -> Take:
    rule = optimizers.named("delayed-nesterov")
    vectors = rule.init(params).vectors

    def take(params: Tensor, work: list[tuple[Tensor, float, int]]) -> None:
        for delta, weight, staleness in work:
            if one.align:
                rounds = staleness // count
                asynchronous.align(delta, vectors["v"], [(0, len(delta))], rounds)
            lr, momentum = rates(one, int(vectors["turns"].item()))
            numbers = optimizers.Rates(lr, momentum, share=1 / count, weight=weight)
            rule.take(vectors, delta, params, numbers)

    return take


async def _own(
    world: World, host: Node, owner: Owner, stop: asyncio.Event, share: float | None
) -> None:
    """Take what comes and answer, in lock-step (``share`` of the clients) or as they come."""
    one = world.scenario

    async def answer(client: PeerId) -> None:
        data = owner.reply(client)
        if client == host.me:
            host.box.put(host.me, "state", data)
        else:
            await host.box.send(client, "state", data, timeout=60.0)

    async with asyncio.TaskGroup() as group:

        def tell(clients: list[PeerId]) -> None:
            for client in clients:
                group.create_task(answer(client))

        if share is not None:
            tell(federated.sampled(world.members, share, 0, one.seed))
        while True:
            came = await host.box.receive_any("work", timeout=LONG_S)
            assert came is not None
            client, body = came
            weight = struct.unpack(">d", bytes(body[:8].tolist()))[0]
            work = torch.empty_like(owner.params)
            codec(one.codec).decode(body[8:].clone(), work)
            free = owner.arrive(client, work, weight)
            world.nodes[client].merged = world.nodes[client].steps
            finished = owner.version >= world.rounds if share is not None else world.done
            if finished:
                stop.set()
            elif share is None:
                tell(free)
            elif not owner.waiting:  # the round is over
                tell(federated.sampled(world.members, share, owner.version, one.seed))


async def _client(node: Node, hosts: list[Node], parts: list[slice], *, wait: bool) -> None:
    one, world = node.world.scenario, node.world
    steps = one.inner_steps if wait else node.chosen_steps
    holds = world.start.clone()
    senders = [Sender(one, part.stop - part.start) for part in parts]
    while True:
        if wait:
            await _hear(node, hosts, parts, holds)
        node.learner.load(holds)
        await node.train(steps)
        delta = node.outgoing(holds - node.learner.params())
        weight = asynchronous.rates([float(steps * one.batch)], [float(steps)])[0]
        async with asyncio.TaskGroup() as group:
            for host, part, sender in zip(hosts, parts, senders, strict=True):
                vector = sender.vector(delta[part])
                data = encoded(sender.codec, vector)
                if sender.decay:
                    decoded = torch.empty_like(vector)
                    sender.codec.decode(data, decoded)
                    torch.sub(vector, decoded, out=sender.residual)
                head = torch.tensor(list(struct.pack(">d", weight)), dtype=torch.uint8)
                body = torch.cat([head, data])
                group.create_task(_bring(node, host, body))
        if not wait:
            await _hear(node, hosts, parts, holds)


async def _bring(node: Node, host: Node, body: Tensor) -> None:
    if host.me != node.me:
        await node.box.send(host.me, "work", body, timeout=60.0)
    else:
        node.box.put(node.me, "work", body)


async def _hear(node: Node, hosts: list[Node], parts: list[slice], holds: Tensor) -> None:
    """Wait for what every owner says has changed, and add it."""
    how = codec(_back(node.world.scenario))
    for host, part in zip(hosts, parts, strict=True):
        data = await node.box.receive("state", host.me, timeout=LONG_S)
        assert data is not None
        gained = torch.empty(part.stop - part.start)
        how.decode(data, gained)
        holds[part] += gained
