"""A newcomer that is started again, and goes on with the download of the swarm's state."""

from __future__ import annotations

import asyncio
from pathlib import Path

import arrival_kit
import pytest
import torch
from arrival_kit import CREATOR, NEWCOMER, OTHERS, Scene, part, played, swarm

from bootstrap.state import PartialState
from bootstrap.state.offers import MAKING
from bootstrap.state.server import IDLE_S
from node.entry.arrival import Arrival, Arrived
from node.entry.own_arrival import OwnArrival
from node.entry.resuming import WITHIN_S
from protocols.errors import RemoteRefused
from protocols.identity import Identity, PeerId

SIZE = 200_000
BYTES = 8 * SIZE


async def arrive(scene: Scene, on_disk: PartialState, kind: type[Arrival] = Arrival) -> Arrived:
    if scene.network.node(NEWCOMER.peer_id) is not None:
        scene.network.kill(NEWCOMER.peer_id)
    scene.base, scene.momentum = torch.zeros(SIZE), torch.zeros(SIZE)
    arrival = scene.arrival(kind=kind)
    return await arrival.fetch([scene.base, scene.momentum], lambda *_: None, on_disk=on_disk)


async def first_life(scene: Scene, directory: Path) -> None:
    """A newcomer is killed after six seconds of its download from the creator, which take ten."""
    node = scene.network.node(CREATOR.peer_id)
    assert node is not None
    node.upload = BYTES / 10.0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(6.0):
            await arrive(scene, part(directory))
    found = part(directory).offer()
    assert found is not None
    assert found.readers[-1] == CREATOR.peer_id


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("whole", [False, True])
def test_a_newcomer_that_is_started_again_goes_on_with_the_state_that_it_had_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr(arrival_kit, "SIZE", SIZE)

    async def story(scene: Scene) -> None:
        chain = swarm()
        before = chain.claim[0]
        stood = scene.stand(CREATOR, chain, 5.0)
        await first_life(scene, tmp_path)
        chain.add(state=stood.state)  # the others go on
        scene.stand(OTHERS[0], chain, 7.0)
        if whole:
            await arrive(scene, part(tmp_path))
            await asyncio.sleep(2 * IDLE_S)  # the copy is given up
        arrived = await arrive(scene, part(tmp_path))
        assert arrived.target.round == arrived.state.place.round == before
        assert scene.base.min() == scene.base.max() == 5.0
        assert sum(arrived.served.values()) < (1 if whole else 0.7 * BYTES)

    played(story)


def test_where_the_copy_is_gone_the_newest_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival_kit, "SIZE", SIZE)

    async def story(scene: Scene) -> None:
        chain = swarm()
        scene.stand(CREATOR, chain, 5.0)
        await first_life(scene, tmp_path)
        chain.add()
        scene.stand(OTHERS[0], chain, 7.0)
        await asyncio.sleep(2 * IDLE_S)
        arrived = await arrive(scene, part(tmp_path))
        assert arrived.target.round == chain.claim[0]
        assert scene.base.min() == scene.base.max() == 7.0
        assert part(tmp_path).whole

    played(story)


