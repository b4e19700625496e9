"""Announcements in large swarms: few bytes, and all come to know everything in spite of losses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from exchange_kit import until

from gossip.membership import sketch
from gossip.membership.crowd import ASKED_AT_ONCE
from gossip.membership.members import Liveness, Membership, Patience
from gossip.membership.presence import Presence
from gossip.membership.pulse import Beat, HashChain
from gossip.membership.rumours import EVERYBODY, FANOUT
from gossip.membership.standing import first_announcement
from gossip.place import Place
from gossip.wiring import Wiring
from protocols.codecs import RangeCodec
from protocols.errors import TransferStalled
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import Link, MemoryNetwork
from protocols.memory.virtual_time import inline
from protocols.messages import BEAT_BYTES, PULSE_BYTES, TAG_BYTES, Known
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


def test_who_has_nothing_to_say_sends_few_bytes_and_is_alive() -> None:
    async def main() -> None:
        async with crowd(COUNT) as swarm:
            await until(swarm.agree, 5.0)
            began, before = asyncio.get_running_loop().time(), swarm.sent()
            doubted = 0
            while asyncio.get_running_loop().time() < began + 20.0:
                doubted += not swarm.agree()
                await asyncio.sleep(0.25)
            each = (swarm.sent() - before) / COUNT / 20.0
            beats = COUNT * BEAT_BYTES * FANOUT
            # some questions for who else is there, and each has announced itself anew once
            assert each < 1.6 * beats + COUNT * 30.0
            assert doubted == 0
            assert not swarm.rejected

    run(main)


def test_an_announcement_is_sent_once_to_each_and_its_sketch_as_well() -> None:
    async def main() -> None:
        async with crowd(COUNT) as swarm:
            await until(swarm.agree, 5.0)
            before = swarm.sent()
            for node in swarm.nodes.values():
                swarm.change(node)
            took = await until(swarm.agree, 5.0)
            assert took < asyncio.get_running_loop().time() + 3.0
            each = (swarm.sent() - before) / COUNT
            size = len(next(iter(swarm.nodes.values())).presence.envelope()) + SKETCH
            assert each < 2.0 * COUNT * size  # it was six times as much

    run(main)


@pytest.mark.parametrize("loses", [0.05, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_lost_all_come_to_know_everything(
    seed: int, loses: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes change, come, start again with the same key, and die, while calls are lost."""
    monkeypatch.setattr("gossip.membership.presence.EVERYBODY", 5)

    async def main() -> None:
        async with crowd(10, seed) as swarm:
            dice = random.Random(seed)
            swarm.loses = loses
            for number in range(12):
                await asyncio.sleep(dice.uniform(0.1, 1.5))
                node = dice.choice(list(swarm.nodes.values()))
                match dice.choice(["change", "change", "change", "again", "comes", "dies"]):
                    case "change":
                        swarm.change(node)
                    case "again":
                        swarm.kill(node)
                        swarm.start(node.identity, dice.sample(list(swarm.nodes.values()), 3))
                    case "comes":
                        newcomer = Identity.from_seed((1000 + number).to_bytes(32, "big"))
                        swarm.start(newcomer, dice.sample(list(swarm.nodes.values()), 3))
                    case "dies" if len(swarm.nodes) > 8:
                        swarm.kill(node)
            # with losses under way, if not too many
            if loses < 0.3:
                await until(lambda: all_hear(swarm), 60.0, every=0.1)
            swarm.loses = 0.0
            await until(swarm.agree, 30.0, every=0.1)
            assert not swarm.rejected

    run(main)


def all_hear(swarm: Crowd) -> bool:
    """Whether everybody knows everything, whoever is taken for silent for a moment."""
    nodes = swarm.nodes.values()
    return all(one.hears(other) for one in nodes for other in nodes if one is not other)


def test_a_node_that_stands_still_is_noticed_as_soon_as_among_a_few() -> None:
    async def noticed(count: int) -> float:
        async with crowd(count) as swarm:
            await asyncio.sleep(12.0)
            assert swarm.agree()
            stuck, *others = swarm.nodes.values()
            swarm.network.freeze(stuck.peer)
            now = asyncio.get_running_loop().time
            at = now()
            await until(
                lambda: all(
                    one.view.liveness(stuck.peer, now()) is not Liveness.ALIVE for one in others
                ),
                every=0.05,
            )
            return now() - at

    few, many = virtual_time.run(noticed(EVERYBODY)), virtual_time.run(noticed(COUNT))
    assert few > 1.0
    assert many < few + 1.5


