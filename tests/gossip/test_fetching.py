"""A merged part that is fetched: what has come of it by whatever way is not sent again."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest
import torch
from exchange_kit import Peer, World, run, until, world

from gossip.exchange.bodies import as_bytes, trailer_of
from gossip.exchange.transfers import header_of
from gossip.plans.certificate import basis_of
from gossip.plans.validity import Shape, key_of
from protocols.bodies import BufferFeed
from protocols.codecs import CHUNK
from protocols.errors import RemoteRefused
from protocols.identity import PeerId
from protocols.memory.transport import Link
from protocols.messages import PartRequest, PartResult, Plan, TransferHeader
from protocols.transport import Feed

CHUNKS = 30  # of a part
SHAPE = Shape(4 * CHUNKS * CHUNK, ("int8",))
RATE = 2e7  # bytes a second


@dataclass
class Scene:
    """A part that all hold but one, whose exchange is as new, and what is sent of it."""

    here: World
    result: PartResult
    newcomer: Peer
    owner: Peer
    others: list[Peer]
    pulled: Counter[str] = field(default_factory=Counter)  # bytes of bodies by name of transfer
    skips: list[int] = field(default_factory=list)  # of what it asked for
    spoilt: Peer | None = None

    def tamper(self, sender: str, receiver: str, name: str, data: bytes) -> bytes:
        if (sender, name) == (self.newcomer.me, "part"):
            self.skips.append(PartRequest.decode(data).skip)
        if receiver != self.newcomer.me or len(data) < 10_000:
            return data
        self.pulled[name] += len(data)
        wrong = self.spoilt is not None and self.spoilt.me == sender
        return bytes(len(data)) if wrong else data

    @property
    def size(self) -> int:
        """Encoded bytes of the part."""
        return len(self.owner.exchange.parts[key_of(self.result)][1])

    def plan(self, *, merged: bool, patience_s: float = 4.0) -> Plan:
        """To be done by the newcomer: the one part alone, which is merged already or to come."""
        parts = tuple(
            dataclasses.replace(part, result=self.result if merged else None)
            for part in self.here.plan.parts
            if part.start == self.result.start
        )
        return dataclasses.replace(
            self.here.plan, parts=parts, patience_s=patience_s, expected_s=0.5
        )

    async def held(self) -> None:
        """Wait until the newcomer holds the part, and check it."""
        key = key_of(self.result)
        await until(lambda: key in self.newcomer.exchange.parts, 300.0)
        data = self.newcomer.exchange.parts[key][1]
        assert torch.equal(data, self.owner.exchange.parts[key][1])

    async def some_comes(self, rate: float) -> asyncio.Task[None]:
        """Have the owner push the part once more at ``rate``, until two chunks of it are here."""
        node = self.here.network.node(self.owner.me)
        assert node is not None
        node.upload = rate
        plan = self.plan(merged=False)
        self.newcomer.exchange.work(plan)
        part = plan.parts[0]
        key = (part.start, part.stop, part.owner, basis_of(plan.codec, plan.contributors))
        route = self.newcomer.exchange.merged.planned.get(key)
        assert route is not None
        push = asyncio.create_task(self._push(plan, 0))
        await until(lambda: route.inflow is not None and route.inflow.checked >= 2, 60.0)
        return push

    async def breaks_on(self, seconds: float) -> None:
        """Have the owner push what is left from the next chunk on, and break off, again and again.

        Each try lasts so long.
        """
        plan, held = self.plan(merged=False), self.newcomer.exchange.parts
        header = header_of(self.owner.exchange.place, key_of(self.result), plan).encode()
        while key_of(self.result) not in held:
            transport = self.owner.wiring.transport
            with suppress(RemoteRefused):
                reply = await transport.call(self.newcomer.me, "merged", header, timeout=5.0)
                push = asyncio.create_task(self._push(plan, TransferHeader.decode(reply).done))
                await asyncio.wait([push], timeout=seconds)
                push.cancel()

    async def _push(self, plan: Plan, done: int) -> None:
        data = self.owner.exchange.parts[key_of(self.result)][1]
        header = header_of(self.owner.exchange.place, key_of(self.result), plan)
        header = dataclasses.replace(header, done=done)
        chunks = self.owner.wiring.codec.named(plan.codec).chunks(header.start, header.stop)
        at = next(chunk.offset for chunk in chunks if chunk.start == header.start + done)
        feed = BufferFeed(as_bytes(data)[at:], trailer_of(self.result, len(plan.contributors)))
        with suppress(RemoteRefused):  # it has come from another one
            await self.owner.wiring.transport.push(
                self.newcomer.me, "merged", header.encode(), feed, timeout=60.0
            )


@asynccontextmanager
async def scene(seed: int = 3) -> AsyncIterator[Scene]:
    async with world(SHAPE, upload=RATE, link=Link(latency=0.005), seed=seed) as here:
        here.work()
        await until(here.whole)
        result = here.peers[0].exchange.parts[next(iter(here.peers[0].exchange.parts))][0]
        owner = here.of(result.owner)
        newcomer, *others = (peer for peer in here.peers if peer is not owner)
        await newcomer.exchange.stop()
        newcomer.exchange = newcomer.fresh()
        found = Scene(here, result, newcomer, owner, others)
        here.network.tamper = found.tamper
        yield found
        here.network.tamper = None


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_a_pull_that_breaks_goes_on_where_it_was(seed: int) -> None:
    async def main() -> None:
        async with scene(seed) as it:
            for peer in (it.owner, *it.others):
                link = Link(latency=0.005, drop=0.7)
                it.here.network.set_link(it.newcomer.me, peer.me, link)
            it.newcomer.exchange.work(it.plan(merged=True))
            await it.held()
            assert len(it.skips) >= 3
            assert it.skips == sorted(it.skips)
            assert it.skips[2] > CHUNK
            assert it.newcomer.lost_ == []

    run(main)


def test_what_its_owner_had_sent_is_not_sent_again_by_another() -> None:
    async def main() -> None:
        async with scene() as it:
            push = await it.some_comes(1e6)
            it.here.network.kill(it.owner.me)
            it.newcomer.exchange.work(it.plan(merged=True))
            await it.held()
            assert it.pulled["part"] <= it.size - 2 * CHUNK
            push.cancel()

    run(main)


def test_a_part_that_trickles_is_taken_from_another_one() -> None:
    async def main() -> None:
        async with scene() as it:
            began = asyncio.get_running_loop().time()
            push = await it.some_comes(2e5)  # some chunks in a patience, and 20 s for all
            it.newcomer.exchange.work(it.plan(merged=True))
            await it.held()
            assert asyncio.get_running_loop().time() - began < 10.0
            assert 0 < it.pulled["part"] < it.size - 2 * CHUNK
            await push

    run(main)


def test_a_part_whose_connection_breaks_in_each_chunk_is_not_on_its_way() -> None:
    async def main() -> None:
        async with scene() as it:
            push = await it.some_comes(1.5e6)  # 0.09 s a chunk
            push.cancel()
            began = asyncio.get_running_loop().time()
            breaking = asyncio.create_task(it.breaks_on(0.05))
            it.newcomer.exchange.work(it.plan(merged=True))
            await it.held()
            assert asyncio.get_running_loop().time() - began < 10.0
            await breaking

    run(main)


def test_a_part_that_stands_still_for_less_than_the_patience_is_waited_for() -> None:
    async def main() -> None:
        async with scene() as it:
            push = await it.some_comes(3e6)
            it.here.network.freeze(it.owner.me)
            it.newcomer.exchange.work(it.plan(merged=True))
            await asyncio.sleep(2.5)
            it.here.network.thaw(it.owner.me)
            await it.held()
            assert it.pulled["part"] == 0
            await push

    run(main)


def test_who_offers_another_length_spoils_nothing_that_others_gave() -> None:
    async def main() -> None:
        async with scene() as it:
            push = await it.some_comes(1e6)
            it.here.network.kill(it.owner.me)
            plan = it.plan(merged=True)
            liar = min(it.others, key=lambda peer: plan.roster.index(peer.me))  # asked first

            async def too_short(sender: PeerId, header: bytes) -> Feed:
                return BufferFeed(bytes(5))

            liar.wiring.transport.on_pull("part", too_short)
            it.newcomer.exchange.work(plan)
            await it.held()
            assert it.pulled["part"] <= it.size - 2 * CHUNK
            assert {peer for peer, _ in it.newcomer.refusals} == {liar.me}
            push.cancel()

    run(main)


def test_who_has_to_give_all_of_a_part_gets_the_time_for_it() -> None:
    """After a lie nobody goes on with what another one gave, however slow the links are."""

    async def main() -> None:
        async with scene() as it:
            it.spoilt = it.owner
            push = await it.some_comes(1e6)
            it.here.network.kill(it.owner.me)
            for peer in it.others:
                node = it.here.network.node(peer.me)
                assert node is not None
                node.upload = 2e5  # 20 s for all of it
            it.newcomer.exchange.work(it.plan(merged=True))
            await it.held()
            push.cancel()

    run(main)


def test_a_part_of_which_a_later_plan_names_other_bytes_is_fetched_as_it_says() -> None:
    async def main() -> None:
        async with scene() as it:
            wrong = dataclasses.replace(it.result, digest=b"w" * 32)
            plan = it.plan(merged=True)
            part = dataclasses.replace(plan.parts[0], result=wrong)
            it.here.network.freeze(it.owner.me)  # the one that is asked first
            it.newcomer.exchange.work(dataclasses.replace(plan, parts=(part,)))
            await asyncio.sleep(0.5)
            it.newcomer.exchange.work(plan)
            await it.held()
            assert it.newcomer.lost_ == []

    run(main)


def test_a_part_that_two_have_given_and_is_wrong_is_held_against_who_gave_all_of_it() -> None:
    """Which of the two has lied does not show before one has given the whole."""

    async def main() -> None:
        async with scene() as it:
            it.spoilt = it.owner
            push = await it.some_comes(1e6)
            it.here.network.kill(it.owner.me)
            it.newcomer.exchange.work(it.plan(merged=True))
            await it.held()
            others = {peer.me for peer in it.others}
            assert not others & {peer for peer, _ in it.newcomer.refusals}
            push.cancel()

    run(main)
