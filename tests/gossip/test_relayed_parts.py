"""Merged parts that a relay passes on, or does not: on a simulated network."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from exchange_kit import Peer, World, header_of, run, until
from grouped_kit import BIG, grouped, truthful

from gossip.exchange.bodies import trailer_size
from gossip.plans.validity import PartKey
from protocols.bodies import BufferFeed
from protocols.codecs import CHUNK
from protocols.errors import RemoteRefused
from protocols.identity import PeerId
from protocols.messages import Group, Part
from protocols.transport import Outgoing


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


async def chunks_of_zeros(number: int) -> AsyncIterator[bytes]:
    """So many chunks of fp32, and then nothing for ever."""
    for _ in range(number):
        yield bytes(4 * CHUNK)
    await asyncio.get_running_loop().create_future()


def test_an_owner_is_not_blamed_for_what_a_relay_has_spoilt() -> None:
    """What it adds to the relay's bytes does not match its digest: it is asked for all of them."""

    async def scene() -> None:
        async with grouped(6, codec="fp32", size=BIG, upload=4e6) as here:
            part, owner, relay, others = relayed_part(here)
            victim, header = others[0], header_of(here.plan, part)
            relay.exchange.relaying.pass_on = lambda *_: None  # type: ignore[method-assign]
            here.work()
            length = 4 * (part.stop - part.start) + trailer_size(len(here.plan.contributors))
            spoilt = Outgoing(length, chunks_of_zeros(1))
            push = relay.wiring.transport.push(
                victim.me, "merged", header.encode(), spoilt, timeout=1000.0
            )
            ending = asyncio.gather(push, return_exceptions=True)
            await until(here.whole)
            assert truthful(here, victim)
            assert [peer.faults for peer in here.peers] == [[]] * 6
            assert owner.me not in {who for who, _ in victim.refusals}
            assert [str(error) for error in await ending] == ["stalled: nothing moved for 15 s"]

    run(scene)


def test_a_relay_is_not_in_the_way_of_an_owner_that_gives_the_part_itself() -> None:
    async def scene() -> None:
        async with grouped(6, codec="fp32", size=BIG, upload=4e6) as here:
            part, owner, relay, others = relayed_part(here)
            victim, header = others[0], header_of(here.plan, part)
            relay.exchange.relaying.pass_on = lambda *_: None  # type: ignore[method-assign]
            here.work()
            await until(lambda: owner.exchange.owning.copies(key_in(here, part)) > 0)
            await victim.wiring.transport.call(owner.me, "give", header.encode(), timeout=5.0)
            state = victim.exchange.merged.planned.get(key_in(here, part))
            assert state is not None
            await until(lambda: state.inflow is not None and state.inflow.checked > 0)
            with pytest.raises(RemoteRefused, match="late"):
                await relay.wiring.transport.call(victim.me, "merged", header.encode(), timeout=5.0)
            with pytest.raises(RemoteRefused, match="late"):
                await relay.wiring.transport.push(
                    victim.me, "merged", header.encode(), BufferFeed(bytes(1000)), timeout=5.0
                )
            await until(lambda: key_in(here, part) in victim.exchange.parts)

    run(scene)


def test_a_relay_that_passes_nothing_on_is_told_of_and_next_time_nobody_waits_for_it() -> None:
    took = []

    async def scene(*, known: bool) -> None:
        async with grouped(6, codec="fp32", size=BIG, upload=4e6) as here:
            _, owner, relay, others = relayed_part(here)
            relay.exchange.relaying.pass_on = lambda *_: None  # type: ignore[method-assign]
            if known:
                for peer in others:
                    peer.mute_.add(relay.me)
            here.work()
            took.append(await until(here.whole))
            told = [] if known else [relay.me]
            assert [peer.unpassed_ for peer in here.peers if peer in others] == [told] * len(others)
            assert all(not p.unpassed_ and not p.faults for p in here.peers if p not in others)
            assert owner.unserved_ == [relay.me], "all of its group have asked"

    run(lambda: scene(known=False))
    run(lambda: scene(known=True))
    assert took[1] < took[0] / 2


def test_a_relay_that_brings_no_sum_is_told_of_by_the_owner_and_its_group() -> None:
    async def scene() -> None:
        async with grouped(6, codec="fp32", size=BIG, upload=4e6) as here:
            _, owner, relay, others = relayed_part(here)
            relay.exchange.relaying._spread = lambda *_: None  # type: ignore[method-assign]
            here.work()
            await until(here.whole)
            told = {peer.me for peer in here.peers if relay.me in peer.unserved_}
            assert told == {owner.me, *(peer.me for peer in others)}
            assert not any(peer.unpassed_ or peer.faults for peer in here.peers)

    run(scene)


def test_one_of_a_group_alone_says_nothing_of_its_relay() -> None:
    async def scene() -> None:
        async with grouped(6, codec="fp32", size=BIG, upload=4e6) as here:
            _, _, relay, others = relayed_part(here)
            others[0].mute_.add(relay.me)
            here.work()
            await until(here.whole)
            assert not any(peer.unserved_ for peer in here.peers)

    run(scene)


def test_who_relays_well_is_not_told_of() -> None:
    async def scene() -> None:
        async with grouped(12, sites=4) as here:
            here.work()
            await until(here.whole)
            assert [peer.unpassed_ + peer.unserved_ for peer in here.peers] == [[]] * 12

    run(scene)


def key_in(here: World, part: Part) -> PartKey:
    """The name of a part under the plan."""
    return part.start, part.stop, part.owner, header_of(here.plan, part).basis
