"""Newcomers whose links need longer for a round than the others: they get in all the same."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import pytest
import torch
from exchange_kit import until
from simulated_swarm import RUN, Member, SimulatedSwarm, ToyReplica, simulated_swarm

from bootstrap.state import StateServer, state_digest
from gossip.holding import FIRST_S, MARGIN_S, SHARE, SLACK
from node.arrival import Arrival
from node.replica import OuterState
from protocols import virtual_time
from protocols.identity import Identity, PeerId
from protocols.messages import Certificate

pytestmark = pytest.mark.usefixtures("remembered_signatures")

SIZE = 70_000
ROUND_S = 0.12  # of a lone member's rounds
BYTES = 8 * SIZE  # of the state: parameters and what the outer optimizer keeps
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

    async def jump(self, theta: torch.Tensor, state: OuterState) -> None:
        self.theta, self.sent = theta, theta.clone()
        self._place, self._roster = replace(state.place, state=self.digest()), state.roster
        self.begins, self.history = state.place.round, []


class Scene:
    """A swarm of fast members, and newcomers by links of their own."""

    def __init__(self, swarm: SimulatedSwarm) -> None:
        self.swarm = swarm
        swarm.rules = replace(swarm.rules, state_bytes=BYTES)
        swarm.on_behind = self.download
        self.founders = list(swarm.members.values())
        self.downloads = 0

    def serve(self, member: Member) -> None:
        def current(fragment: int) -> tuple[int, bytes, list[torch.Tensor]]:
            replica = member.replicas[fragment]
            assert isinstance(replica, Stateful)
            return replica.place.round, replica.place.state, replica.state

        StateServer(
            member.swarm.wiring.transport, RUN, current, still=member.swarm.still,
            offload=virtual_time.inline,
            fragments=len(member.replicas),
        )  # fmt: skip

    def join(self, identity: Identity, rate: float) -> Member:
        replicas = [
            Stateful(identity.peer_id, self.swarm.roster, SIZE, self.swarm.codec, fragment)
            for fragment in range(self.swarm.fragments)
        ]
        member = self.swarm.start(
            identity, upload=rate, replicas=replicas, status="joining", new_identity=True
        )
        self.serve(member)
        return member

    async def download(self, member: Member, fragment: int) -> None:
        chain, replica = member.swarm.chains[fragment], member.replicas[fragment]
        assert isinstance(replica, Stateful)
        if chain.following.approach.downloading:
            return

        async def greet(peer: PeerId) -> None:
            return None

        wiring = member.swarm.wiring
        arrival = Arrival(
            wiring.transport, RUN, self.founders[0].peer,
            member.swarm.membership.alive(member.swarm.now()),
            lambda: 1_000_000.0 + asyncio.get_running_loop().time(), lambda announce: None, greet,
            lambda peer, error: member.rejected.append((peer, str(error))), wiring.offload,
            self.swarm.fragments,
        )  # fmt: skip
        vectors = [torch.empty_like(vector) for vector in replica.state]
        with chain.following.downloading() as approach:
            state = (await arrival.fetch(vectors, approach.progress, fragment)).state
            self.downloads += 1
            await chain.move(
                partial(replica.jump, vectors[0], state),
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


@asynccontextmanager
async def scene(count: int = 1, **options: Any) -> AsyncIterator[Scene]:
    options = {"think": (ROUND_S, ROUND_S)} | options
    async with simulated_swarm(count, size=SIZE, kind=Stateful, **options) as swarm:
        made = Scene(swarm)
        for member in made.founders:
            made.serve(member)
        yield made
        swarm.agree()


def played(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    virtual_time.run(story())


def bound(seconds: float) -> float:
    """What all waits together may take in so many seconds, for a lone member."""
    return FIRST_S + SHARE * seconds


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_a_link_that_is_slower_than_the_rounds_of_a_lone_member(codec: str) -> None:
    async def story() -> None:
        async with scene(codec=codec) as swarm:
            await asyncio.sleep(5.0)
            newcomer = swarm.join(NEWCOMERS[0], BYTES / (20 * ROUND_S))
            await until(lambda: swarm.are_members(newcomer), 30.0)
            assert swarm.longest() < 10.0
            before = newcomer.replica.counted
            await asyncio.sleep(15.0)
            assert newcomer.replica.counted > before + 5
            assert newcomer.behind.count("FAR") < 4
            assert newcomer.rejected == []

    played(story)


def test_two_newcomers() -> None:
    async def story() -> None:
        async with scene(codec="fp32") as swarm:
            await asyncio.sleep(5.0)
            newcomers = [swarm.join(one, BYTES / (20 * ROUND_S)) for one in NEWCOMERS[:2]]
            await until(lambda: swarm.are_members(*newcomers), 40.0)
            assert swarm.longest() < 10.0

    played(story)


def test_in_fragments() -> None:
    async def story() -> None:
        async with scene(codec="int4", fragments=2) as swarm:
            await asyncio.sleep(5.0)
            newcomer = swarm.join(NEWCOMERS[0], BYTES / (20 * ROUND_S))
            await until(lambda: swarm.are_members(newcomer), 40.0)
            assert swarm.longest() < 10.0

    played(story)


def test_among_several_it_is_waited_for_until_its_work_is_there() -> None:
    """In office the others could go on without its vote: it would never come to contribute."""

    async def story() -> None:
        async with scene(codec="fp32") as swarm:
            fast = [swarm.join(one, 12.5e6) for one in NEWCOMERS[1:3]]
            await until(lambda: swarm.are_members(*fast))
            newcomer = swarm.join(NEWCOMERS[0], BYTES / (10 * ROUND_S))
            await until(lambda: swarm.are_members(newcomer), 60.0)
            before = newcomer.replica.counted
            await asyncio.sleep(20.0)
            assert newcomer.replica.counted - before >= 4  # as often as the credit allows

    played(story)


def test_a_link_without_hope_costs_the_others_nothing() -> None:
    async def story() -> None:
        async with scene(codec="fp32") as swarm:
            await asyncio.sleep(5.0)
            alone = len(swarm.commits) / 5.0
            newcomer = swarm.join(NEWCOMERS[0], BYTES / 40.0)
            done, asked = len(swarm.commits), 0.0
            for _ in range(70):
                await asyncio.sleep(1.0)
                asked = max(asked, newcomer.swarm.status.behind_s)
            assert asked > bound(75.0)
            assert newcomer.peer not in swarm.founders[0].replica.roster
            assert len(swarm.commits) - done > 0.9 * 70.0 * alone
            assert swarm.longest() < 3 * ROUND_S

    played(story)


@pytest.mark.parametrize("liars", [1, 6])
@pytest.mark.parametrize("seconds", [3.0, 0.05])
def test_liars_cost_no_more_than_the_bound(liars: int, seconds: float) -> None:
    """They say for ever that they are nearly there."""

    async def story() -> None:
        async with scene(codec="int4") as swarm:
            await asyncio.sleep(5.0)
            alone = len(swarm.commits) / 5.0
            for identity in NEWCOMERS[:liars]:
                member = swarm.join(identity, 12.5e6)
                following = member.swarm.chains[0].following
                following.asks = lambda: seconds  # type: ignore[method-assign]
                following.begin = lambda peers: None  # type: ignore[method-assign]
            done = len(swarm.commits)
            await asyncio.sleep(100.0)
            lost = 100.0 - (len(swarm.commits) - done) / alone
            assert lost < bound(100.0) * 1.05 + 2.0
            if liars == 1 or seconds != 3.0:  # else they take turns
                assert swarm.longest() < SLACK * 3.0 + MARGIN_S + 3 * ROUND_S
            if liars == 1:  # after 10, 40 and 160 s
                assert lost < 3 * (SLACK * 3.0 + MARGIN_S) + 2.0

    played(story)


@pytest.mark.parametrize("role", ["seed", "observer"])
def test_nobody_waits_for_who_only_follows(role: str) -> None:
    async def story() -> None:
        async with scene(codec="fp32") as swarm:
            await asyncio.sleep(5.0)
            alone = len(swarm.commits) / 5.0
            follower = swarm.join(NEWCOMERS[0], BYTES / (20 * ROUND_S))
            follower.swarm.presence.note(role=role)
            done, asked = len(swarm.commits), 0.0
            for _ in range(200):
                await asyncio.sleep(0.1)
                asked = max(asked, follower.swarm.status.behind_s)
            assert asked == 0.0
            assert len(swarm.commits) - done > 0.9 * 20.0 * alone
            assert follower.replica.place.round > done  # it follows, by downloads
            follower.swarm.chains[0]._say_how_far = lambda: None  # type: ignore[method-assign]
            follower.swarm.presence.note(behind_s=1.0)  # and if it said so all the same
            done = len(swarm.commits)
            await asyncio.sleep(20.0)
            assert len(swarm.commits) - done > 0.9 * 20.0 * alone

    played(story)


def test_who_keeps_up_is_not_waited_for() -> None:
    """And replays what it missed, however much that was, unless the state is less."""

    async def story() -> None:
        async with scene(codec="int4", think=(0.3, 0.3)) as swarm:
            await asyncio.sleep(5.0)
            newcomer = swarm.join(NEWCOMERS[0], 12.5e6)
            asked = 0.0

            def is_member() -> bool:
                nonlocal asked
                asked = max(asked, newcomer.swarm.status.behind_s)
                return swarm.are_members(newcomer)

            await until(is_member)
            assert asked == 0.0
            assert swarm.longest() < 10 * ROUND_S

    played(story)


@pytest.mark.parametrize("tenth", range(12))
def test_two_halves_that_meet_at_any_moment_are_one_swarm_again(tenth: int) -> None:
    """Each may commit a round while it downloads the other's state, and so be the heavier one."""

    async def story() -> None:
        async with scene(codec="fp32", think=(1.0, 1.1), uploads=[1e6]) as swarm:
            members = [*swarm.founders, *(swarm.join(one, 1e6) for one in NEWCOMERS[:3])]
            await until(lambda: swarm.are_members(*members[1:]), 30.0)
            peers, before = [member.peer for member in members], swarm.downloads
            swarm.swarm.network.partition(set(peers[:2]), set(peers[2:]))
            await asyncio.sleep(15.0 + tenth / 10)
            swarm.swarm.network.heal()
            counted = [member.replica.counted for member in members]

            def together() -> bool:
                heads = {member.replica.place.previous for member in members}
                since = [member.replica.counted for member in members]
                return len(heads) == 1 and all(n > o for n, o in zip(since, counted, strict=True))

            await until(together, 45.0)
            assert swarm.downloads - before < 8

    played(story)