@pytest.mark.parametrize("away", [8.0, 60.0])
def test_a_source_that_does_not_answer_at_once_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: float
) -> None:
    """As where the newcomer's link is not up yet. What hours have brought is not dropped for it."""
    monkeypatch.setattr(arrival_kit, "SIZE", SIZE)

    async def story(scene: Scene) -> None:
        chain = swarm()
        before = chain.claim[0]
        stood = scene.stand(CREATOR, chain, 5.0)
        await first_life(scene, tmp_path)
        chain.add(state=stood.state)
        scene.stand(OTHERS[0], chain, 7.0)
        scene.network.cut(NEWCOMER.peer_id, CREATOR.peer_id)
        loop, began = asyncio.get_running_loop(), now()
        loop.call_later(away, scene.network.splice, NEWCOMER.peer_id, CREATOR.peer_id)
        arrived = await arrive(scene, part(tmp_path))
        back = away < 10.0
        assert arrived.target.round == (before if back else chain.claim[0])
        assert (sum(arrived.served.values()) < 0.7 * BYTES) is back
        assert now() - began < 40.0

    played(story)


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_kit, "SIZE", SIZE)


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("lie", ["again", "trickles"])
def test_a_source_that_lies_afterwards_does_not_cost_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    async def again(peer: PeerId, body: bytes) -> bytes:
        raise RemoteRefused(MAKING, "a copy of the state is being made")

    async def story(scene: Scene) -> None:
        chain = swarm()
        stood = scene.stand(CREATOR, chain, 5.0)
        await first_life(scene, tmp_path)
        chain.add(state=stood.state)
        scene.stand(OTHERS[0], chain, 7.0)
        if lie == "again":
            scene.transports[CREATOR.peer_id].on_call("state", again)
            monkeypatch.setattr("bootstrap.state.offers.COPY_RATE", BYTES / 224.0)  # as of 56 GB
        else:
            liar = scene.network.node(CREATOR.peer_id)
            assert liar is not None
            liar.upload = BYTES / 1e6
        began = now()
        arrived = await arrive(scene, part(tmp_path))
        assert now() - began < (60.0 if lie == "again" else 1.5 * WITHIN_S)
        assert arrived.target.round == chain.claim[0]
        assert scene.base.min() == scene.base.max() == 7.0

    played(story)


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("gone", [False, True])
def test_nobody_makes_a_copy_for_a_download_that_goes_on(tmp_path: Path, gone: bool) -> None:
    async def story(scene: Scene) -> None:
        chain = swarm()
        before = chain.claim[0]
        scene.stand(CREATOR, chain, 5.0)
        await first_life(scene, tmp_path)
        made = scene.copying
        for one in (*OTHERS[:2], *arrival_kit.STRANGERS[:5]):  # all could make one
            scene.stand(one, chain, 5.0)
        if gone:
            await asyncio.sleep(2 * IDLE_S)
        arrived = await arrive(scene, part(tmp_path))
        assert arrived.target.round == before
        if gone:  # as for one that comes for the first time
            assert scene.copying <= made + 3
        else:
            assert scene.copying == made
            assert sum(arrived.served.values()) < 0.7 * BYTES

    played(story)


@pytest.mark.usefixtures("_large")
def test_the_source_is_asked_however_many_others_are_announced_first(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        chain = swarm()
        stood = scene.stand(CREATOR, chain, 5.0)
        await first_life(scene, tmp_path)
        chain.add(state=stood.state)
        announced, scene.announces = scene.announces, []
        for n in range(30):
            scene.stand(Identity.from_seed(bytes([200, n]) + bytes(30)), chain, 7.0)
        scene.announces += announced
        arrived = await arrive(scene, part(tmp_path))
        assert arrived.target.round == stood.round
        assert scene.base.min() == scene.base.max() == 5.0
        assert sum(arrived.served.values()) < 0.7 * BYTES

    played(story)


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("whole", [False, True])
def test_a_state_that_the_chain_does_not_name_is_not_gone_on_with(
    tmp_path: Path, whole: bool
) -> None:
    async def story(scene: Scene) -> None:
        chain = swarm()
        scene.stand(CREATOR, chain, 5.0)
        await first_life(scene, tmp_path)
        if whole:
            await arrive(scene, part(tmp_path))
            assert part(tmp_path).whole
        chain.add(state=bytes(range(32)))  # of the other side of a fork
        scene.stand(OTHERS[0], chain, 7.0)
        arrived = await arrive(scene, part(tmp_path))
        assert arrived.target.round == chain.claim[0]
        assert scene.base.min() == scene.base.max() == 7.0

    played(story)


@pytest.mark.usefixtures("_large")
def test_in_pairs_nothing_of_before_is_taken(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        chain = swarm()
        scene.stand(CREATOR, chain, 5.0)
        await first_life(scene, tmp_path)
        await arrive(scene, part(tmp_path))
        assert part(tmp_path).whole
        arrived = await arrive(scene, part(tmp_path), OwnArrival)
        assert sum(arrived.served.values()) == BYTES

    played(story)
