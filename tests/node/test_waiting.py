"""What a newcomer is told while it waits to be let in."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bootstrap.manifest import Manifest
from gossip.membership.members import Membership
from gossip.rounds.gathering import Gathering
from node.entry.waiting import Gatherer, Waiting, gathering_of
from node.modes import check_wait
from node.monitor.events import JoinProgress
from protocols.bounds import MAX_ROSTER
from protocols.errors import OperatorError
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.messages import UNKNOWN_ETA_S, Announce

ME, OTHER, THIRD = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2, 3))
ROUND_S, ROUNDS = 40.0, 6


class Scene:
    """A newcomer beside one island, which announces itself every second."""

    def __init__(self) -> None:
        self.told: list[tuple[float, str]] = []
        self.membership = Membership(ME)
        self.place = SimpleNamespace(round=5)
        self.status = SimpleNamespace(status="joining")
        self.roster: tuple[PeerId, ...] = (OTHER,)
        self.left: list[str] = []  # why it leaves
        self.eta = 0.0  # what the island says; 0: the rest of its round

    async def play(self, seconds: float, *, rounds: bool = False, silent: bool = False) -> None:
        loop = asyncio.get_running_loop()
        replica = SimpleNamespace(place=self.place, roster=self.roster)
        chain: Any = SimpleNamespace(
            now=loop.time, membership=self.membership, replica=replica, status=self.status
        )
        log: Any = SimpleNamespace(emit=self._told)
        waiting = asyncio.ensure_future(
            Waiting(chain, log, lambda said: said.round >= ROUNDS, self.left.append).run()
        )
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
            eta=self.eta or ROUND_S - second % ROUND_S, name="first",
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


def farewell(round_: int, peer: PeerId = OTHER, status: str = "leaving") -> Announce:
    return Announce(
        peer, "island", status, 1, (), "", "", round_, b"", b"", 0, eta=0.0, name="first"
    )


@pytest.mark.parametrize("over", [False, True])
def test_where_who_decides_has_said_farewell_that_is_told(over: bool) -> None:
    """At the end of the run nothing is left to wait for."""
    scene = Scene()

    async def main() -> None:
        now = asyncio.get_running_loop().time()
        scene.membership.on_announce(farewell(5 + over), b"", 1, now)
        await scene.play(20.0, silent=True)

    virtual_time.run(main())
    assert (
        scene.left
        == ["the run is over, and who has its last rounds left before they were here"] * over
    )
    told = [text for _, text in scene.told]
    assert told == [
        f"waits for those who decide on rounds, and they have left: …{PeerId(OTHER)[-8:]}; "
        "with one of them (node start --resume) it goes on"
    ] * (not over)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (farewell(6), farewell(5, THIRD)),  # one of two may lie
        (farewell(6), farewell(6, THIRD, "active")),
        (farewell(5), farewell(5, THIRD)),
    ],
)
def test_it_stays_while_the_last_rounds_may_come(first: Announce, second: Announce) -> None:
    scene = Scene()
    scene.roster = (OTHER, THIRD)

    async def main() -> None:
        for announce in (first, second):
            now = asyncio.get_running_loop().time()
            scene.membership.on_announce(announce, b"", 1, now)
        await scene.play(20.0, silent=True)

    virtual_time.run(main())
    assert scene.left == []


def test_it_stays_where_somebody_else_is_further() -> None:
    """A seed, which has the last rounds and serves them."""
    scene = Scene()

    async def main() -> None:
        now = asyncio.get_running_loop().time()
        scene.membership.on_announce(farewell(6), b"", 1, now)
        seed = replace(farewell(6, THIRD, "active"), role="seed")

        async def announce() -> None:
            for second in range(20):
                scene.membership.on_announce(seed, b"", second, asyncio.get_running_loop().time())
                await asyncio.sleep(1.0)

        async with asyncio.TaskGroup() as group:
            group.create_task(announce())
            group.create_task(scene.play(19.0, silent=True))

    virtual_time.run(main())
    assert scene.left == []


def test_before_the_first_round_it_is_told_who_lets_in_who_is_there() -> None:
    scene = Scene()
    scene.place.round = 0
    scene.eta = UNKNOWN_ETA_S
    virtual_time.run(scene.play(20.0))
    assert scene.told[0][1] == "waits for the run to begin: first lets in all who are there then"


def test_a_creator_tells_how_many_are_there_until_the_run_begins() -> None:
    told: list[str] = []
    others: list[PeerId] = []
    trains = {OTHER: UNKNOWN_ETA_S}

    def announced(peer: PeerId) -> Any:
        return SimpleNamespace(role="island", eta=trains[peer])

    company = SimpleNamespace(waiting=lambda now: set(others), announcement=announced)
    gathering = Gathering(2, able=True)
    place: Any = SimpleNamespace(round=0)
    replica, round_ = SimpleNamespace(place=place), SimpleNamespace(company=company)
    chain: Any = SimpleNamespace(
        gathering=gathering, round=round_, replica=replica, now=lambda: 0.0
    )

    async def main() -> None:
        log: Any = SimpleNamespace(emit=lambda event: told.append(event.text))
        gatherer = asyncio.ensure_future(Gatherer(chain, log).run())
        await asyncio.sleep(5.0)
        assert not gathering.complete(cast(Any, company), 0.0)
        others.append(OTHER)
        await asyncio.sleep(5.0)
        assert not gathering.complete(cast(Any, company), 0.0), "its trainer is not there yet"
        trains[OTHER] = 60.0
        await asyncio.sleep(5.0)
        assert gathering.complete(cast(Any, company), 0.0)
        place.round = 1
        await asyncio.wait_for(gatherer, 5.0)

    virtual_time.run(main())
    assert [text.partition(":")[0] for text in told] == [
        "1 of 2 islands are there",
        "2 of 2 islands are there",
    ]


@pytest.mark.parametrize(
    ("round_", "roster", "trained", "waits"),
    [(0, (ME,), False, True), (1, (ME,), False, False), (0, (OTHER,), False, False),
     (0, (ME,), True, False)],
)  # fmt: skip
def test_who_cannot_begin_the_run_or_has_trained_in_it_waits_for_nobody(
    round_: int, roster: tuple[PeerId, ...], trained: bool, waits: bool
) -> None:
    told: list[Any] = []
    replica: Any = SimpleNamespace(me=ME, roster=roster, place=SimpleNamespace(round=round_))
    restored: Any = SimpleNamespace(trained="ckpt-00000000") if trained else None
    log: Any = SimpleNamespace(emit=told.append)
    found = gathering_of(3, replica, restored=restored, events=log)
    assert found.on(replica.place) is waits
    assert ["does nothing" in event.text for event in told] == [True] * (not waits)


def test_islands_in_pairs_cannot_wait_for_others() -> None:
    with pytest.raises(OperatorError, match="E204") as refused:
        check_wait(Manifest.model_validate({"mode": "gossip"}), 3)
    assert "mode gossip" in str(refused.value)
    check_wait(Manifest.model_validate({"mode": "async"}), 3)
