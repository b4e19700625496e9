"""Merged parts that a relay passes on, or does not: on a simulated network."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from exchange_kit import Peer, World, header_of, run, until
from grouped_kit import grouped

from protocols.bodies import BufferFeed
from protocols.errors import RemoteRefused
from protocols.identity import PeerId
from protocols.messages import Group, Part


def relayed_part(here: World) -> tuple[Part, Peer, Peer, list[Peer]]:
    """A part that a group gets through a relay: its owner, the relay, and the group's others."""
    number, group = next(
        (number, group)
        for number in range(len(here.plan.parts))
        for group in here.plan.groups
        if group.relays[number]
    )
    part, relay = here.plan.parts[number], relay_of(group, number)
    others = [here.of(peer) for peer in group.members if peer != relay]
    return part, here.of(part.owner), here.of(relay), others


def relay_of(group: Group, number: int) -> PeerId:
    """Who relays a part for a group."""
    return group.members[group.relays[number] - 1]


def test_who_asks_an_owner_for_a_part_has_nobody_else_asked() -> None:
    async def scene() -> None:
        async with grouped(12, sites=4) as here:
            part, owner, _, others = relayed_part(here)
            here.work()
            await until(here.whole)
            said: Counter[PeerId] = Counter()

            def note(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
                if (sender, name) == (owner.me, "merged"):
                    said[receiver] += 1
                return data

            here.network.tamper = note
            header = header_of(here.plan, part).encode()
            for _ in range(3):
                await others[0].wiring.transport.call(owner.me, "give", header, timeout=5.0)
                await asyncio.sleep(1.0)
            assert said.keys() == {others[0].me}

    run(scene)


def test_a_part_of_a_wrong_length_is_not_announced_to_the_group() -> None:
    async def scene() -> None:
        async with grouped(6) as here:
            part, owner, relay, others = relayed_part(here)
            here.work(without=(owner,))
            await asyncio.sleep(0.5)
            passed: list[PeerId] = []

            def note(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
                if (sender, name) == (relay.me, "merged"):
                    passed.append(receiver)
                return data

            here.network.tamper = note
            header = header_of(here.plan, part).encode()
            with pytest.raises(RemoteRefused, match="protocol"):
                await owner.wiring.transport.push(
                    relay.me, "merged", header, BufferFeed(bytes(1000)), timeout=5.0
                )
            await asyncio.sleep(0.5)
            assert not {peer.me for peer in others}.intersection(passed)

    run(scene)