def test_nobody_is_kept_alive_by_heartbeats_that_it_has_not_made() -> None:
    async def main() -> None:
        async with crowd(COUNT) as swarm:
            await until(swarm.agree, 5.0)
            dead, liar, honest, *_ = swarm.nodes.values()
            island, dice = honest.view.islands[dead.peer], random.Random(1)
            swarm.kill(dead)
            await asyncio.sleep(1.0)
            heard = island.heard
            transport = liar.presence.wiring.transport
            for number in range(island.beat, 60):
                values = [
                    island.pulse,
                    dice.randbytes(PULSE_BYTES),
                    HashChain(dead.peer, b"").next(),
                ]
                beats = b"".join(Beat(island.tag, number, value).packed() for value in values)
                await transport.call(honest.peer, "gossip", Known((), beats).encode(), timeout=5.0)
            assert island.heard == heard
            now = asyncio.get_running_loop().time
            await until(lambda: honest.view.liveness(dead.peer, now()) is Liveness.DEAD, 15.0)

    run(main)


def test_who_names_what_there_is_not_is_asked_and_nothing_comes_of_it() -> None:
    async def main() -> None:
        async with crowd(COUNT) as swarm:
            await until(swarm.agree, 5.0)
            liar, honest, *_ = swarm.nodes.values()
            transport, dice = liar.presence.wiring.transport, random.Random(1)
            for _ in range(20):
                strange = b"".join(
                    Beat(dice.randbytes(TAG_BYTES), 1, dice.randbytes(PULSE_BYTES)).packed()
                    for _ in range(512)
                )
                sketches = (dice.randbytes(SKETCH), b"", dice.randbytes(16))
                body = Known((), strange, sketches).encode()
                await transport.call(honest.peer, "gossip", body, timeout=5.0)
            rumours = honest.presence._crowd.rumours
            assert len(rumours._asked) <= 4096
            await asyncio.sleep(3.0)
            assert swarm.agree()

    run(main)


def test_who_names_things_without_end_is_asked_for_a_few_at_a_time() -> None:
    async def main() -> None:
        async with crowd(COUNT) as swarm:
            await until(swarm.agree, 5.0)
            liar, honest, *_ = swarm.nodes.values()
            transport, dice = liar.presence.wiring.transport, random.Random(1)
            asked = most = 0

            async def slow(sender: PeerId, body: bytes) -> bytes:
                nonlocal asked, most
                asked += sender == honest.peer
                most = max(most, asked)
                await asyncio.sleep(4.0)
                asked -= sender == honest.peer
                return Known(()).encode()

            transport.on_call("known", slow)
            for _ in range(100):
                strange = Beat(dice.randbytes(TAG_BYTES), 1, dice.randbytes(PULSE_BYTES)).packed()
                body = Known((), strange).encode()
                await transport.call(honest.peer, "gossip", body, timeout=5.0)
            assert 0 < most <= ASKED_AT_ONCE + 1  # one may be the usual question who is there

    run(main)


def test_who_puts_its_clock_right_announces_itself_at_once() -> None:
    """What it has said before has expired, or seems to: a heartbeat of it brings nobody nearer."""

    async def main() -> None:
        async with crowd(COUNT) as swarm:
            await until(swarm.agree, 5.0)
            node, *_ = swarm.nodes.values()
            right = node.presence.wall
            node.presence.wall = lambda: right() - 1000.0
            swarm.change(node)
            await asyncio.sleep(2.0)
            assert not swarm.agree()
            node.presence.wall = right
            await until(swarm.agree, 4.0)

    run(main)


def test_a_sketch_is_the_one_that_was_announced() -> None:
    async def main() -> None:
        async with crowd(COUNT) as swarm:
            await until(swarm.agree, 5.0)
            one, other, *_ = swarm.nodes.values()
            swarm.change(other)
            sketch_of, island = other.presence.status.sketch, one.view.islands[other.peer]
            await until(lambda: island.announce.round == 1, 3.0, every=0.01)
            if island.announce.sketch != sketch_of:
                assert one.view.on_sketches([bytes(SKETCH)]) == []
            await until(lambda: island.announce.sketch == sketch_of, 3.0)
            # the next announcement names the same one, which is not asked for again
            other.presence.note(ready=False)
            other.presence.tell()
            await until(lambda: not island.announce.ready, 3.0, every=0.01)
            assert island.announce.sketch == sketch_of

    run(main)


@pytest.mark.parametrize("count", [EVERYBODY + 1, EVERYBODY + 2])
def test_where_a_swarm_becomes_large_nobody_is_lost(count: int) -> None:
    """Those who know of fewer tell everybody, the others pass it on."""

    async def main() -> None:
        async with crowd(count) as swarm:
            await until(swarm.agree, 5.0)
            nodes = list(swarm.nodes.values())
            for number in range(3):
                newcomer = Identity.from_seed((1000 + number).to_bytes(32, "big"))
                swarm.change(swarm.start(newcomer, nodes[number : number + 2]))
            await until(swarm.agree, 20.0)
            for node in nodes[:3]:
                await node.presence.leave()
                swarm.kill(node)
            await asyncio.sleep(2.0)
            assert swarm.agree()

    run(main)
