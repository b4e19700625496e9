"""What announcements alone cost each node of a large swarm, and how soon a silent one is noticed.

Nodes that say what islands do and do nothing else, on the simulated network and a virtual clock:
each inner step changes the figures of a node, each snapshot its sketch, each merge its place.
Part of :mod:`benchmarks.scale`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from dataclasses import dataclass
from itertools import product
from statistics import mean
from typing import Any

from gossip.membership import sketch
from gossip.membership.members import Liveness, Membership, Patience
from gossip.membership.presence import Presence
from gossip.membership.standing import first_announcement
from gossip.place import Place
from gossip.wiring import Wiring
from protocols.codecs import RangeCodec
from protocols.identity import Identity
from protocols.memory.transport import Link, MemoryNetwork, MemoryTransport
from protocols.memory.virtual_time import inline
from protocols.tasks import Tasks

RUN = b"r" * 32
ROUND_S = 60.0  # of the swarm that the figures by second are given for
WARM_S = 9.5  # until rhythms are known
IDLE_S = 4.0
ROUND_NEWS_S = 6.0  # in which all that a round has to say has gone round
STEP_S = 0.4
NOTICE_S = 15.0


@dataclass
class Node:
    """One that announces itself."""

    presence: Presence
    transport: MemoryTransport
    task: asyncio.Task[None]

    @classmethod
    def start(
        cls,
        identity: Identity,
        network: MemoryNetwork,
        dice: random.Random,
        places: list[Place],
        nodes: asyncio.TaskGroup,
    ) -> Node:
        """It announces itself from now on."""
        loop, peer = asyncio.get_running_loop(), identity.peer_id
        transport, group = network.join(peer), asyncio.TaskGroup()
        codec, spawn = RangeCodec("int4", dense=1), Tasks(group).spawn
        wiring = Wiring(transport, identity, RUN, codec, spawn, inline, loop.time)
        status = first_announcement(
            peer, places[0], version="0.1.0", incarnation=1_700_000_000, region="eu-west",
            addresses=("203.0.113.7:4390",), upload=12.5e6, download=12.5e6, name="node-256",
        )  # fmt: skip
        presence = Presence(
            wiring, Membership(peer, Patience()), status, lambda: places,
            wall=lambda: 1_700_000_000.0 + loop.time(),
        )  # fmt: skip
        presence.office = lambda: [peer, *presence.membership.islands]

        async def live() -> None:
            async with group:
                await asyncio.sleep(dice.random())  # no two beat at the same moment
                group.create_task(presence.heartbeats())
                group.create_task(_train(presence, dice))

        return cls(presence, transport, nodes.create_task(live()))

    def news(self) -> Counter[str]:
        """Bytes sent and received, and calls made, since the start."""
        stats = self.transport.stats
        asked = sum(stats.requests_by_name.values())
        return Counter(
            sent=sum(stats.out_by_name.values()),
            received=sum(stats.in_by_name.values()),
            answered=asked,
        )


async def _train(presence: Presence, dice: random.Random) -> None:
    steps, began = 0, asyncio.get_running_loop().time()
    while True:
        await asyncio.sleep(STEP_S * dice.uniform(0.9, 1.1))
        steps += 1
        passed = asyncio.get_running_loop().time() - began
        presence.note(
            eta=max(0.0, ROUND_S - passed) * dice.uniform(0.97, 1.03),
            steps_per_second=dice.gauss(1 / STEP_S, 0.02),
            tokens_per_second=dice.gauss(8192 / STEP_S, 200.0),
            loss=dice.gauss(3.0, 0.1),
            total_tokens=steps * 8192,
            position=steps,
        )


async def _round(node: Node, dice: random.Random, places: list[Place]) -> None:
    """What a node says in a round: that it is ready, and where it stands afterwards."""
    await asyncio.sleep(dice.random())
    projection = dice.randbytes(4 * sketch.SIZE)
    node.presence.note(sketch_round=1, sketch=projection, ready=True, tokens=1_000_000, norm=1.5)
    node.presence.tell()
    await asyncio.sleep(3.0)
    place = Place(RUN, 0, 1, b"h" * 32, b"s" * 32, 256_000_000)
    places[:] = [place]
    node.presence.note(ready=False, validation_loss=3.1)
    node.presence.tell()


async def measure(count: int) -> dict[str, Any]:
    """What ``count`` nodes have to say, in bytes."""
    dice = random.Random(7)
    network = MemoryNetwork(3, link=Link(latency=0.03), upload=12.5e6, download=12.5e6)
    identities = [Identity.from_seed((i + 1).to_bytes(32, "big")) for i in range(count)]
    spots = [[Place(RUN, 0, 0, b"g" * 32, b"o" * 32, 0)] for _ in identities]
    async with asyncio.TaskGroup() as group:
        pairs = list(zip(identities, spots, strict=True))
        nodes = [Node.start(one, network, dice, places, group) for one, places in pairs]
        said = [node.presence.envelope() for node in nodes]
        for node in nodes:
            for envelope in said:
                node.presence.learn(envelope)
            # there is a sketch from an earlier round
            node.presence.note(sketch_round=0, sketch=dice.randbytes(4 * sketch.SIZE))
        await asyncio.sleep(WARM_S)
        idle = await _during(IDLE_S, nodes)
        for node, places in zip(nodes, spots, strict=True):
            group.create_task(_round(node, dice, places))
        told = await _during(ROUND_NEWS_S, nodes)
        reached = mean(_heard(node) for node in nodes)
        noticed = await _without(network, *nodes)
        for node in nodes:
            node.task.cancel()
    once = {key: (told[key] - idle[key] * ROUND_NEWS_S / IDLE_S) / count for key in told}
    second = {key: idle[key] / count / IDLE_S for key in idle}
    return {
        "nodes": count,
        "sent_bytes_s": round(second["sent"]),
        "received_bytes_s": round(second["received"]),
        "calls_s": round(second["answered"], 1),
        "round_sent_bytes": round(once["sent"]),
        "round_received_bytes": round(once["received"]),
        "round_heard": round(reached, 4),
        "kbit_s": round((second["sent"] + once["sent"] / ROUND_S) * 8 / 1000, 1),
        **noticed,
    }


async def _during(seconds: float, nodes: list[Node]) -> Counter[str]:
    """What all of them sent, received and answered in this time."""
    before = sum((node.news() for node in nodes), Counter[str]())
    await asyncio.sleep(seconds)
    after = sum((node.news() for node in nodes), Counter[str]())
    after.subtract(before)
    return after


def _heard(node: Node) -> float:
    """The share of the others of which it knows the new place and the new sketch."""
    known = [island.announce for island in node.presence.membership.islands.values()]
    return sum(a.round == 1 and len(a.sketch) == 4 * sketch.SIZE for a in known) / len(known)


async def _without(
    network: MemoryNetwork, dead: Node, stuck: Node, *others: Node
) -> dict[str, list[float]]:
    """Seconds until others take a node that has died, and one that stands still, for silent: mean
    and longest.
    """
    loop = asyncio.get_running_loop()
    network.kill(dead.transport.peer_id)
    dead.task.cancel()
    network.freeze(stuck.transport.peer_id)
    at = loop.time()
    names = {"killed_noticed_s": dead, "silent_noticed_s": stuck}
    found: dict[str, dict[int, float]] = {name: {} for name in names}
    while loop.time() < at + NOTICE_S:
        for (name, one), (number, node) in product(names.items(), enumerate(others)):
            view = node.presence.membership
            if view.liveness(one.transport.peer_id, loop.time()) is not Liveness.ALIVE:
                found[name].setdefault(number, loop.time() - at)
        if all(len(seen) == len(others) for seen in found.values()):
            break
        await asyncio.sleep(0.05)
    times = {name: list(seen.values()) or [math.inf] for name, seen in found.items()}
    return {name: [round(mean(seen), 2), round(max(seen), 2)] for name, seen in times.items()}
