"""Slices and merged parts on a simulated network that breaks in all ways."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import exchange_kit
import pytest
import torch
from blake3 import blake3
from exchange_kit import (
    CODEC,
    LEADER,
    MEMBERS,
    PLAN,
    SHAPE,
    SIZE,
    Peer,
    header_of,
    result_of,
    run,
    same_bytes,
    until,
)
from gossip_kit import RUN, plan_of

from gossip.bodies import as_bytes, trailer_of
from gossip.buffers import Whole
from gossip.certificate import basis_of, sign_result
from gossip.planned import PLAN_WAIT_S
from gossip.receiving import pull_part
from gossip.slicing import OwnContribution
from gossip.validity import key_of
from protocols.bodies import BufferFeed
from protocols.errors import RemoteProtocolError, RemoteRefused
from protocols.identity import PeerId
from protocols.memory import Link
from protocols.messages import Part, PartResult

world = functools.partial(exchange_kit.world, SHAPE)


def test_all_hold_the_same_bytes_and_they_are_the_mean() -> None:
    async def scene() -> None:
        async with world() as here:
            here.work()
            await until(here.whole)
            assert same_bytes(here.peers)
            wanted = sum(peer.values for peer in here.peers) / 4
            error = (here.peers[0].mean() - wanted).norm() / wanted.norm()
            assert error < 0.02
            for peer in here.peers:
                assert (peer.faults, peer.lost_, peer.refusals) == ([], [], [])
                assert len(peer.held_) == 4
            whole = CODEC.encoded_size(0, SIZE)  # each sends 3/4 of it as slices, and 1/4 thrice
            await until(lambda: all(p.exchange.bytes_sent > 1.45 * whole for p in here.peers))
            assert all(p.exchange.bytes_sent < 1.55 * whole for p in here.peers)

    run(scene)


def test_what_a_contributor_sent_before_it_died_is_merged() -> None:
    """It counts in the chunks that arrived whole, and its result says which these are."""

    async def scene() -> None:
        async with world(upload=1e5) as here:
            dead = here.peers[1]
            plan = plan_of(LEADER, MEMBERS, shape=SHAPE, owners=[here.peers[0].identity])
            for peer in here.peers:
                peer.exchange.work(plan)
            owner = here.peers[0]
            (part,) = owner.exchange._owning._parts.values()
            # its matrices are there, its vectors on the way
            await until(lambda: part.merge.elements(dead.me) > 0)
            here.network.kill(dead.me)
            await until(lambda: all(p.exchange.parts for p in here.peers if p is not dead))
            ((result, _),) = owner.exchange.parts.values()
            counted = {plan.contributors[i.contributor].peer: i.elements for i in result.included}
            assert counted == {p.me: SIZE - 1000 if p is dead else SIZE for p in here.peers}
            alive = sum(p.values for p in here.peers if p is not dead)
            wanted = (alive + dead.values) / 4
            wanted[SIZE - 1000 :] = alive[SIZE - 1000 :] / 3
            assert (owner.mean() - wanted).norm() / wanted.norm() < 0.02

    run(scene)


def test_an_owner_that_dies_before_it_has_merged_is_reported_by_all() -> None:
    async def scene() -> None:
        async with world(upload=1e5) as here:
            here.work()
            await asyncio.sleep(0.1)
            dead, *others = here.peers
            here.network.kill(dead.me)
            await until(lambda: all(dead.me in peer.faults for peer in others))
            assert all(set(peer.faults) == {dead.me} for peer in others)

    run(scene)


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


def test_a_slice_may_come_before_the_plan() -> None:
    async def scene() -> None:
        async with world() as here:
            late = here.of(PLAN.parts[2].owner)
            here.work(without=(late,))
            await asyncio.sleep(0.8)
            late.exchange.work(PLAN)
            await until(here.whole)
            assert len(result_of(here.peers[0], PLAN.parts[2]).included) == 4
            assert not any(peer.faults for peer in here.peers)

    run(scene)


def test_a_slice_that_does_not_come_is_left_out_after_twice_the_plans_patience() -> None:
    async def scene() -> None:
        async with world() as here:
            owner = here.of(PLAN.parts[0].owner)
            slow = next(p for p in here.peers if p is not owner)
            here.work(without=(slow,))
            when = await until(lambda: bool(owner.exchange.parts))
            assert 1.9 < when < 2.5
            assert (slow.me, "its slice does not come") in owner.refusals
            assert len(result_of(owner, PLAN.parts[0]).included) == 3
            slow.exchange.work(PLAN)  # its slice now meets a closed door, which is nobody's fault
            await asyncio.sleep(1.0)
            assert slow.faults == []

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


def poisoned(peer: Peer) -> None:
    peer.values[SIZE - 1] = math.nan  # in the last part only: none of it is to be merged


def test_an_island_whose_pseudo_gradient_is_not_finite_declines() -> None:
    async def scene() -> None:
        async with world() as here:
            sick = here.peers[1]
            poisoned(sick)
            here.work()
            when = await until(here.whole)
            assert when < 1.0  # nobody waited for it
            assert same_bytes(here.peers)
            for part in PLAN.parts:
                counted = {i.contributor for i in result_of(here.peers[0], part).included}
                assert counted == {0, 2, 3}
            assert sick.refusals == [(sick.me, "own pseudo-gradient is not finite")]
            for peer in here.peers:
                assert peer.faults == []
                assert peer is sick or peer.refusals == []

    run(scene)


@dataclass
class Reading:
    """A source that tells when it is read."""

    delta: Callable[[int, int, torch.Tensor], torch.Tensor]


def test_a_known_norm_spares_looking_at_every_element() -> None:
    """Unless it proves nothing: none was measured, or it is not finite, or too large."""

    async def scene() -> None:
        async with world() as here:
            one, seen = here.peers[0], list[int]()

            def delta(start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
                seen.append(start)
                return one.values[start:stop]

            for norm, looked in [(1e3, 0), (0.0, 1), (math.inf, 1), (math.nan, 1), (1e38, 1)]:
                seen.clear()
                own = OwnContribution(one.wiring, SHAPE, Reading(delta), lambda why: None)
                own.known(norm)
                assert await own.is_sound()
                assert len(seen) == looked

    run(scene)


def test_an_island_beyond_what_the_codec_carries_declines() -> None:
    async def scene() -> None:
        async with world() as here:
            sick = here.peers[1]
            sick.values[0] = 3e38  # finite, but int8 has no scale for it
            here.work()
            assert await until(here.whole) < 1.0
            (why,) = [why for peer, why in sick.refusals if peer == sick.me]
            assert "int8" in why

    run(scene)


def test_if_nobody_has_anything_the_mean_is_zero() -> None:
    async def scene() -> None:
        async with world() as here:
            for peer in here.peers:
                poisoned(peer)
            here.work()
            assert await until(here.whole) < 1.0
            assert not here.peers[0].mean().any()
            assert all(result_of(here.peers[0], part).included == () for part in PLAN.parts)

    run(scene)


def test_alone_and_not_finite() -> None:
    async def scene() -> None:
        async with world(count=1) as here:
            (peer,) = here.peers
            poisoned(peer)
            peer.exchange.work(plan_of(peer.identity, [peer.identity], shape=SHAPE))
            await until(lambda: len(peer.held_) == 1)

    run(scene)


def test_broken_connections_are_tried_again() -> None:
    async def scene() -> None:
        async with world(link=Link(latency=0.02, drop=0.15)) as here:
            here.work()
            assert await until(here.whole) < 3.0
            assert same_bytes(here.peers)
            assert not any(peer.faults for peer in here.peers)

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


def test_another_list_of_contributors_is_merged_anew() -> None:
    async def scene() -> None:
        async with world() as here:
            here.work()
            await until(here.whole)
            fewer = dataclasses.replace(PLAN, ballot=5, contributors=PLAN.contributors[1:])
            here.work(fewer)
            keys = {
                (part.start, part.stop, part.owner, basis_of(fewer.codec, fewer.contributors))
                for part in PLAN.parts
            }
            await until(lambda: all(keys <= set(p.exchange.parts) for p in here.peers))
            for key in keys:
                result, _ = here.peers[0].exchange.parts[key]
                assert [i.contributor for i in result.included] == [0, 1, 2]

    run(scene)


def test_when_the_round_is_over_nothing_goes_on() -> None:
    async def scene() -> None:
        async with world() as here:
            owner = here.of(PLAN.parts[0].owner)
            owner.exchange.work(PLAN)  # nobody else does: it would wait for four seconds
            await asyncio.sleep(0.2)
            await owner.exchange.stop()
            await until(lambda: not owner.exchange._transfers.tasks, PLAN_WAIT_S + 1.0)
            assert (owner.held_, owner.refusals, owner.faults) == ([], [], [])
            with pytest.raises(RemoteRefused, match="late"):
                await here.of(PLAN.parts[1].owner).wiring.transport.push(
                    owner.me,
                    "slice",
                    header_of(PLAN, PLAN.parts[0]).encode(),
                    BufferFeed(bytes(10)),
                    timeout=5.0,
                )

    run(scene)


def test_a_part_is_pulled_only_as_it_was_certified() -> None:
    async def scene() -> None:
        async with world() as here:
            here.work()
            await until(here.whole)
            one, other = here.peers[:2]
            result = result_of(one, PLAN.parts[0])
            data = await pull_part(one.wiring, other.me, result, 1.0, Whole(SIZE))
            assert torch.equal(data, one.exchange.parts[key_of(result)][1])
            here.network.tamper = lambda sender, receiver, name, data: (
                data[:-1] + bytes([data[-1] ^ 1]) if len(data) > 4000 else data
            )
            with pytest.raises(RemoteProtocolError):
                await pull_part(one.wiring, other.me, result, 1.0, Whole(SIZE))

    run(scene)
