"""Whole exchanges of many chunks: members that end at any stage, broken links, exact accounts."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from collections.abc import AsyncIterator, Sequence

import pytest
import torch
from codec_kit import ERRORS, FINE
from exchange_kit import Peer, World, run, same_bytes, until, world

from gossip.plans.estimating import stillness_of
from gossip.plans.planning import Remains, renewed_plan
from gossip.plans.validity import Shape, key_of
from protocols.codecs import CHUNK
from protocols.identity import PeerId
from protocols.memory.transport import Link
from protocols.messages import Part, PartRequest, PartResult, Plan
from protocols.transport import CHUNK_BYTES, Outgoing

SIZE = 10 * CHUNK + 12_345  # two and a half chunks a part
UPLOAD = 1e7  # bytes a second


def check_mean(peer: Peer, here: World, codec: str) -> None:
    """Every element of the parts is the mean of exactly those said to be in it."""
    size = len(peer.values)
    present = torch.zeros(size, dtype=torch.bool)
    total = torch.zeros(size, dtype=torch.float64)
    count = torch.zeros(size, dtype=torch.float64)
    for result, _ in peer.exchange.parts.values():
        present[result.start : result.stop] = True
        for included in result.included:
            values = here.of(here.plan.contributors[included.contributor].peer).values
            end = result.start + included.elements
            total[result.start : end] += values[result.start : end].double()
            count[result.start : end] += 1
    wanted = torch.where(count > 0, total / count.clamp(min=1), 0.0)[present]
    assert (peer.mean().double()[present] - wanted).norm() <= ERRORS[codec] * wanted.norm()


def without(here: World, plan: Plan, gone: Peer, ballot: int) -> Plan:
    """What a leader makes of it when a member is gone."""
    rest = [p for p in here.peers if p is not gone]
    held: dict[tuple[int, int, str, bytes], PartResult] = {}
    for peer in rest:
        held.update({key_of(result): result for result, _ in peer.exchange.parts.values()})
    remains = Remains((0, ballot), plan.roster, None, held)
    leader = rest[0]
    return renewed_plan(
        leader.identity, leader.exchange.place, plan, remains, {gone.me},
        [p.me for p in rest], plan.roster,
    )  # fmt: skip


@pytest.mark.parametrize("codec", FINE)
def test_all_codecs_in_many_chunks(codec: str) -> None:
    async def scene() -> None:
        async with world(Shape(SIZE, (codec,)), upload=UPLOAD) as here:
            here.work()
            await until(here.whole)
            assert same_bytes(here.peers)
            check_mean(here.peers[0], here, codec)
            for peer in here.peers:
                assert (peer.faults, peer.lost_, peer.refusals) == ([], [], [])
                for result, _ in peer.exchange.parts.values():
                    assert {i.elements for i in result.included} == {result.stop - result.start}

    run(scene)


def test_chunks_are_merged_and_passed_on_while_others_arrive() -> None:
    """The whole takes little longer than its bytes: nothing waits for a whole slice."""

    async def scene() -> None:
        async with world(Shape(SIZE, ("fp32",)), upload=UPLOAD, link=Link(latency=0.001)) as here:
            started = asyncio.get_running_loop().time()
            here.work()
            took = await until(here.whole) - started
            assert took < 1.25 * (1.5 * 4 * SIZE / UPLOAD)

    run(scene)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("share", [0.0, 0.15, 0.3, 0.5, 0.7, 0.85, 0.97])
def test_a_member_that_dies_at_any_stage(codec: str, share: float) -> None:
    async def scene() -> None:
        bytes_each = 1.5 * {"fp32": 4.0, "int8": 1.008}[codec] * SIZE
        async with world(Shape(SIZE, (codec,)), upload=UPLOAD) as here:
            dead, *rest = here.peers
            here.work()
            await asyncio.sleep(share * bytes_each / UPLOAD)
            here.network.kill(dead.me)
            ended = asyncio.get_running_loop().time()

            def known() -> bool:
                return here.whole(dead) or any(dead.me in p.faults for p in rest)

            found = await until(known)
            assert found - ended < 2.5 * here.plan.patience_s + 4 * here.plan.expected_s
            before = sum(p.exchange.bytes_sent for p in rest)
            if not here.whole(dead):
                plan = without(here, here.plan, dead, 5)
                here.work(plan, without=(dead,))
                await until(lambda: covered(rest, plan))
            assert same_result(rest, here)
            part = next(p for p in here.plan.parts if p.owner == dead.me)
            size = rest[0].wiring.codec.encoded_size(part.start, part.stop)
            again = sum(p.exchange.bytes_sent for p in rest) - before
            usual = 3 * bytes_each
            # what was on its way to the dead, and all that its part needs
            assert again <= usual - before + 3 * size + 3 * size

    def covered(rest: Sequence[Peer], plan: Plan) -> bool:
        ranges = {(part.start, part.stop) for part in plan.parts}
        return all({key[:2] for key in p.exchange.parts} == ranges for p in rest)

    def same_result(rest: Sequence[Peer], here: World) -> bool:
        for peer in rest:
            mine = {key[:2] for key in peer.exchange.parts}
            if len(mine) == len(peer.exchange.parts):  # else one range has two owners' results
                check_mean(peer, here, codec)
        return same_bytes(list(rest))

    run(scene)


@pytest.mark.parametrize("seed", range(6))
def test_connections_that_break_are_taken_up_where_they_ended(seed: int) -> None:
    async def scene() -> None:
        shape = Shape(SIZE, ("int8",))
        link = Link(latency=0.005, drop=0.25)
        async with world(shape, upload=UPLOAD, link=link, seed=seed) as here:
            trace = here.network.trace = []
            here.work()
            await until(here.whole)
            assert same_bytes(here.peers)
            assert not any(peer.faults for peer in here.peers)
            check_mean(here.peers[0], here, "int8")
            for result, _ in here.peers[0].exchange.parts.values():
                assert {i.elements for i in result.included} == {result.stop - result.start}
            await until(lambda: not any(p.exchange._transfers.tasks for p in here.peers))
            whole = here.peers[0].wiring.codec.encoded_size(0, SIZE)
            breaks = sum(event.event == "reset" for event in trace)
            assert breaks > 3
            # what was on its way when they broke, and less than a chunk each
            again = sum(p.exchange.bytes_sent for p in here.peers) - 6 * whole
            assert again < breaks * (CHUNK_BYTES + 1.01 * CHUNK)

    run(scene)


def test_who_goes_dark_in_the_middle_is_given_up_on_by_all_owners() -> None:
    async def scene() -> None:
        async with world(Shape(SIZE, ("int8",)), upload=UPLOAD) as here:
            dark, *rest = here.peers
            here.work()
            await asyncio.sleep(0.6 * 1.5 * SIZE / UPLOAD)  # all its slices have begun
            here.network.freeze(dark.me)
            since = asyncio.get_running_loop().time()
            parts = len(here.plan.parts) - 1  # all but its own
            found = await until(lambda: all(len(p.exchange.parts) >= parts for p in rest))
            assert found - since < 1.5 * here.plan.patience_s
            assert all(dark.me in dict(p.refusals) for p in rest)
            await until(lambda: all(dark.me in p.faults for p in rest))
            plan = without(here, here.plan, dark, 5)
            here.work(plan, without=(dark,))
            await until(lambda: here.whole(dark))
            assert same_bytes(rest)
            check_mean(rest[0], here, "int8")
            here.network.thaw(dark.me)

    run(scene)


def test_a_link_that_is_too_slow_counts_with_what_it_brought() -> None:
    size = 160 * CHUNK

    async def scene() -> None:
        async with world(Shape(size, ("int8",)), upload=UPLOAD) as here:
            slow, *rest = here.peers
            node = here.network.node(slow.me)
            assert node is not None
            node.upload = UPLOAD / 15
            here.plan = dataclasses.replace(here.plan, expected_s=1.5 * size / UPLOAD)
            here.work()
            parts = len(here.plan.parts) - 1
            found = await until(lambda: all(len(p.exchange.parts) >= parts for p in rest))
            # until then most chunks wait, and go out all together afterwards
            assert found < 1.5 * here.plan.expected_s + 1.0
            check_mean(rest[0], here, "int8")
            elements = [
                i.elements
                for result, _ in rest[0].exchange.parts.values()
                for i in result.included
                if here.plan.contributors[i.contributor].peer == slow.me
            ]
            assert elements
            assert min(elements) < size // 8

    run(scene)


def test_a_merged_part_that_its_owner_trickles_is_taken_from_another() -> None:
    """A byte now and then never stands still for long, and would take hours."""

    async def trickle(data: torch.Tensor) -> AsyncIterator[bytes]:
        for byte in bytes(data.numpy()):
            yield bytes([byte])
            await asyncio.sleep(1.0)

    async def scene() -> None:
        async with world() as here:
            here.work()
            await until(here.whole)
            late, owner, *_ = here.peers

            async def on_part(sender: PeerId, header: bytes) -> Outgoing:
                wanted = PartRequest.decode(header)
                [data] = [
                    data
                    for result, data in owner.exchange.parts.values()
                    if result.digest == wanted.digest
                ]
                return Outgoing(len(data) - wanted.skip, trickle(data[wanted.skip :]))

            owner.wiring.transport.on_pull("part", on_part)
            results = {result.start: result for result, _ in owner.exchange.parts.values()}
            parts = [dataclasses.replace(p, result=results[p.start]) for p in here.plan.parts]
            await late.exchange.stop()
            late.exchange = late.fresh()
            late.exchange.work(dataclasses.replace(here.plan, ballot=4, parts=tuple(parts)))
            patience = here.plan.patience_s + here.plan.expected_s
            await until(here.whole, 4 * patience)
            assert same_bytes(here.peers)
            assert not late.lost_

    run(scene)


def test_parts_of_a_round_that_is_over_do_not_wait_for_the_garbage_collector() -> None:
    async def scene() -> None:
        async with world(Shape(SIZE, ("int8",)), upload=UPLOAD) as here:
            here.work()
            await until(here.whole)
            await until(lambda: not any(p.exchange._transfers.tasks for p in here.peers))
            seen = [weakref.ref(data) for p in here.peers for _, data in p.exchange.parts.values()]
            for peer in here.peers:
                await peer.exchange.stop()
                peer.exchange = peer.fresh()
            assert not any(ref() is not None for ref in seen)

    gc.collect()
    gc.disable()
    try:
        run(scene)
    finally:
        gc.enable()


def test_merged_chunks_may_come_as_slowly_as_a_link_that_was_announced() -> None:
    """From chunk to chunk of a slow contributor takes longer than transports bear by themselves."""
    size = 9 * CHUNK
    speed = 6e4  # bytes a second: 26 s for a chunk to each of three owners

    async def scene() -> None:
        async with world(Shape(size, ("fp32",)), upload=UPLOAD) as here:
            slow, *rest = here.peers
            node = here.network.node(slow.me)
            assert node is not None
            node.upload = speed
            third = size // 3
            parts = tuple(
                Part(third * n, third * (n + 1), peer.me, None) for n, peer in enumerate(rest)
            )
            expected = 4 * size / speed
            here.plan = dataclasses.replace(
                here.plan,
                parts=parts,
                expected_s=expected,
                patience_s=stillness_of(expected, parts),
            )
            here.work()
            assert await until(here.whole, 1.1 * expected) > 0.9 * expected
            assert not any(peer.faults or peer.refusals for peer in here.peers)

    run(scene)


def test_an_owner_that_was_restarted_gets_slices_again_in_a_later_epoch() -> None:
    """What it was sent is gone with its former life, and its contributors had sent all of it."""

    async def scene() -> None:
        async with world(upload=UPLOAD) as here:
            one, owner, *gone = here.peers
            here.work(without=(gone[0],))  # so its part is not merged yet
            await asyncio.sleep(1.0)
            assert not any(p.owner == owner.me for p in one.held_)
            for peer in gone:
                here.network.kill(peer.me)
            await owner.exchange.stop()
            owner.exchange = owner.fresh()
            names = {peer.me for peer in gone}
            contributors = tuple(
                dataclasses.replace(c, active=c.peer not in names) for c in here.plan.contributors
            )
            parts = tuple(
                dataclasses.replace(p, owner=one.me) if p.owner in names else p
                for p in here.plan.parts
            )
            survivors = dataclasses.replace(
                here.plan, epoch=1, leader=one.me, roster=(one.me, owner.me),
                contributors=contributors, parts=parts,
            )  # fmt: skip
            here.work(survivors, without=tuple(gone))
            ranges = {(p.start, p.stop) for p in parts}
            await until(
                lambda: all({k[:2] for k in p.exchange.parts} >= ranges for p in (one, owner))
            )
            merged = next(r for r, _ in owner.exchange.parts.values() if r.owner == owner.me)
            names_in = {contributors[i.contributor].peer for i in merged.included}
            assert names_in == {one.me, owner.me}

    run(scene)
