"""A simulated swarm, by the code that runs on the wire.

Each island is what ``node start`` makes of a run (:mod:`node.simulate.run`): certified rounds
(:class:`gossip.chain.chain.Chain`) or exchanges in pairs (:class:`gossip.pairs.roamer.Roamer`), the
outer state (:mod:`node.replicas.replica`), and a conductor. Newcomers download the state from the
others, as there. Only the inner steps are the simulation's (:mod:`node.simulate.trainer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from bootstrap.manifest_gossip import PAIRED
from bootstrap.state.server import StateServer
from bootstrap.validation import bad_config
from diloco.federated import merged_branches
from gossip.catchup.lineage import Lineage
from gossip.catchup.replay import Ending
from gossip.chain.swarm import Swarm
from gossip.exchange.exchange import Exchange
from gossip.hooks import Hooks
from gossip.pairs.rounded import Rounded
from gossip.pairs.swarm import Pairs
from node.conductor import Conductor
from node.entry.arrival import Arrival
from node.entry.downloading import take_newer, take_state
from node.island.beginning import Beginning
from node.member import Origin, arrival_of, state_server, swarm_of
from node.modes import is_over
from node.monitor.event_log import EventLog
from node.replicas.replica import OuterReplica
from node.reports.codecs import CodecNews
from node.run_rules import replicas_of
from node.simulate.churn import Churn
from node.simulate.learner import layout_of
from node.simulate.meetings import Meetings
from node.simulate.presence import EPOCH_S, Present
from node.simulate.run import manifest_of
from node.simulate.trainer import Simulated, Trainer
from node.simulate.world import Node, World
from node.trainer.channel import Applied
from node.trainer.shared import SharedVectors
from protocols.errors import OperatorError
from protocols.identity import PeerId
from protocols.memory.virtual_time import inline
from protocols.messages import Certificate

T = TypeVar("T")

PATIENCE = 5.0  # times what it should take; after that a swarm is stuck and the run fails
LEAST_S = 600.0  # the least patience, however little it should take
ROUND_TRIPS = 5  # of an exchange: announcements, plan, slices, merged parts, votes
LOOK_S = 60.0  # between two looks whether anything moves
MANY = 1_000_000  # rounds, where the run is over by its inner steps
KEPT = 64  # rounds, for those who missed some
GRACE_S = 10.0  # for what is on its way when the last inner step is taken
WAIT_S = 1.0  # for a round's outcome where islands meet at will; then inner steps go on


@dataclass
class Member:
    """One that is running: an island, or a server, which has no trainer."""

    node: Node
    present: Present
    replicas: tuple[OuterReplica, ...]
    vectors: SharedVectors
    trainer: Trainer | None
    swarm: Swarm | Pairs = field(init=False)
    server: StateServer = field(init=False)
    conductor: Conductor | None = None
    task: asyncio.Task[None] = field(init=False)

    async def end(self) -> None:
        """As a kill would."""
        self.task.cancel()
        await asyncio.wait([self.task])
        await self.server.aclose()
        self.vectors.close()


class Members:
    """All of a simulated swarm."""

    def __init__(self, world: World, group: asyncio.TaskGroup) -> None:
        one = world.scenario
        self.world, self.group = world, group
        whole = one.rounds * one.inner_steps
        counted = whole if one.each_step else world.rounds
        self.manifest = manifest_of(one, MANY if one.by_steps else counted)
        self.layout = layout_of(one)
        self.founders = tuple(sorted([*world.members, *(one.me for one in world.servers)]))
        self.running: dict[PeerId, Member] = {}
        in_pairs = one.mode in PAIRED
        self.meetings = Meetings(self.layout.size) if in_pairs else None

    async def start(self, node: Node, *, trains: bool = True, joins: bool = False) -> None:
        """Begin a member's part, from the beginning or from the others' state."""
        manifest = self.manifest
        wait_s = WAIT_S if self.world.scenario.at_will else math.inf
        over = partial(self._is_over, node)
        island = Simulated(node, manifest, self.layout, wait_s, over) if trains else None
        vectors = island.vectors if island is not None else SharedVectors.create(self.layout.size)
        vectors.tensors()[0].copy_(self.world.start)
        replicas = self._replicas(node, vectors, trains=trains)
        arrival = self._arrival(node, lambda: [peer for peer in self.running if peer != node.me])
        origin = await self._settled(replicas, arrival if joins else None)
        present = Present(
            node,
            replicas[0].codec,
            lambda: [r.place for r in replicas],
            joins,
            manifest.run_id,
            "island" if trains else "server",
        )
        trainer = island.trainer if island is not None else None
        member = Member(node, present, replicas, vectors, trainer)
        events = self.world.decisions.log_of(node.born, asyncio.get_running_loop().time)
        member.swarm = swarm = swarm_of(
            manifest,
            present.wiring,
            replicas,
            present.presence,
            *self._hooks(member, events),
            origin,
            keep_rounds=KEPT,
        )
        member.server = state_server(
            node.transport, manifest, swarm, replicas, still=swarm.still, offload=inline
        )
        work: list[Coroutine[Any, Any, None]] = [swarm.run()]
        if island is not None:
            member.conductor = Conductor(
                manifest, node.me, island, replicas, self.layout, events,
                Beginning(manifest, joined=joins), _nothing, swarm,
            )  # fmt: skip
            if joins and self.meetings is not None:  # in rounds it follows the others meanwhile
                newer = partial(take_newer, swarm, replicas, arrival, lambda: _unseen)
                member.conductor.refresh = lambda: self._try(newer())
            work += [member.conductor.run(), island.trainer.run()]
        others = [other.present.presence for other in self.running.values()]
        member.task = self.group.create_task(present.live(others, *work))
        self.running[node.me] = member

    def _replicas(
        self, node: Node, vectors: SharedVectors, *, trains: bool
    ) -> tuple[OuterReplica, ...]:
        """A member's outer state; there is nothing in it yet."""
        manifest, layout = self.manifest, self.layout
        try:
            return replicas_of(
                manifest, node.me, layout, vectors, inline, self.founders, trains=trains
            )
        except ValueError as error:
            what = f"rank {manifest.outer.rank} is too large"
            raise bad_config(what, str(error), "take a smaller one: --set rank=4") from error

    async def _settled(self, replicas: Sequence[OuterReplica], arrival: Arrival | None) -> Origin:
        """Stand where the run begins, or where the others stand, by their ``arrival``."""
        lineages: list[Lineage | None] = []
        took: list[float] = []
        loop = asyncio.get_running_loop()
        for number, replica in enumerate(replicas):
            if arrival is None:
                await replica.settle()
                lineages.append(None)
                continue
            come = None
            while come is None:  # as whoever starts a node would, which ends with the error
                began = loop.time()
                come = await self._try(arrival.fetch(replica.state, _unseen, number))
            took.append(loop.time() - began)
            await replica.settle(come.state)
            lineages.append(come.state.lineage)
        joins = arrival is not None
        return Origin(joins, joins, lineages, took)

    def _hooks(self, member: Member, events: EventLog) -> tuple[Hooks, Callable[[Rounded], None]]:
        """What is to happen as a member moves on, and in pairs after each round."""
        codec_news, spawn = CodecNews(events), member.present.wiring.spawn

        def behind(fragment: int, ending: Ending) -> None:
            spawn(self._catch_up(member, fragment, ending))

        def came_or_went(peer: PeerId, what: str, why: str) -> None:
            if member.conductor is not None:
                spawn(member.conductor.look_again())

        def moved() -> None:
            _note_speeds(member.present)
            for chain in member.swarm.chains:
                codec_news.look(chain)

        def applied(certificate: Certificate, exchange: Exchange | None) -> None:
            moved()
            self.world.decisions.committed(certificate)

        def rounded(one: Rounded) -> None:
            moved()
            assert self.meetings is not None
            self.meetings.count(one)

        return Hooks(applied=applied, behind=behind, peer=came_or_went), rounded

    def _is_over(self, node: Node) -> bool:
        """Whether an island is to take no more inner steps."""
        if self.world.scenario.by_steps:
            return self.world.done
        member = self.running.get(node.me)
        if member is None:  # it is being replaced
            return True
        place = member.replicas[0].place
        return is_over(self.manifest, place.round, place.work)

    def _arrival(self, node: Node, ask: Callable[[], Sequence[PeerId]]) -> Arrival:
        """Where a node downloads, from those that it may ``ask``."""
        loop = asyncio.get_running_loop()
        return arrival_of(self.manifest)(
            transport=node.transport,
            run=self.manifest.run_id,
            founders=self.founders,
            ask=ask,
            wall=lambda: EPOCH_S + loop.time(),
            learned=lambda announce: None,
            greet=_greet,
            untrue=lambda peer, error: None,
            offload=inline,
            fragments=len(self.layout.cuts),
            dice=random.Random(f"{self.world.scenario.seed} {node.born}"),
        )

    async def _catch_up(self, member: Member, fragment: int, ending: Ending) -> None:
        """Replaying does not help: take the others' state of a fragment."""
        swarm = member.swarm
        assert isinstance(swarm, Swarm)  # an island that gossips is never behind
        chain, replica = swarm.chains[fragment], member.replicas[fragment]
        if chain.following.approach.downloading:
            return
        arrival = self._arrival(member.node, lambda: swarm.membership.alive(swarm.now()))
        await self._try(take_state(chain, replica, arrival, ending, _unseen))

    async def _try(self, download: Coroutine[Any, Any, T]) -> T | None:
        """Like a node, go on where a download fails: it is tried again later."""
        try:
            return await download
        except OperatorError:
            notes = self.world.notes
            notes["downloads_in_vain"] = notes.get("downloads_in_vain", 0) + 1
            return None

    async def over(self) -> None:
        """Wait until the run's rounds are done, or its inner steps where these are what counts."""
        if not self.world.scenario.by_steps:
            await self._until(self._at_rest)
            return
        await self._until(lambda: self.world.done)
        with contextlib.suppress(TimeoutError):  # a round may wait for one that has stopped
            async with asyncio.timeout(GRACE_S):
                await self._until(self._at_rest)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Raises TimeoutError, which says so, where the islands wait for one another."""
        loop, before = asyncio.get_running_loop(), self._moved
        moved = looked = loop.time()
        while not condition():
            await asyncio.sleep(self.world.scenario.step_s)
            if (now := loop.time()) < looked + LOOK_S:
                continue
            looked = now
            if before != (before := self._moved):
                moved = now
            elif now > moved + self.patience(1):
                text = f"nothing has moved for {now - moved:,.0f}: the islands wait for one another"
                raise TimeoutError(text)

    @property
    def _moved(self) -> tuple[float, ...]:
        """What changes as long as anybody has something to do."""
        places = [replica.place.round for one in self.running.values() for replica in one.replicas]
        return self.world.total_steps, self.world.bytes_a_parameter(), *places

    def patience(self, rounds: int) -> float:
        """Virtual seconds that this many rounds may take."""
        one, nodes = self.world.scenario, [*self.world.nodes.values(), *self.world.servers]
        # a model shorter than a chunk has one owner, whose link carries it for each island twice
        bytes_ = 2 * 4 * self.layout.size * len(nodes)
        transfer = bytes_ / min(node.bandwidth for node in nodes) + ROUND_TRIPS * 2 * one.latency
        exchanges = one.inner_steps if one.each_step else 1
        steps = one.inner_steps * one.step_s * max(1.0, one.straggler_factor)
        return PATIENCE * rounds * (steps + exchanges * transfer) + LEAST_S

    def _at_rest(self) -> bool:
        """Whether nobody has anything left to do."""
        trainers = (member.trainer for member in self.running.values())
        begun = [one for one in trainers if one is not None and one.begun]
        return bool(begun) and all(one.at_rest for one in begun)

    def views(self) -> list[Tensor]:
        """What the run has come to: what all share, or the mean of islands that share little."""
        if self.meetings is not None:
            return [torch.cat([r.base for r in member.replicas]) for member in self.islands]
        if self.world.scenario.mode not in ("sparta", "btm"):
            return [torch.cat([replica.base for replica in self.furthest.replicas])]
        nodes = list(self.world.nodes.values())
        steps = [float(node.steps) for node in nodes]
        weights = steps if any(steps) else [1.0] * len(nodes)  # who downloads has nothing yet
        return [merged_branches([node.learner.params() for node in nodes], weights)]

    @property
    def islands(self) -> list[Member]:
        """Who is running and trains."""
        return [member for member in self.running.values() if member.trainer is not None]

    @property
    def progress(self) -> float:
        """The rounds that have passed, of those that the scenario asks for.

        Where inner steps make the end, or all merge but once, these tell; who is replaced takes
        none for a while, so that rounds may be ahead of them.
        """
        made = self.furthest.replicas[0].place.round / self.manifest.rounds.total_rounds
        return min(1.0, max(self.world.share, made)) * self.world.scenario.rounds

    @property
    def furthest(self) -> Member:
        """Who has seen the newest round."""
        return max(self.running.values(), key=lambda member: member.replicas[0].place.round)

    async def replace(self, gone: Node) -> None:
        """Kill an island; a new one takes its place, and the state that the others have."""
        await self.running.pop(gone.me).end()  # first: it is not to hear of its own end
        came = self.world.replace(gone)
        del gone  # so that it is in memory no longer
        await self.start(came, joins=True)


async def live(world: World) -> None:
    """Run the swarm until the run is over."""
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
        churn = Churn(world, members) if one.churn else None
        try:
            async with asyncio.timeout(members.patience(world.rounds)):
                await members.over()
        except TimeoutError as error:
            raise _still(world, members, str(error)) from None
        if churn is not None:
            churn.end()
        world.notes["rounds"] = members.furthest.replicas[0].place.round
        world.notes |= world.decisions.notes()
        if members.meetings is not None:
            world.notes |= members.meetings.notes(members.views())
        if members.meetings is not None or one.most_steps:
            steps = [one.trainer.target_steps for one in members.islands if one.trainer is not None]
            world.notes["last_inner_steps"] = sum(steps) / len(steps)
        for member in members.running.values():
            await member.end()


def _still(world: World, members: Members, why: str) -> OperatorError:
    seconds = asyncio.get_running_loop().time()
    done = members.furthest.replicas[0].place.round
    of = f"{done} of {members.manifest.rounds.total_rounds} rounds were"
    if world.scenario.by_steps:
        of = f"{world.total_steps} of {world.budget} inner steps were taken, {done} rounds"
    return bad_config(
        "the simulated swarm does not come to its end",
        f"{of} committed in {seconds:,.0f} virtual seconds" + (f", and {why}" if why else ""),
        "give it faster links, or less churn or loss",
    )


def _note_speeds(present: Present) -> None:
    stats, usual = present.node.transport.stats, present.node.bandwidth
    present.presence.note(
        upload=stats.upload.read() or usual, download=stats.download.read() or usual
    )


def _unseen(done: int, total: int, sources: int) -> None:
    """Nobody watches a download."""


async def _nothing(applied: Applied) -> None:
    """There is nothing to report, and no checkpoint."""


async def _greet(peer: PeerId) -> None:
    """All are known."""
