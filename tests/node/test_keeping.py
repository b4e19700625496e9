"""Whom a newcomer asks for a state while others make their copy, or say nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from arrival_kit import STRANGERS, Scene, played, swarm
from lineage_kit import CREATOR, OTHERS

from bootstrap.state.offers import AGAIN_S, ANSWER_S, COPY_RATE, OUTER_STEP_S, making_s, turn_s
from bootstrap.state.widening import QUIET_S
from node.entry.arrival import OFFER_TIMEOUT_S, Arrival
from node.entry.keeping import Hope
from node.entry.looking import PATIENCE_S
from node.entry.own_arrival import OwnArrival
from protocols.errors import OperatorError
from protocols.identity import Identity, PeerId

pytestmark = pytest.mark.usefixtures("remembered_signatures")

KINDS = pytest.mark.parametrize("kind", [Arrival, OwnArrival])


def now() -> float:
    return asyncio.get_running_loop().time()


async def never(work: Callable[[], Any]) -> Any:
    await asyncio.sleep(1e6)


def after(seconds: float) -> Any:
    async def copying(work: Callable[[], Any]) -> Any:
        await asyncio.sleep(seconds)
        return work()

    return copying


def silence(scene: Scene, peers: Sequence[PeerId], name: str = "state") -> None:
    async def nothing(peer: PeerId, body: bytes) -> bytes:
        await asyncio.sleep(1e6)
        return b""

    for peer in peers:
        scene.transports[peer].on_call(name, nothing)


def crowd(count: int) -> list[Identity]:
    """Strangers, of whom a newcomer to pairs asks each later one later."""
    return [Identity.from_seed(bytes([n, 7]) * 16) for n in range(count)]


def stand_apart(scene: Scene, who: Sequence[Identity], copying: Sequence[Any]) -> None:
    """Each at a state of its own, as islands in pairs have; the first is the furthest."""
    chain, said = swarm(), []
    for identity, copies in zip(reversed(who), reversed(copying), strict=True):
        chain.add()
        said.append(scene.stand(identity, chain, float(len(said)), copying=copies))
    for announce in said:
        assert announce.peer in scene.transports


def test_islands_in_pairs_that_only_make_their_copy_keep_nobody_from_another() -> None:
    async def story(scene: Scene) -> None:
        stand_apart(scene, crowd(4), [never, never, never, after(0.0)])
        await scene.arrive(kind=OwnArrival)
        assert scene.base.unique().tolist() == [0.0]
        assert now() < 3 * (ANSWER_S + AGAIN_S)
        assert len(scene.waited) == 3

    played(story)


def test_islands_in_pairs_that_say_nothing_keep_nobody_from_another() -> None:
    async def story(scene: Scene) -> None:
        islands = crowd(4)
        stand_apart(scene, islands, [after(0.0)] * 4)
        silence(scene, [one.peer_id for one in islands[:3]])
        await scene.arrive(kind=OwnArrival)
        assert scene.base.unique().tolist() == [0.0]
        assert now() < 3 * QUIET_S + 1.0 < OFFER_TIMEOUT_S

    played(story)


def test_the_furthest_in_pairs_is_taken_where_it_is_there_first() -> None:
    """It was asked first, and is asked again while others are."""

    async def story(scene: Scene) -> None:
        stand_apart(scene, crowd(3), [after(8.0), never, never])
        await scene.arrive(kind=OwnArrival)
        assert scene.base.unique().tolist() == [2.0]
        assert now() < 8.0 + ANSWER_S + 2 * AGAIN_S

    played(story)


def test_where_all_in_pairs_only_say_so_it_ends_in_time() -> None:
    async def story(scene: Scene) -> None:
        stand_apart(scene, crowd(5), [never] * 5)
        with pytest.raises(OperatorError, match="E502"):
            await scene.arrive(kind=OwnArrival)
        assert PATIENCE_S < now() < PATIENCE_S + 5 * making_s(0)

    played(story)


def test_a_download_in_pairs_that_breaks_off_goes_on_to_the_next_island() -> None:
    async def story(scene: Scene) -> None:
        islands = crowd(2)
        stand_apart(scene, islands, [after(0.0)] * 2)

        async def refuses(peer: PeerId, header: bytes) -> Any:
            raise ConnectionError

        scene.transports[islands[0].peer_id].on_pull("chunk", refuses)
        await scene.arrive(kind=OwnArrival)
        assert scene.base.unique().tolist() == [0.0]

    played(story)


@pytest.mark.parametrize("silent", [1, 2])
def test_a_source_in_office_that_says_nothing_keeps_nobody_from_another(silent: int) -> None:
    async def story(scene: Scene) -> None:
        chain = swarm()
        for who in (CREATOR, *OTHERS[:2]):
            scene.stand(who, chain, 5.0)
        asked = sorted(one for one in scene.transports)[:silent]  # in this order
        silence(scene, asked)
        await scene.arrive()
        assert scene.base.unique().tolist() == [5.0]
        assert now() < silent * QUIET_S + 2.0 < OFFER_TIMEOUT_S

    played(story)


def test_strangers_that_say_nothing_keep_nobody_from_another() -> None:
    async def story(scene: Scene) -> None:
        chain = swarm()
        for who in STRANGERS:
            scene.stand(who, chain, 5.0)
        silence(scene, list(scene.transports)[1:])
        await scene.arrive()
        assert scene.base.unique().tolist() == [5.0]
        assert now() < len(STRANGERS) * QUIET_S + 2.0

    played(story)


@KINDS
def test_who_falls_silent_while_it_makes_its_copy_is_waited_for_no_longer(
    kind: type[Arrival], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootstrap.state.offers.OUTER_STEP_S", 1000.0)

    async def story(scene: Scene) -> None:
        chain = swarm()
        first, second = sorted([CREATOR, OTHERS[0]], key=lambda one: one.peer_id)
        scene.stand(second, chain, 5.0)
        scene.stand(first, chain, 5.0, copying=never)
        async with asyncio.TaskGroup() as group:
            arriving = group.create_task(scene.arrive(kind=kind))
            await asyncio.sleep(ANSWER_S + AGAIN_S / 2)
            silence(scene, [first.peer_id])
            await arriving
        assert now() < ANSWER_S + AGAIN_S + QUIET_S + 2.0

    played(story)


# --- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize("trusted", [True, False])
def test_how_long_one_source_alone_is_asked(trusted: bool) -> None:
    size = int(100 * COPY_RATE)
    hope = Hope(size, trusted, 1000.0)
    assert hope.until == 1000.0 + QUIET_S
    assert hope.end == 1000.0 + OUTER_STEP_S + 100.0
    usual = turn_s(size)
    for second in range(3, 200, 4):
        hope.makes(1000.0 + second)
        last = hope.end if trusted else 1000.0 + usual
        assert hope.until == min(last, 1000.0 + second + AGAIN_S + QUIET_S)
    hope.offers(1500.0)
    assert hope.until == 1500.0 + QUIET_S
