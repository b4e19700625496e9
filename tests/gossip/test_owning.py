"""An owner and those who have yet to come to the round: on the virtual clock."""

from __future__ import annotations

import asyncio
import dataclasses

from exchange_kit import Peer, run, until, world

from gossip.plans.validity import Shape

SIZE = 200_000


def test_who_has_yet_to_come_gets_a_part_once_it_is_there() -> None:
    """Its link is busy with catching up: what it cannot take yet must not be sent over it."""

    async def scene() -> None:
        async with world(Shape(SIZE, ("int8",))) as here:
            late, *others = here.peers
            owners = [peer.me for peer in others]
            here.plan = dataclasses.replace(
                here.plan,
                contributors=tuple(
                    dataclasses.replace(c, active=c.peer != late.me) for c in here.plan.contributors
                ),
                parts=tuple(
                    dataclasses.replace(part, owner=owners[k % 3], result=None)
                    for k, part in enumerate(here.plan.parts)
                ),
            )
            for peer in others:
                peer.late.add(late.me)
            here.work(without=(late,))
            await until(lambda: here.whole(late))
            await asyncio.sleep(0.5)
            assert taken(late) < 10_000
            late.exchange.work(here.plan)
            await until(here.whole, 2.0)
            assert taken(late) > SIZE

    run(scene)


def taken(peer: Peer) -> int:
    """Bytes that have come to a peer."""
    return sum(stats.bytes_in for stats in peer.wiring.transport.stats.by_peer.values())
