"""Merged parts: taken once, sent again, fetched from whoever holds them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from blake3 import blake3
from exchange_kit import (
    PLAN,
    SIZE,
    header_of,
    result_of,
    run,
    same_bytes,
    until,
    world,
)
from gossip_kit import RUN

from gossip.exchange.bodies import as_bytes, trailer_of
from gossip.exchange.buffers import Whole
from gossip.exchange.receiving import PartPull
from gossip.plans.certificate import basis_of, sign_result
from gossip.plans.validity import key_of
from protocols.bodies import BufferFeed
from protocols.errors import RemoteProtocolError, RemoteRefused
from protocols.identity import PeerId
from protocols.messages import Part, PartResult


def test_what_a_dead_owner_had_merged_is_fetched_from_who_has_it() -> None:
    async def scene() -> None:
        async with world() as here:
            dead, lucky, *others = here.peers

            def only_the_lucky(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
                lost = (sender, name) == (dead.me, "merged") and receiver != lucky.me
                return bytes(len(data)) if lost and len(data) > 1000 else data

            here.network.tamper = only_the_lucky
            here.work()
            part = next(p for p in PLAN.parts if p.owner == dead.me)
            key = (part.start, part.stop, dead.me, basis_of(PLAN.codec, PLAN.contributors))
            await until(lambda: key in lucky.exchange.parts)
            here.network.kill(dead.me)
            here.network.tamper = None
            result = result_of(lucky, part)
            done = Part(part.start, part.stop, part.owner, result)
            renewed = dataclasses.replace(
                PLAN, ballot=5, parts=tuple(done if p == part else p for p in PLAN.parts)
            )
            here.work(renewed, without=(dead,))
            await until(lambda: here.whole(dead))
            assert same_bytes([lucky, *others])

    run(scene)


def test_of_two_results_of_one_owner_the_plan_says_which_one_it_is() -> None:
    """It was started anew, or lies: who holds the other one fetches what the plan has."""

    async def scene() -> None:
        async with world() as here:
            part = PLAN.parts[0]
            owner = here.of(part.owner)
            lucky, other = (p for p in here.peers if p is not owner and p.me != PLAN.leader)
            here.work()
            await until(here.whole)
            result, data = lucky.exchange.parts[key_of(result_of(lucky, part))]
            key, twin = key_of(result), torch.zeros_like(data)
            unsigned = dataclasses.replace(
                result, digest=blake3(twin.numpy()).digest(), signature=b""
            )
            other.exchange.parts[key] = (sign_result(owner.identity, RUN, unsigned), twin)
            done = dataclasses.replace(part, result=result)
            other.held_.clear()
            other.exchange.work(dataclasses.replace(PLAN, ballot=5, parts=(done, *PLAN.parts[1:])))
            await until(lambda: result in other.held_)
            assert torch.equal(other.exchange.parts[key][1], data)

    run(scene)


def test_a_part_that_nobody_has_is_reported_as_lost() -> None:
    async def scene() -> None:
        async with world() as here:
            owner = next(p for p in here.peers if p.me == PLAN.parts[0].owner)
            part = PLAN.parts[0]
            result = sign_result(
                owner.identity,
                RUN,
                PartResult(
                    0, 3, part.start, part.stop, owner.me, "int8", b"d" * 32, b"",
                    basis_of(PLAN.codec, PLAN.contributors), b"",
                ),
            )  # fmt: skip
            done = dataclasses.replace(part, result=result)
            other = next(p for p in here.peers if p is not owner)
            other.exchange.work(dataclasses.replace(PLAN, parts=(done, *PLAN.parts[1:])))
            await until(lambda: other.lost_ == [result])

    run(scene)


def test_the_same_things_twice_are_taken_once() -> None:
    async def scene() -> None:
        async with world() as here:
            here.work()
            await until(here.whole)
            before = {id(data) for _, data in here.peers[0].exchange.parts.values()}
            part = next(p for p in PLAN.parts if p.owner != here.peers[0].me)
            owner = here.of(part.owner)
            result, data = owner.exchange.parts[key_of(result_of(owner, part))]
            push = owner.wiring.transport.push
            with pytest.raises(RemoteRefused, match="late"):
                await push(
                    here.peers[0].me,
                    "merged",
                    header_of(PLAN, part).encode(),
                    BufferFeed(as_bytes(data), trailer_of(result, 4)),
                    timeout=1.0,
                )
            header = header_of(PLAN, part)
            with pytest.raises(RemoteRefused, match="late"):
                await here.peers[0].wiring.transport.push(
                    owner.me, "slice", header.encode(), BufferFeed(as_bytes(data)), timeout=1.0
                )
            assert {id(data) for _, data in here.peers[0].exchange.parts.values()} == before

    run(scene)


def test_a_later_plan_has_a_merged_part_sent_again_to_who_missed_it() -> None:
    async def scene() -> None:
        async with world() as here:
            part = PLAN.parts[0]
            owner = here.of(part.owner)
            victim = next(p for p in here.peers if p is not owner)
            here.network.tamper = lambda sender, receiver, name, data: (
                bytes(len(data))
                if (name, receiver) == ("merged", victim.me) and len(data) > 4000
                else data
            )
            here.work()
            await until(lambda: here.whole(victim))
            await until(lambda: bool(victim.faults))
            here.network.tamper = None
            here.work(dataclasses.replace(PLAN, ballot=5))
            await until(here.whole)
            assert same_bytes(here.peers)

    run(scene)


def test_a_part_is_pulled_only_as_it_was_certified() -> None:
    async def scene() -> None:
        async with world() as here:
            here.work()
            await until(here.whole)
            one, other = here.peers[:2]
            result = result_of(one, PLAN.parts[0])
            pulled = PartPull(one.wiring, result, Whole(SIZE))
            await pulled.pull(other.me, 1.0)
            assert torch.equal(pulled.inflow.data, one.exchange.parts[key_of(result)][1])
            here.network.tamper = lambda sender, receiver, name, data: (
                data[:-1] + bytes([data[-1] ^ 1]) if len(data) > 4000 else data
            )
            with pytest.raises(RemoteProtocolError):
                await PartPull(one.wiring, result, Whole(SIZE)).pull(other.me, 1.0)

    run(scene)
