"""Modes of certified rounds in simulation, by the code that runs on the wire.

Each island is what ``node start`` makes of a run: rounds and their certificates
(:class:`gossip.chain.Chain`), the outer state (:mod:`node.replica`), and a conductor. Newcomers
download the state from the others, as there. Only the inner steps are the simulation's
(:mod:`node.simulate.trainer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bootstrap.manifest import Manifest
from bootstrap.state import StateServer
from bootstrap.validation import bad_config, check
from diloco.federated import merged_branches
from gossip.catchup import Ending
from gossip.chain import Chain
from gossip.driver import Swarm
from gossip.hooks import Hooks
from gossip.lineage import Lineage
from node.arrival import Arrival
from node.conductor import Conductor
from node.modes import is_over
from node.monitor.event_log import EventLog
from node.replica import OuterReplica
from node.run_rules import replicas_of, rules_of
from node.simulate.learner import BETAS, DECAY, layout_of
from node.simulate.presence import EPOCH_S, Present
from node.simulate.scenario import Scenario
from node.simulate.trainer import Simulated, Trainer
from node.simulate.world import Node, World
from node.trainer.channel import Applied
from node.trainer.shared import SharedVectors
from protocols.errors import OperatorError
from protocols.identity import PeerId
from protocols.virtual_time import inline

PATIENCE = 5.0  # times what it should take; beyond, a swarm is stuck and the run fails
MANY = 1_000_000  # rounds, where the run is over by its inner steps
KEPT = 64  # rounds, for those who missed some
GRACE_S = 10.0  # for what is on its way when the last inner step is taken
# the outer optimizers of modes that merge gradients
GRADIENTS: dict[str, dict[str, Any]] = {
    "allreduce": {"optimizer": "adamw"},
    "powersgd": {"optimizer": "powersgd"},
    "onebit-adam": {"optimizer": "onebit-adam"},
}
ONEBIT: dict[str, Any] = {
    "inner_steps": 1,
    "dynamic_steps": False,
    "codec": "auto",
    "codecs": ("bf16", "int1"),
    "feedback": 1.0,
}
WAIT_S = 1.0  # for a round's outcome where islands meet at will; then inner steps go on


def manifest_of(one: Scenario, rounds: int) -> Manifest:
    """The run that a scenario is of, with so many ``rounds``. Raises OperatorError E204."""
    whole, by_gradients = one.rounds * one.inner_steps, one.mode in GRADIENTS
    of_mode: dict[str, dict[str, Any]] = {
        "diloco": {"quorum": one.quorum},
        "async": {"staleness": one.bound},
        "server": {"staleness": one.bound},
        "fedavg": {"clients": one.sample, "owners": "servers"},
        "streaming": {"tau": one.delay, "alpha": one.alpha},
        "sparta": {"inner_steps": 1, "share": one.share},
        "btm": {"inner_steps": whole},
        # of whole steps, and as exact as the wire's defaults
        "allreduce": {"inner_steps": 1, "dynamic_steps": False},
        "powersgd": {"inner_steps": 1, "dynamic_steps": False, "feedback": 1.0},
        "onebit-adam": ONEBIT,
    }
    table: dict[str, Any] = {
        "inner_steps": one.inner_steps,
        "total_rounds": rounds,
        "codec": one.codec,
        "feedback": one.feedback,
        "dynamic_steps": one.dynamic_steps,
        "eval_every": 0,
        "align": one.align,
        "fragments": one.pieces,
    }
    merge = {"open": {"trust": "open"}, "clip": {}}.get(one.rule, {"rule": one.rule})
    tables = {
        "name": "simulation",
        "seed": one.seed,
        "mode": "allreduce" if by_gradients else one.mode,
        "rounds": table | of_mode.get(one.mode, {}),
        "outer": _outer(one),
        "merge": merge,
        "model": {"n_layers": one.parts},
        "inner": _inner(one) if by_gradients else {},
    }
    return check(Manifest, tables, "the scenario")


def _inner(one: Scenario) -> dict[str, Any]:
    """The AdamW that steps by merged gradients, with the numbers of the inner one elsewhere."""
    whole, constant = one.rounds * one.inner_steps, one.schedule == "constant"
    return {
        "lr": one.inner_lr,
        "betas": BETAS[one.model],
        "weight_decay": DECAY[one.model],
        "schedule": one.schedule,
        "warmup_steps": 0 if constant else round(one.warmup * whole),
        "total_steps": whole,
        "min_lr_ratio": 0.0,
    }


def _outer(one: Scenario) -> dict[str, Any]:
    """What a scenario sets of the outer optimizer; the rest is the mode's."""
    if one.mode in GRADIENTS:
        return GRADIENTS[one.mode] | ({"rank": one.rank} if one.mode == "powersgd" else {})
    if one.mode in ("sparta", "btm"):  # they have none
        return {}
    nesterov, found = one.outer == "nesterov", dict[str, Any]()
    if not (nesterov and one.at_will):  # there it is the delayed one
        found["optimizer"] = one.outer
    if nesterov:
        found["warmup_rounds"] = one.warmup_rounds
    if one.outer_lr is not None:
        found["lr"] = one.outer_lr
        if one.mode == "eager":  # a guess of the next mean is not to be one of a higher rate
            found["lr_start"] = one.outer_lr
    if one.outer_momentum is not None:
        found["momentum"] = one.outer_momentum
        if nesterov:
            found["momentum_start"] = min(0.5, one.outer_momentum)
    return found


