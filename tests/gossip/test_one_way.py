"""A member none of whose calls is answered, while everything that others send it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from catching_up_kit import Scene, Stateful, at_one_place
from exchange_kit import until
from simulated_swarm import Member, SimulatedSwarm, simulated_swarm
from test_trial import ONES, announce
from toy_replica import ToyReplica

from gossip.plans.rules import Rules
from protocols.bodies import Incoming
from protocols.errors import TransferStalled, TransportError, Unreachable, Why
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import MemoryTransport

pytestmark = pytest.mark.usefixtures("remembered_signatures")

DARK_S = 90.0  # somebody is mute after 16 s, and a few go on without a majority after 30 s more


class Unanswered:
    """The transport of a member whose calls may come to nothing, sooner or later."""

    def __init__(self, inner: MemoryTransport, swarm: OneWay) -> None:
        self._inner, self._swarm = inner, swarm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def _fail(self, peer: str, timeout: float) -> None:
        if self._inner.peer_id in self._swarm.unanswered:
            await asyncio.sleep(timeout if self._swarm.stalls else 0.02)
            raise self._error(peer)

    def _error(self, peer: str) -> TransportError:
        return TransferStalled(peer) if self._swarm.stalls else Unreachable(peer, Why.REFUSED)

    async def call(self, peer: PeerId, *body: Any, timeout: float, **how: Any) -> bytes:
        await self._fail(peer, timeout)
        return await self._inner.call(peer, *body, timeout=timeout, **how)

    async def push(self, peer: PeerId, *body: Any, timeout: float) -> bytes:
        await self._fail(peer, timeout)
        return await self._inner.push(peer, *body, timeout=timeout)

    @asynccontextmanager
    async def pull(
        self, peer: PeerId, *header: Any, timeout: float, **how: Any
    ) -> AsyncIterator[Incoming]:
        await self._fail(peer, timeout)
        async with self._inner.pull(peer, *header, timeout=timeout, **how) as body:
            yield body

    async def dial(self, address: str, expected: PeerId | None = None) -> PeerId:
        await self._fail(address, 5.0)
        return await self._inner.dial(address, expected)


@dataclass
class OneWay(SimulatedSwarm):
    """A swarm of such members."""

    strangers: bool = True
    stalls: bool = False  # else calls are refused at once
    unanswered: set[PeerId] = field(default_factory=set)

    def rules_of(self, replica: ToyReplica) -> Rules:
        return replace(self.rules, strangers=self.strangers)

    def wired(self, identity: Identity, transport: MemoryTransport) -> Any:
        return Unanswered(transport, self)


async def mended(swarm: OneWay, members: list[Member], seconds: float) -> None:
    """The link is whole: all go on from one place soon."""
    swarm.unanswered.clear()
    far = 3 + max(member.replica.place.round for member in members)
    await until(lambda: at_one_place(members) and members[0].replica.place.round >= far, seconds)
    swarm.agree()


@pytest.mark.parametrize("stalls", [False, True])
@pytest.mark.parametrize("strangers", [False, True])
def test_the_others_go_on_and_it_does_not_go_on_alone(strangers: bool, stalls: bool) -> None:
    async def main() -> None:
        async with simulated_swarm(
            3, made=OneWay, strangers=strangers, stalls=stalls, kind=Stateful, size=6000,
            think=(2.0, 2.2),
        ) as swarm:  # fmt: skip
            scene = Scene(swarm)
            for member in scene.founders:
                scene.serve(member)
            await swarm.committed(2)
            one, *others = scene.founders
            swarm.unanswered.add(one.peer)
            stood = one.replica.place.round
            await asyncio.sleep(DARK_S)
            assert min(other.replica.place.round for other in others) >= stood + 30
            swarm.agree()  # of what it has decided meanwhile, if anything
            await mended(swarm, scene.founders, 30.0)

    virtual_time.run(main())


def test_it_comes_back_where_names_that_say_nothing_are_in_office_too() -> None:
    async def main() -> None:
        async with simulated_swarm(
            2, made=OneWay, kind=Stateful, size=6000, think=(1.0, 1.1)
        ) as swarm:
            scene = Scene(swarm)
            for member in scene.founders:
                scene.serve(member)
            talk = asyncio.create_task(announce(swarm, ONES[:2], 1000.0))
            await swarm.committed(4)
            swarm.unanswered.add(scene.founders[0].peer)
            await asyncio.sleep(DARK_S)
            await mended(swarm, scene.founders, 150.0)
            talk.cancel()

    virtual_time.run(main())
