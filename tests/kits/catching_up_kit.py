"""A swarm of toy members whose state can be downloaded, and newcomers by links of their own."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from simulated_swarm import Member, SimulatedSwarm, seed_of, simulated_swarm
from toy_replica import RUN, ToyReplica

from bootstrap.state import Sharing, StateServer, state_digest
from gossip.catchup.replay import Ending
from gossip.chain.chain import Chain
from node.entry.arrival import Arrival
from node.entry.targets import beyond
from node.replicas.replica import ChainStanding
from protocols.errors import OperatorError
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.messages import Certificate

SIZE = 70_000
BYTES = 8 * SIZE  # of the state: parameters and what the outer optimizer keeps
ROUND_S = 0.12  # of a lone member's rounds
NEWCOMERS = [Identity.from_seed(bytes([i]) * 32) for i in b"nopqrs"]


class Stateful(ToyReplica):
    """One whose state can be downloaded: parameters, and as much again."""

    def digest(self) -> bytes:
        return state_digest(self.state)[0]

    @property
    def state(self) -> list[torch.Tensor]:
        return [self.theta, torch.ones(len(self.theta))]

    @cached_property
    def times(self) -> list[float]:
        return []

    async def apply(
        self, certificate: Certificate, parts: dict[tuple[int, int], torch.Tensor]
    ) -> None:
        await super().apply(certificate, parts)
        self.times.append(asyncio.get_running_loop().time())
        self.means.clear()  # of hundreds of rounds

    async def take(
        self, vectors: Sequence[torch.Tensor], state: ChainStanding, ending: Ending, chain: Chain
    ) -> None:
        """Move to a downloaded state; ``ending`` says why."""
        self.theta, self.sent = vectors[0], vectors[0].clone()
        self._place, self._roster = replace(state.place, state=self.digest()), state.roster
        self.begins, self.history, self.certificate = state.place.round, [], state.certificate


class Scene:
    """A swarm of fast members, and newcomers by links of their own."""

    def __init__(self, swarm: SimulatedSwarm) -> None:
        self.swarm = swarm
        swarm.rules = replace(swarm.rules, state_bytes=8 * swarm.size)
        swarm.on_behind = self.download
        self.founders = list(swarm.members.values())
        self.downloads = 0
        self.sharing: dict[PeerId, Sharing] = {}

    def serve(self, member: Member) -> None:
        def current(fragment: int) -> tuple[int, bytes, list[torch.Tensor]]:
            replica: Any = member.replicas[fragment]
            return replica.place.round, replica.place.state, replica.state

        transport = member.swarm.wiring.transport
        StateServer(
            transport, RUN, current, still=member.swarm.still,
            offload=virtual_time.inline,
            read_by=member.swarm.readers.copied,
            fragments=len(member.replicas),
        )  # fmt: skip
        self.sharing[member.peer] = Sharing(transport, RUN)

    def join(self, identity: Identity, rate: float) -> Member:
        member = self.swarm.start(identity, upload=rate, status="joining", new_identity=True)
        self.serve(member)
        return member

    async def download(self, member: Member, fragment: int, ending: Ending) -> None:
        chain = member.swarm.chains[fragment]
        replica: Any = member.replicas[fragment]
        if chain.following.approach.downloading:
            return

        async def greet(peer: PeerId) -> None:
            return None

        wiring = member.swarm.wiring
        arrival = Arrival(
            transport=wiring.transport,
            run=RUN,
            founders=self.swarm.roster,
            ask=lambda: member.swarm.membership.alive(member.swarm.now()),
            wall=lambda: 1_000_000.0 + asyncio.get_running_loop().time(),
            learned=lambda announce: None,
            greet=greet,
            untrue=lambda peer, error: member.rejected.append((peer, str(error))),
            offload=wiring.offload,
            fragments=self.swarm.fragments,
            dice=random.Random(seed_of(member.peer, fragment, replica.place.round)),
        )
        arrival.sharing = self.sharing[member.peer]
        arrival.wanted = beyond(lambda: replica.place, fragment)
        vectors = [torch.empty_like(vector) for vector in replica.state]
        # whoever was ahead may be gone; the next one who is asks again
        with suppress(OperatorError), chain.following.downloading() as approach:
            arrival.came = approach.came
            state = (await arrival.fetch(vectors, lambda *progress: None, fragment)).state
            self.downloads += 1
            await chain.move(
                lambda: replica.take(vectors, state, ending, chain),
                state.place,
                state.certificate,
                state.lineage,
            )
            member.moved[fragment].set()

    @property
    def commits(self) -> list[float]:
        """When the first founder was through with each round of the first fragment."""
        replica = self.founders[0].replica
        assert isinstance(replica, Stateful)
        return replica.times

    def longest(self) -> float:
        return max(b - a for a, b in itertools.pairwise(self.commits))

    def are_members(self, *newcomers: Member) -> bool:
        """Whether these are in office in all fragments, and something of each was merged."""
        return all(
            newcomer.peer in theirs.roster and mine.counted > 0
            for newcomer in newcomers
            for theirs, mine in zip(self.founders[0].replicas, newcomer.replicas, strict=True)
        )


def at_one_place(members: Sequence[Member]) -> bool:
    """Whether all stand at one place, in each fragment."""
    places = zip(*([r.place.previous for r in m.replicas] for m in members), strict=True)
    return all(len(set(found)) == 1 for found in places)


def merging(islands: Sequence[Member]) -> Callable[[], bool]:
    """Whether more of each is merged than by now, in each fragment."""
    counted = [[replica.counted for replica in member.replicas] for member in islands]
    return lambda: all(
        replica.counted > before
        for member, then in zip(islands, counted, strict=True)
        for replica, before in zip(member.replicas, then, strict=True)
    )


def coming_together(members: Sequence[Member]) -> Callable[[], bool]:
    """Whether all stand at one place, in each fragment, and more of each is merged than by now."""
    merged = merging(members)
    return lambda: at_one_place(members) and merged()


@asynccontextmanager
async def scene(count: int = 1, **options: Any) -> AsyncIterator[Scene]:
    options = {"think": (ROUND_S, ROUND_S), "size": SIZE, "kind": Stateful} | options
    async with simulated_swarm(count, **options) as swarm:
        made = Scene(swarm)
        for member in made.founders:
            made.serve(member)
        yield made
        swarm.agree()


def played(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    virtual_time.run(story())
