"""Announcements in large swarms: few bytes, and all come to know everything in spite of losses."""

from __future__ import annotations

import asyncio
import random

import pytest
from crowd_kit import COUNT, SKETCH, Crowd, crowd, run
from exchange_kit import until

from gossip.membership.members import Liveness
from gossip.membership.rumours import EVERYBODY, FANOUT
from protocols.identity import Identity
from protocols.memory import virtual_time
from protocols.messages import BEAT_BYTES


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
