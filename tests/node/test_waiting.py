"""What a newcomer is told while it waits to be let in."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gossip.membership.members import Membership
from gossip.plans.validity import MAX_ROSTER
from node.entry.waiting import Waiting
from node.monitor.events import JoinProgress
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.messages import Announce

ME, OTHER = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2))
ROUND_S = 40.0


class Scene:
    """A newcomer beside one island, which announces itself every second."""

    def __init__(self) -> None:
        self.told: list[tuple[float, str]] = []
        self.membership = Membership(ME)
        self.place = SimpleNamespace(round=5)
        self.status = SimpleNamespace(status="joining")
        self.roster: tuple[PeerId, ...] = (OTHER,)

    async def play(self, seconds: float, *, rounds: bool = False, silent: bool = False) -> None:
        loop = asyncio.get_running_loop()
        replica = SimpleNamespace(place=self.place, roster=self.roster)
        chain: Any = SimpleNamespace(
            now=loop.time, membership=self.membership, replica=replica, status=self.status
        )
        log: Any = SimpleNamespace(emit=self._told)
        waiting = asyncio.ensure_future(Waiting(chain, log).run())
        for second in range(int(seconds)):
            if not silent:
                self._announce(second)
            if rounds and second and second % ROUND_S == 0:
                self.place.round += 1
            await asyncio.sleep(1.0)
        self.status.status = "active"
        await asyncio.wait_for(waiting, 5.0)

    def _announce(self, second: int) -> None:
        announce = Announce(
            OTHER, "island", "active", 1, (), "", "", self.place.round, b"", b"", 0,
            eta=ROUND_S - second % ROUND_S, name="first",
        )  # fmt: skip
        now = asyncio.get_running_loop().time()
        self.membership.on_announce(announce, b"", second, now)

    def _told(self, event: JoinProgress) -> None:
        assert event.step == 6
        self.told.append((asyncio.get_running_loop().time(), event.text))


def test_it_is_told_whom_it_waits_for_and_later_that_no_round_comes() -> None:
    """As beside an island a parameter of which overflows: it takes its steps again and again."""
    scene = Scene()
    virtual_time.run(scene.play(600.0))
    first, last = scene.told[0], scene.told[-1]
    assert first[1] == "waits to be let in by the next round: first is ready in 30s"
    assert "none has come for " in last[1]
    assert "though first said it needs 40s" in last[1]
    assert "not be finite" in last[1]
    assert len(scene.told) < 12


@pytest.mark.parametrize("seconds", [8.0, 600.0])
def test_where_rounds_come_nothing_is_said_to_be_wrong(seconds: float) -> None:
    scene = Scene()
    virtual_time.run(scene.play(seconds, rounds=True))
    assert bool(scene.told) is (seconds > 8.0)
    assert not any("none has come" in text for _, text in scene.told)


def test_where_nobody_is_there_who_decides_they_are_named() -> None:
    scene = Scene()
    virtual_time.run(scene.play(20.0, silent=True))
    assert f"none of them is there: …{PeerId(OTHER)[-8:]}" in scene.told[0][1]
    assert "node start --resume" in scene.told[0][1]


def test_it_is_told_that_a_run_has_no_room_for_more() -> None:
    scene = Scene()
    scene.roster = (OTHER, *(f"member {n}" for n in range(MAX_ROSTER - 1)))
    virtual_time.run(scene.play(100.0, rounds=True))
    assert scene.told
    assert all("until one of the 256 members leaves" in text for _, text in scene.told)


def test_where_who_decides_has_said_farewell_that_is_told() -> None:
    scene = Scene()

    async def main() -> None:
        farewell = Announce(
            OTHER, "island", "leaving", 1, (), "", "", 5, b"", b"", 0, eta=0.0, name="first"
        )
        scene.membership.on_announce(farewell, b"", 1, asyncio.get_running_loop().time())
        await scene.play(20.0, silent=True)

    virtual_time.run(main())
    assert f"and they have left: …{PeerId(OTHER)[-8:]}" in scene.told[0][1]
