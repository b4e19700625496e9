"""Nodes that announce themselves in a large swarm, whose calls may be lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from gossip.membership import sketch
from gossip.membership.members import Liveness, Membership, Patience
from gossip.membership.presence import Presence
from gossip.membership.rumours import EVERYBODY
from gossip.membership.standing import first_announcement
from gossip.place import Place
from gossip.wiring import Wiring
from protocols.codecs import RangeCodec
from protocols.errors import TransferStalled
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import Link, MemoryNetwork
from protocols.memory.virtual_time import inline
from protocols.tasks import Tasks

RUN = b"r" * 32
COUNT = EVERYBODY + 8
SKETCH = 4 * sketch.SIZE


@dataclass
class Node:
    """One that announces itself, and does nothing else."""

    identity: Identity
    presence: Presence
    places: list[Place]  # one
    task: asyncio.Task[None]

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    @property
    def view(self) -> Membership:
        return self.presence.membership

    def hears(self, other: Node) -> bool:
        """Whether it knows all that another one says of itself."""
        island, says = self.view.islands.get(other.peer), other.presence.status
        if island is None:
            return False
        said = island.announce
        return (said.incarnation, said.round, said.tokens, said.ready, said.sketch) == (
            says.incarnation, other.places[0].round, says.tokens, says.ready, says.sketch,
        )  # fmt: skip


@dataclass
class Crowd:
    """Nodes on one network that loses a share of all calls, or of their answers."""

    network: MemoryNetwork
    group: asyncio.TaskGroup
    dice: random.Random
    nodes: dict[PeerId, Node] = field(default_factory=dict)
    loses: float = 0.0
    rejected: list[str] = field(default_factory=list)
    starts: int = 0

    def start(self, identity: Identity, known: Sequence[Node] = ()) -> Node:
        """A node that has heard of these; if it was there before, it has started again."""
        loop, group, peer = asyncio.get_running_loop(), asyncio.TaskGroup(), identity.peer_id
        transport: Any = self.network.join(peer)
        call = transport.call

        async def lossy(*args: Any, **more: Any) -> Any:
            if self.dice.random() < self.loses:
                raise TransferStalled("lost")
            reply = await call(*args, **more)
            if self.dice.random() < self.loses:
                raise TransferStalled("its answer was lost")
            return reply

        transport.call = lossy
        codec, spawn = RangeCodec("int4", dense=1), Tasks(group).spawn
        wiring = Wiring(transport, identity, RUN, codec, spawn, inline, loop.time)
        self.starts += 1
        places = [Place(RUN, 0, 0, b"g" * 32, b"o" * 32, 0)]
        presence = Presence(
            wiring, Membership(peer, Patience()),
            first_announcement(peer, places[0], version="0", incarnation=self.starts),
            lambda: places, wall=lambda: 1e6 + loop.time(),
        )  # fmt: skip
        presence.on_rejected = lambda who, error: self.rejected.append(str(error))
        for other in known:
            presence.learn(other.presence.envelope())

        async def live() -> None:
            async with group:
                await asyncio.sleep(self.dice.random())
                group.create_task(presence.heartbeats())

        node = Node(identity, presence, places, self.group.create_task(live()))
        self.nodes[peer] = node
        return node

    def kill(self, node: Node) -> None:
        """Its process ends."""
        self.network.kill(node.peer)
        node.task.cancel()
        del self.nodes[node.peer]

    def change(self, node: Node) -> None:
        """A round is through, and it is ready for the next one."""
        round_ = node.places[0].round + 1
        node.places[0] = Place(RUN, 0, round_, b"h" * 32, self.dice.randbytes(32), 0)
        node.presence.note(
            tokens=self.dice.randrange(10**6), ready=True, sketch_round=round_,
            sketch=self.dice.randbytes(SKETCH),
        )  # fmt: skip
        node.presence.tell()

    def agree(self) -> bool:
        """Whether everybody knows everything of everybody, and that they are there."""
        now, nodes = asyncio.get_running_loop().time(), self.nodes.values()
        return all(
            one.hears(other) and one.view.liveness(other.peer, now) is Liveness.ALIVE
            for one in nodes
            for other in nodes
            if one is not other
        )

    def sent(self) -> int:
        """Bytes that all have sent."""
        stats = [node.presence.wiring.transport.stats for node in self.nodes.values()]
        return sum(sum(one.out_by_name.values()) for one in stats)


@asynccontextmanager
async def crowd(count: int, seed: int = 0) -> AsyncIterator[Crowd]:
    """``count`` nodes that know each other, and the sketches of all."""
    async with asyncio.TaskGroup() as group:
        network = MemoryNetwork(seed, link=Link(latency=0.02), upload=12.5e6, download=12.5e6)
        made = Crowd(network, group, random.Random(seed))
        for number in range(count):
            made.start(Identity.from_seed((number + 1).to_bytes(32, "big")))
        for one in made.nodes.values():
            one.presence.note(sketch=made.dice.randbytes(SKETCH))
        sketches = [node.presence.status.sketch for node in made.nodes.values()]
        for _ in range(2):  # the first time they do not know yet how many they are
            for one in made.nodes.values():
                for other in made.nodes.values():
                    one.presence.learn(other.presence.envelope())
                one.view.on_sketches(sketches)
        await asyncio.sleep(1.0)  # all have begun
        yield made
        for node in made.nodes.values():
            node.task.cancel()


def run(main: Callable[[], Any]) -> None:
    virtual_time.run(main())
