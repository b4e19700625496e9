"""Slices and merged parts that an exchange refuses, and what that costs whom."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import pytest
import torch
from blake3 import blake3
from exchange_kit import (
    CODEC,
    PLAN,
    SIZE,
    header_of,
    run,
    same_bytes,
    until,
    world,
)
from gossip_kit import RUN, counts_of

from gossip.exchange.bodies import as_bytes, trailer_of
from gossip.exchange.part_states import PLAN_WAIT_S
from gossip.plans.certificate import basis_of, sign_result
from gossip.plans.validity import key_of
from protocols.bodies import BufferFeed
from protocols.counts import Included
from protocols.errors import RemoteRefused
from protocols.identity import PeerId
from protocols.messages import Part, PartResult


@pytest.mark.parametrize(
    ("how", "code", "counted"),
    [
        ("too short", "protocol", True),
        ("another codec", "protocol", True),
        ("another range", "early", False),
        ("another basis", "early", False),
    ],
)
def test_slices_that_are_refused(how: str, code: str, counted: bool) -> None:
    async def scene() -> None:
        async with world() as here:
            part = PLAN.parts[0]
            owner, liar = here.of(part.owner), here.of(PLAN.parts[1].owner)
            owner.exchange.work(PLAN)
            header = header_of(PLAN, part)
            data = torch.zeros(CODEC.encoded_size(part.start, part.stop), dtype=torch.uint8)
            if how == "too short":
                data = data[:-1].clone()
            elif how == "another codec":
                header = header_of(PLAN, part, codec="fp32")
            elif how == "another range":
                header = header_of(PLAN, part, stop=2**62)
            else:
                header = header_of(PLAN, part, basis=b"x" * 32)
            with pytest.raises(RemoteRefused) as refusal:
                await liar.wiring.transport.push(
                    owner.me,
                    "slice",
                    header.encode(),
                    BufferFeed(as_bytes(data)),
                    timeout=2 * PLAN_WAIT_S,
                )
            assert refusal.value.code == code
            assert [peer for peer, why in owner.refusals if "late" not in why] == (
                [liar.me] if counted else []
            )

    run(scene)


def test_one_peer_has_no_more_than_two_transfers_of_one_slice_under_way() -> None:
    async def scene() -> None:
        async with world(upload=1e4) as here:
            part = PLAN.parts[0]
            owner, greedy = here.of(part.owner), here.of(PLAN.parts[1].owner)
            owner.exchange.work(PLAN)
            size = CODEC.encoded_size(part.start, part.stop)
            codes = []

            async def one() -> None:
                try:
                    await greedy.wiring.transport.push(
                        owner.me,
                        "slice",
                        header_of(PLAN, part).encode(),
                        BufferFeed(bytes(size)),
                        timeout=5.0,
                    )
                except RemoteRefused as error:
                    codes.append(error.code)

            async with asyncio.TaskGroup() as group:
                for _ in range(6):
                    group.create_task(one())
            assert codes.count("busy") == 4

    run(scene)


@pytest.mark.parametrize(
    "how",
    ["nan", "another digest", "too many elements", "unsigned", "too short", "another codec",
     "no such chunk"],
)  # fmt: skip
def test_merged_parts_that_are_refused(how: str) -> None:
    async def scene() -> None:
        async with world() as here:
            part = PLAN.parts[0]
            liar, other = here.of(part.owner), here.of(PLAN.parts[1].owner)
            other.exchange.work(PLAN)
            data = torch.zeros(CODEC.encoded_size(part.start, part.stop), dtype=torch.uint8)
            header = header_of(PLAN, part)
            if how == "nan":
                data[:2] = torch.tensor([math.nan]).to(torch.bfloat16).view(torch.uint8)
            elif how == "another codec":
                header = header_of(PLAN, part, codec="fp32")
            elif how == "no such chunk":
                header = header_of(PLAN, part, done=5)
            result = merged_as(part, data)
            if how == "another digest":
                result = dataclasses.replace(result, digest=b"d" * 32)
            elif how == "too many elements":
                result = dataclasses.replace(result, counts=counts_of([Included(3, 40_000)]))
            if how == "unsigned":
                result = dataclasses.replace(result, signature=bytes(64))
            else:
                result = sign_result(liar.identity, RUN, result)
            body = as_bytes(data)[how == "too short" :]
            with pytest.raises(RemoteRefused, match="protocol"):
                await liar.wiring.transport.push(
                    other.me,
                    "merged",
                    header.encode(),
                    BufferFeed(body, trailer_of(result, 4)),
                    timeout=5.0,
                )
            assert other.exchange.parts == {}
            assert [peer for peer, _ in other.refusals] == [liar.me]

    run(scene)


def merged_as(part: Part, data: torch.Tensor) -> PartResult:
    """What an owner says of a part that looks like this."""
    return PartResult(
        0, 3, part.start, part.stop, part.owner, "int8", blake3(as_bytes(data)).digest(),
        counts_of([Included(0, 5)]), basis_of(PLAN.codec, PLAN.contributors), b"",
    )  # fmt: skip


def test_parts_that_no_plan_has_take_no_memory() -> None:
    async def scene() -> None:
        async with world() as here:
            liar, other = here.of(PLAN.parts[0].owner), here.of(PLAN.parts[1].owner)
            other.exchange.work(PLAN)
            data = torch.zeros(CODEC.encoded_size(0, SIZE), dtype=torch.uint8)
            whole = Part(0, SIZE, liar.me, None)
            result = sign_result(liar.identity, RUN, merged_as(whole, data))
            with pytest.raises(RemoteRefused, match="early"):
                await liar.wiring.transport.push(
                    other.me,
                    "merged",
                    header_of(PLAN, whole).encode(),
                    BufferFeed(as_bytes(data), trailer_of(result, 4)),
                    timeout=2 * PLAN_WAIT_S,
                )
            assert key_of(result) not in other.exchange.parts
            assert other.exchange.bytes_received == 0

    run(scene)


@pytest.mark.parametrize("name", ["slice", "merged"])
def test_bytes_that_change_on_the_way(name: str) -> None:
    """A merged part is refused by its digest; a slice is one island's business, if it is finite."""

    async def scene() -> None:
        async with world() as here:
            part = PLAN.parts[0]
            owner = here.of(part.owner)
            victim = next(p for p in here.peers if p is not owner)

            def flip(sender: PeerId, receiver: PeerId, what: str, data: bytes) -> bytes:
                mine = (owner.me, victim.me) if name == "merged" else (victim.me, owner.me)
                if what != name or (sender, receiver) != mine or len(data) < 4000:
                    return data
                return bytes([255 - byte for byte in data[:4]]) + data[4:]

            here.network.tamper = flip
            here.work()
            if name == "merged":
                await until(lambda: owner.me in victim.faults)
                assert (owner.me, "the part does not match its digest") in victim.refusals
                assert len(victim.exchange.parts) == 3
            else:
                await until(here.whole)
                assert same_bytes(here.peers)

    run(scene)
