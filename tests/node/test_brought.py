"""Runs that callers bring to a seed without one: none of them is in the way of another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from identity_kit import identity

from node.entry.brought import LEAST_S, MAX_TRIES, TELL_AGAIN_S, Brought, place_of
from node.errors import operator_error
from protocols.errors import OperatorError
from protocols.identity import PeerId
from protocols.memory import virtual_time

A, B, *OTHERS = (identity(number).peer_id for number in range(1, MAX_TRIES + 4))


class Scene:
    """A seed to which runs are brought; what it asks a caller for takes so many seconds."""

    def __init__(self) -> None:
        self.places: dict[PeerId, str] = {}
        self.brought = Brought(lambda peer: self.places.get(peer, peer))
        self.takes: dict[PeerId, float] = {}  # seconds; others say at once that they have none
        self.asked: list[PeerId] = []
        self.given_up: list[PeerId] = []
        self.told: list[OperatorError] = []

    async def take(self, peer: PeerId, run: bytes) -> Any:
        self.asked.append(peer)
        if peer not in self.takes:
            raise operator_error("E502")
        try:
            await asyncio.sleep(self.takes[peer])
        except asyncio.CancelledError:
            self.given_up.append(peer)
            raise
        return f"the run of {peer}"

    async def first(self, within: float = 3600.0) -> Any:
        async with asyncio.timeout(within):
            return await self.brought.first(self.take, self.told.append)


def test_the_first_that_is_handed_over_is_taken_and_the_others_are_left() -> None:
    scene = Scene()
    scene.takes = {A: 1000.0, B: 5.0}

    async def story() -> Any:
        scene.brought.add(A, b"a")
        scene.brought.add(B, b"b")
        return await scene.first()

    assert virtual_time.run(story()) == (B, f"the run of {B}")
    assert (scene.asked, scene.given_up, scene.told) == ([A, B], [A], [])


def test_what_is_brought_meanwhile_is_tried_beside_it() -> None:
    scene = Scene()
    scene.takes = {A: 1000.0, B: 5.0}

    async def story() -> Any:
        scene.brought.add(A, b"a")
        asyncio.get_running_loop().call_later(10.0, scene.brought.add, B, b"b")
        found = await scene.first()
        return found, asyncio.get_running_loop().time()

    found, at = virtual_time.run(story())
    assert (found[0], at) == (B, pytest.approx(15.0))


def test_a_place_has_one_try_at_a_time_and_another_after_it() -> None:
    scene = Scene()
    scene.places = {A: "here", B: "here"}
    scene.takes = {B: 1.0}

    async def story() -> Any:
        scene.brought.add(A, b"a")
        scene.brought.add(B, b"b")  # as the caller's place has one
        with pytest.raises(TimeoutError):
            await scene.first(1.0)
        assert scene.asked == [A]
        scene.brought.add(B, b"b")
        return await scene.first()

    assert virtual_time.run(story())[0] == B


def test_where_too_many_are_tried_the_oldest_makes_way() -> None:
    scene = Scene()
    scene.takes = dict.fromkeys([A, B, *OTHERS], 1000.0)

    async def story() -> None:
        for number, peer in enumerate([A, B, *OTHERS]):
            at = LEAST_S * (number + 1)
            asyncio.get_running_loop().call_later(at, scene.brought.add, peer, b"a")
        with pytest.raises(TimeoutError):
            await scene.first(100.0)

    virtual_time.run(story())
    everyone = [A, B, *OTHERS]
    assert scene.asked == everyone
    assert scene.given_up[: len(everyone) - MAX_TRIES] == everyone[: len(everyone) - MAX_TRIES]
    assert sorted(scene.given_up) == sorted(everyone)


@pytest.mark.parametrize("takes", [0.5, 2.0, 4.5])
def test_many_that_begin_together_do_not_end_each_other_s_tries(takes: float) -> None:
    """Each brings its run again every second, for half a minute."""
    scene = Scene()
    creators = [A, B, *OTHERS]
    scene.takes = dict.fromkeys(creators, takes)

    async def story() -> Any:
        loop = asyncio.get_running_loop()
        for number, peer in enumerate(creators * 30):
            loop.call_later(number / len(creators), scene.brought.add, peer, b"a")
        await scene.first()
        return loop.time()

    assert virtual_time.run(story()) == pytest.approx(takes)
    assert len(scene.asked) == MAX_TRIES


def test_what_makes_way_is_ended_at_once_and_the_rest_once_there_is_a_run() -> None:
    scene = Scene()
    scene.takes = dict.fromkeys([A, B, *OTHERS], 1000.0)
    scene.takes[OTHERS[-1]] = 1.0
    first = [A, B, *OTHERS][:MAX_TRIES]

    async def story() -> None:
        loop = asyncio.get_running_loop()
        for peer in first:
            scene.brought.add(peer, b"a")
        loop.call_later(LEAST_S, scene.brought.add, OTHERS[-1], b"a")
        loop.call_later(LEAST_S + 0.5, lambda: given_up.extend(scene.given_up))
        await scene.first()
        assert given_up == first[:1]
        assert scene.given_up == first, "nobody is asked on"
        for peer in first:  # all was forgotten: there is room
            scene.brought.add(peer, b"a")
        with pytest.raises(TimeoutError):
            await scene.first(1.0)
        assert scene.asked[-MAX_TRIES:] == first

    given_up: list[PeerId] = []
    virtual_time.run(story())


@pytest.mark.parametrize(
    ("seen", "other", "one_place"),
    [
        ("93.184.216.34:1", "93.184.216.34:2", True),
        ("93.184.216.34:1", "93.184.216.35:1", False),
        ("172.17.0.1:1", "172.17.0.1:2", False),
        ("127.0.0.1:1", "127.0.0.1:2", False),
        ("", "", True),
    ],
    ids=["an address", "two addresses", "gateway", "this machine", "relays"],
)
def test_behind_a_gateway_each_caller_is_a_place(seen: str, other: str, one_place: bool) -> None:
    """Else one that hands nothing over would hold it for all: they come from its address."""
    assert (place_of(A, seen) == place_of(B, other)) is one_place
    assert place_of(A, seen) == place_of(A, seen)


def test_a_stranger_with_a_failure_per_call_does_not_fill_the_log() -> None:
    scene = Scene()

    async def story() -> None:
        for number in range(100):
            asyncio.get_running_loop().call_later(number, scene.brought.add, A, b"a")
        with pytest.raises(TimeoutError):
            await scene.first(100.0)

    virtual_time.run(story())
    assert len(scene.asked) == 100
    assert len(scene.told) == 1 + int(99 / TELL_AGAIN_S)