@dataclass
class Member:
    """One that is running: an island, or a server, which has no trainer."""

    node: Node
    present: Present
    swarm: Swarm
    replicas: tuple[OuterReplica, ...]
    vectors: SharedVectors
    trainer: Trainer | None
    task: asyncio.Task[None]

    async def end(self) -> None:
        """As a kill would."""
        self.task.cancel()
        await asyncio.wait([self.task])
        self.vectors.close()


class Members:
    """All of a simulated swarm."""

    def __init__(self, world: World, group: asyncio.TaskGroup) -> None:
        one = world.scenario
        self.world, self.group = world, group
        whole = one.rounds * one.inner_steps
        each_step = one.mode in GRADIENTS or one.mode == "sparta"
        counted = 1 if one.mode == "btm" else whole if each_step else world.rounds
        self.manifest = manifest_of(one, MANY if one.by_steps else counted)
        self.layout = layout_of(one)
        self.founders = tuple(sorted([*world.members, *(one.me for one in world.servers)]))
        self.running: dict[PeerId, Member] = {}

    async def start(self, node: Node, *, trains: bool = True, joins: bool = False) -> None:
        """Begin a member's part, from the beginning or from the others' state."""
        manifest, layout, transport = self.manifest, self.layout, node.transport
        wait_s = WAIT_S if self.world.scenario.at_will else math.inf
        over = partial(self._is_over, node)
        island = Simulated(node, manifest, layout, wait_s, over) if trains else None
        vectors = island.vectors if island is not None else SharedVectors.create(layout.size)
        vectors.tensors()[0].copy_(self.world.start)
        try:
            replicas = replicas_of(
                manifest, node.me, layout, vectors, inline, self.founders, trains=trains
            )
        except ValueError as error:
            what = f"rank {manifest.outer.rank} is too large"
            raise bad_config(what, str(error), "take a smaller one: --set rank=4") from error
        lineages: list[Lineage | None] = [None] * len(replicas)
        for number, replica in enumerate(replicas):
            if joins:
                state = (await self._arrival(node).fetch(replica.state, _unseen, number)).state
                await replica.settle(state)
                lineages[number] = state.lineage
            else:
                await replica.settle()
        present = Present(
            node,
            replicas[0].codec,
            lambda: [r.place for r in replicas],
            joins,
            manifest.run_id,
            "island" if trains else "server",
        )
        presence, wiring = present.presence, present.wiring

        def behind(fragment: int, ending: Ending, peers: tuple[PeerId, ...]) -> None:
            wiring.spawn(self._catch_up(self.running[node.me], fragment, ending))

        def came_or_went(peer: PeerId, what: str, why: str) -> None:
            if conductor is not None:
                wiring.spawn(conductor.look_again())

        hooks = Hooks(
            applied=lambda certificate, exchange: _note_speeds(present),
            behind=behind,
            peer=came_or_went,
        )
        swarm = Swarm(
            [
                Chain(
                    replace(wiring, codec=replica.codec),
                    replica,
                    rules_of(manifest, replica),
                    presence,
                    hooks,
                    keep_rounds=KEPT,
                    known_lineage=lineage,
                    new_identity=joins,
                )
                for replica, lineage in zip(replicas, lineages, strict=True)
            ]
        )
        for chain, replica in zip(swarm.chains, replicas, strict=True):
            if replica.certificate is not None:
                chain.ledger.add(replica.certificate, {})
        StateServer(
            transport,
            manifest.run_id,
            lambda fragment: replicas[fragment].standing,
            still=swarm.still,
            offload=inline,
            fragments=len(replicas),
        )
        work: list[Coroutine[Any, Any, None]] = [swarm.run()]
        conductor: Conductor | None = None
        if island is not None:
            conductor = Conductor(
                manifest, node.me, island, replicas, layout, EventLog(), None, _nothing, joins,
                swarm=swarm,
            )  # fmt: skip
            work += [conductor.run(), island.trainer.run()]
        others = [other.present.presence for other in self.running.values()]
        task = self.group.create_task(present.live(others, *work))
        trainer = island.trainer if island is not None else None
        self.running[node.me] = Member(node, present, swarm, replicas, vectors, trainer, task)

    def _is_over(self, node: Node) -> bool:
        """Whether an island is to take no more inner steps."""
        if self.world.scenario.by_steps:
            return self.world.done
        place = self.running[node.me].replicas[0].place
        return is_over(self.manifest, place.round, place.work)

    def _arrival(self, node: Node) -> Arrival:
        loop = asyncio.get_running_loop()
        return Arrival(
            node.transport,
            self.manifest.run_id,
            self.founders,
            [peer for peer in self.running if peer != node.me],
            lambda: EPOCH_S + loop.time(),
            lambda announce: None,
            _greet,
            lambda peer, error: None,
            inline,
            len(self.layout.cuts),
        )

    async def _catch_up(self, member: Member, fragment: int, ending: Ending) -> None:
        """Replaying does not help: take the others' state of a fragment."""
        chain, replica = member.swarm.chains[fragment], member.replicas[fragment]
        if chain.following.approach.downloading:
            return
        vectors = [torch.empty_like(vector) for vector in replica.state]
        with chain.following.downloading() as approach:
            arrival = self._arrival(member.node)
            state = (await arrival.fetch(vectors, approach.progress, fragment)).state
            keep = "all" if ending is Ending.FORKED else "local"
            jump = partial(replica.jump, vectors, state, keep=keep)
            await chain.move(
                jump, state.place, state.certificate, state.lineage,
                diverged=ending is Ending.DIVERGED,
            )  # fmt: skip

    async def over(self) -> None:
        """Wait until the run's rounds are done, or its inner steps where these are what counts."""
        if not self.world.scenario.by_steps:
            await self._until(self._at_rest)
            return
        await self._until(lambda: self.world.done)
        with contextlib.suppress(TimeoutError):  # what is out may wait for one that has stopped
            async with asyncio.timeout(GRACE_S):
                await self._until(self._at_rest)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - virtual time costs nothing
            await asyncio.sleep(self.world.scenario.step_s)

    def _at_rest(self) -> bool:
        """Whether nobody has anything left to do."""
        trainers = (member.trainer for member in self.running.values())
        begun = [one for one in trainers if one is not None and one.begun]
        return bool(begun) and all(one.at_rest for one in begun)

    def views(self) -> list[Tensor]:
        """What the run has come to: what all share, or the mean of islands that share little."""
        if self.world.scenario.mode not in ("sparta", "btm"):
            return [torch.cat([replica.base for replica in self.furthest.replicas])]
        nodes = list(self.world.nodes.values())
        weights = [float(node.steps) or 1.0 for node in nodes]
        return [merged_branches([node.learner.params() for node in nodes], weights)]

    @property
    def furthest(self) -> Member:
        """Who has seen the newest round."""
        return max(self.running.values(), key=lambda member: member.replicas[0].place.round)

    async def replace(self, gone: Node) -> None:
        """Kill an island; a new one takes its text, and the state that the others have."""
        await self.running.pop(gone.me).end()  # first: it is not to hear of its own end
        self.world.kill(gone)
        newcomer = self.world.add(gone.number % self.world.scenario.islands)
        await self.start(newcomer, joins=True)


