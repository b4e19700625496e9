"""Members of one exchange on a simulated network, without rounds around them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from gossip_kit import PLACE, RUN, leader, plan_of

from gossip.exchange.bodies import as_bytes
from gossip.exchange.exchange import Exchange
from gossip.plans.certificate import basis_of
from gossip.plans.validity import PartKey, Shape
from gossip.wiring import Wiring
from protocols.bodies import BufferFeed
from protocols.codecs import RangeCodec
from protocols.errors import RemoteProtocolError, RemoteRefused
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import Link, MemoryNetwork
from protocols.messages import Gram, Part, PartRequest, PartResult, Plan, TransferHeader
from protocols.transport import Feed, Incoming

MEMBERS = [Identity.from_seed(bytes([number]) * 32) for number in range(4)]
LEADER = leader(MEMBERS)

# of the usual exchange
SIZE = 120_000
SHAPE = Shape(SIZE, ("int8",))
CODEC = RangeCodec("int8", dense=SIZE - 1000)
PLAN = plan_of(LEADER, MEMBERS, shape=SHAPE)


@dataclass
class Peer:
    """A member of one exchange, and everything it was told."""

    identity: Identity
    wiring: Wiring
    values: torch.Tensor
    shape: Shape
    exchange: Exchange = field(init=False)
    held_: list[PartResult] = field(default_factory=list)
    faults: list[PeerId] = field(default_factory=list)
    declined_: list[PeerId] = field(default_factory=list)
    lost_: list[PartResult] = field(default_factory=list)
    refusals: list[tuple[PeerId, str]] = field(default_factory=list)
    unpassed_: list[PeerId] = field(default_factory=list)
    unserved_: list[PeerId] = field(default_factory=list)
    mute_: set[PeerId] = field(default_factory=set)  # in rounds before
    late: set[PeerId] = field(default_factory=set)  # have yet to come to the round
    needed_: set[PartKey] = field(default_factory=set)  # whatever later plans ask for
    dropped_: list[PartKey] = field(default_factory=list)
    voted_: list[PartResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.exchange = self.fresh()
        transport = self.wiring.transport
        transport.on_push("slice", self.on_slice, max_length=10**7)
        transport.on_push("merged", self.on_merged, max_length=10**7)
        transport.on_call("slice", self.slice_reached)
        transport.on_call("merged", self.merged_reached)
        transport.on_push("sum", self.on_sum, max_length=10**7)
        transport.on_call("sum", self.sum_reached)
        transport.on_call("bring", self.on_bring)
        transport.on_call("give", self.on_give)
        transport.on_pull("part", self.on_part)

    def fresh(self) -> Exchange:
        """An exchange in which nothing has happened."""
        return Exchange(self.wiring, PLACE, self.shape, self, self)

    @property
    def me(self) -> PeerId:
        return self.identity.peer_id

    def delta(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        return self.values[start:stop]

    def held(self, result: PartResult) -> None:
        self.held_.append(result)

    def fault(self, peer: PeerId, why: str) -> None:
        self.faults.append(peer)

    def declined(self, peer: PeerId, why: str) -> None:
        self.declined_.append(peer)

    def lost(self, result: PartResult) -> None:
        self.lost_.append(result)

    def refused(self, peer: PeerId, error: RemoteProtocolError) -> None:
        self.refusals.append((peer, str(error)))

    def unpassed(self, relay: PeerId) -> None:
        self.unpassed_.append(relay)

    def unserved(self, relay: PeerId) -> None:
        self.unserved_.append(relay)

    def mute(self) -> set[PeerId]:
        return {*self.mute_, *self.unpassed_}

    def doubtful(self) -> frozenset[PeerId]:
        """Nobody is."""
        return frozenset()

    def behind(self, peer: PeerId) -> bool:
        return peer in self.late

    def needed(self) -> set[PartKey]:
        return self.needed_

    def voted_for(self, result: PartResult) -> bool:
        return result in self.voted_

    def dropped(self, key: PartKey) -> None:
        self.dropped_.append(key)

    def weighed(self, gram: Gram) -> None:
        raise AssertionError("nothing is weighed here")

    async def counted(self, sender: PeerId, answer: Awaitable[bytes]) -> bytes:
        try:
            return await answer
        except RemoteProtocolError as error:
            self.refused(sender, str(error))
            raise

    async def on_slice(self, sender: PeerId, header: bytes, incoming: Incoming) -> bytes:
        message = TransferHeader.decode(header)
        return await self.counted(sender, self.exchange.slices.on_slice(sender, message, incoming))

    async def on_merged(self, sender: PeerId, header: bytes, incoming: Incoming) -> bytes:
        message = TransferHeader.decode(header)
        return await self.counted(sender, self.exchange.merged.on_merged(sender, message, incoming))

    async def slice_reached(self, sender: PeerId, body: bytes) -> bytes:
        return await self.exchange.slices.slice_reached(sender, TransferHeader.decode(body))

    async def merged_reached(self, sender: PeerId, body: bytes) -> bytes:
        return await self.exchange.merged.merged_reached(sender, TransferHeader.decode(body))

    async def on_sum(self, sender: PeerId, header: bytes, incoming: Incoming) -> bytes:
        message = TransferHeader.decode(header)
        return await self.counted(sender, self.exchange.slices.on_sum(sender, message, incoming))

    async def sum_reached(self, sender: PeerId, body: bytes) -> bytes:
        return await self.exchange.slices.sum_reached(sender, TransferHeader.decode(body))

    async def on_bring(self, sender: PeerId, body: bytes) -> bytes:
        return await self.exchange.outbox.bring(sender, TransferHeader.decode(body))

    async def on_give(self, sender: PeerId, body: bytes) -> bytes:
        return await self.exchange.slices.give(sender, TransferHeader.decode(body))

    async def on_part(self, sender: PeerId, header: bytes) -> Feed:
        request = PartRequest.decode(header)
        for result, data in self.exchange.parts.values():
            if result.digest == request.digest:
                return BufferFeed(as_bytes(data)[request.skip :])
        raise RemoteRefused("gone")

    def mean(self) -> torch.Tensor:
        """All parts, decoded."""
        whole = torch.empty(self.shape.size)
        for result, data in self.exchange.parts.values():
            self.wiring.codec.decode(result.start, data, whole[result.start : result.stop])
        return whole


@dataclass
class World:
    """The members of one exchange, and the plan that is usual for them."""

    network: MemoryNetwork
    peers: list[Peer]
    plan: Plan

    def of(self, peer: PeerId) -> Peer:
        return next(p for p in self.peers if p.me == peer)

    def work(self, plan: Plan | None = None, *, without: tuple[Peer, ...] = ()) -> None:
        for peer in self.peers:
            if peer not in without:
                peer.exchange.work(plan or self.plan)

    def whole(self, *but: Peer) -> bool:
        """Whether all hold all parts."""
        number = len(self.plan.parts)
        return all(len(p.exchange.parts) == number for p in self.peers if p not in but)


@asynccontextmanager
async def world(
    shape: Shape = SHAPE,
    *,
    link: Link | None = None,
    upload: float = 1e6,
    count: int = 4,
    seed: int = 3,
    members: Sequence[Identity] = MEMBERS,
) -> AsyncIterator[World]:
    """``count`` members on a simulated network, each with another contribution."""
    codec = RangeCodec(shape.codecs[0], dense=shape.size - 1000)
    network = MemoryNetwork(seed, link=link or Link(latency=0.02), upload=upload, download=1e7)
    loop = asyncio.get_running_loop()

    async with asyncio.TaskGroup() as group:
        peers = []
        for number, identity in enumerate(members[:count]):
            generator = torch.Generator().manual_seed(number)
            wiring = Wiring(
                network.join(identity.peer_id),
                identity,
                RUN,
                codec,
                group.create_task,
                virtual_time.inline,
                loop.time,
            )
            values = torch.randn(shape.size, generator=generator)
            peers.append(Peer(identity, wiring, values, shape))
        present = [peer.identity for peer in peers]
        plan = plan_of(leader(present), present, shape=shape)
        found = World(network, sorted(peers, key=lambda peer: peer.me), plan)
        yield found
        for peer in found.peers:
            await peer.exchange.stop()


async def until(
    condition: Callable[[], bool], seconds: float = 60.0, *, every: float = 0.01
) -> float:
    """Wait in virtual time, looking ``every`` so many seconds; returns the time."""
    clock = asyncio.get_running_loop().time
    end = clock() + seconds
    while not condition():
        assert clock() < end, "it did not happen"
        await asyncio.sleep(every)
    return clock()


def run(scene: Callable[[], Any]) -> None:
    """Play a scene in virtual time."""
    virtual_time.run(scene())


def same_bytes(peers: list[Peer]) -> bool:
    """Whether all hold the same parts, bit for bit."""
    first = peers[0].exchange.parts
    return all(
        p.exchange.parts.keys() == first.keys()
        and all(torch.equal(p.exchange.parts[key][1], first[key][1]) for key in first)
        for p in peers
    )


def header_of(plan: Plan, part: Part, **changes: Any) -> TransferHeader:
    """What a slice or a merged part begins with."""
    basis = basis_of(plan.codec, plan.contributors)
    header = TransferHeader(RUN, 0, 3, part.start, part.stop, plan.codec, basis, 0)
    return dataclasses.replace(header, **changes)


def result_of(peer: Peer, part: Part) -> PartResult:
    """What was merged for a part of the usual plan."""
    key = (part.start, part.stop, part.owner, basis_of(PLAN.codec, PLAN.contributors))
    return peer.exchange.parts[key][0]
