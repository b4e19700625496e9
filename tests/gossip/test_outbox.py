"""What members send of their own in one exchange, and what they do not."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from exchange_kit import (
    PLAN,
    SHAPE,
    SIZE,
    Peer,
    World,
    result_of,
    run,
    same_bytes,
    until,
    world,
)
from gossip_kit import plan_of

from gossip.exchange.slicing import OwnContribution
from gossip.plans.certificate import basis_of


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


def counted(here: World) -> list[set[int]]:
    """Whose work is in each part, by their places among the contributors."""
    results = [result_of(here.peers[0], part) for part in PLAN.parts]
    return [{included.contributor for included in result.included} for result in results]


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
            assert counted(here) == [{0, 2, 3}] * len(PLAN.parts)
            assert sick.refusals == [(sick.me, "own pseudo-gradient is not finite")]
            for peer in here.peers:
                assert peer.faults == []
                assert peer is sick or peer.refusals == []

    run(scene)


@pytest.mark.parametrize("ready", [False, True])
def test_what_lies_there_is_given_once_it_is_said_to_be_ready(ready: bool) -> None:
    """A plan may count on one that has been started again since, from an older state."""

    async def scene() -> None:
        async with world() as here:
            again = here.peers[1]
            again.exchange._own.withheld = True
            if ready:
                again.exchange.prepare()
            assert again.exchange.offered is ready
            here.work()
            when = await until(here.whole)
            assert when < 1.0  # nobody waited for it
            assert same_bytes(here.peers)
            assert counted(here) == [{0, 1, 2, 3} if ready else {0, 2, 3}] * len(PLAN.parts)
            assert again.exchange.sent is ready
            for peer in here.peers:
                assert (peer.faults, peer.refusals) == ([], [])

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


def test_a_slice_that_another_plan_has_cut_short_is_sent_on_when_its_owner_is_back() -> None:
    """Else the owner would wait for it in vain, and merge the part without it."""

    async def scene() -> None:
        async with world() as here:
            part = PLAN.parts[0]
            owner = here.of(part.owner)
            other = next(p for p in PLAN.roster if p != part.owner)
            elsewhere = (dataclasses.replace(part, owner=other), *PLAN.parts[1:])
            here.work()
            await asyncio.sleep(0.025)  # the slices are on their way, and not there yet
            here.work(dataclasses.replace(PLAN, ballot=5, parts=elsewhere))
            await asyncio.sleep(0.005)
            here.work(dataclasses.replace(PLAN, ballot=9))
            key = (part.start, part.stop, part.owner, basis_of(PLAN.codec, PLAN.contributors))
            when = await until(lambda: all(key in peer.exchange.parts for peer in here.peers))
            assert when < 1.0
            assert len(result_of(owner, part).included) == 4

    run(scene)