async def certified(world: World) -> None:
    """Certified rounds until the run is over."""
    one = world.scenario
    if one.mode in ("server", "fedavg"):
        for _ in range(one.owners or 1):
            world.add_server()
    async with asyncio.TaskGroup() as group:
        members = Members(world, group)
        for server in world.servers:
            await members.start(server, trains=False)
        for me in world.members:
            await members.start(world.nodes[me])

        world.views = members.views
        churn = group.create_task(_churn(world, members)) if one.churn else None
        expected = world.rounds * one.inner_steps * one.step_s * max(1.0, one.straggler_factor)
        patience = PATIENCE * expected + 600.0
        try:
            async with asyncio.timeout(patience):
                await members.over()
        except TimeoutError:
            raise _still(world, members, patience) from None
        if churn is not None:
            churn.cancel()
        world.notes["rounds"] = members.furthest.replicas[0].place.round
        for member in members.running.values():
            await member.end()


def _still(world: World, members: Members, seconds: float) -> OperatorError:
    done = members.furthest.replicas[0].place.round
    of = f"{done} of {members.manifest.rounds.total_rounds} rounds were"
    if world.scenario.by_steps:
        of = f"{world.total_steps} of {world.budget} inner steps were taken, {done} rounds"
    return bad_config(
        "the simulated swarm does not come to its end",
        f"{of} committed in {seconds:,.0f} virtual seconds",
        "give it faster links, or less churn or loss",
    )


async def _churn(world: World, members: Members) -> None:
    one = world.scenario
    every = 10.0 / (one.churn * one.islands) * one.inner_steps * one.step_s
    while True:
        await asyncio.sleep(every)
        await members.replace(world.nodes[world.random.choice(world.members)])
        world.notes["replaced"] = world.notes.get("replaced", 0) + 1


def _note_speeds(present: Present) -> None:
    stats, usual = present.node.transport.stats, present.node.world.scenario.bandwidth
    present.presence.note(
        upload=stats.upload.read() or usual, download=stats.download.read() or usual
    )


def _unseen(done: int, total: int, sources: int) -> None:
    """Nobody watches a newcomer's download."""


async def _nothing(applied: Applied) -> None:
    """There is nothing to report, and no checkpoint."""


async def _greet(peer: PeerId) -> None:
    """All are known."""
