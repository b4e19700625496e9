"""A state so large that a copy of it takes a source long, and most of its memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from arrival_kit import Scene, played, swarm
from lineage_kit import CREATOR, OTHERS
from state_kit import RUN, Bench, Identities, free, pinned

from bootstrap.state import StateServer
from bootstrap.state.offers import MAKING, making_s
from bootstrap.state.widening import FIRST_SOURCES, QUIET_S, WINDOW_S, WORTH_S, Widening
from node.entry.looking import PATIENCE_S
from node.entry.trying import COPIES
from protocols.errors import OperatorError, RemoteRefused
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import MemoryTransport

SIZE = 10**10


def slow(seconds: float) -> Any:
    async def offload(work: Callable[[], Any]) -> Any:
        await asyncio.sleep(seconds)
        return work()

    return offload


def test_sources_that_take_long_to_make_a_copy_all_deliver(identities: Identities) -> None:
    """The first that has one does not leave the next ones out: it may have a narrow link."""

    async def main() -> None:
        bench = Bench(identities(1), [])
        for identity, seconds in zip(identities(4)[1:], (25.0, 26.0, 27.0), strict=True):
            transport = bench.network.join(identity.peer_id, upload=4e5)
            StateServer(transport, RUN, bench.current, still=free, offload=slow(seconds))
            bench.peers.append(transport.peer_id)
        report = await bench.download()
        bench.check()
        assert all(report.sources[peer].bytes for peer in bench.peers)

    virtual_time.run(main())


@pytest.mark.parametrize("sources", [1, 4])
def test_a_newcomer_waits_for_a_copy_that_is_being_made(
    sources: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than a source may be silent, as that of 25 GB."""
    monkeypatch.setattr("bootstrap.state.offers.OUTER_STEP_S", 130.0)

    async def story(scene: Scene) -> None:
        chain = swarm()
        for who in [CREATOR, *OTHERS][:sources]:
            scene.stand(who, chain, 5.0, copying=slow(100.0))
        await scene.arrive()
        assert scene.base.unique().tolist() == [5.0]
        assert asyncio.get_running_loop().time() < PATIENCE_S
        assert len(scene.waited) == 1  # and each copy is for somebody else to read
        assert scene.copying <= FIRST_SOURCES

    played(story)


def test_who_says_that_it_makes_a_copy_and_makes_none_is_asked_last() -> None:
    async def story(scene: Scene) -> None:
        chain = swarm()
        liars = [who for who in OTHERS if who.peer_id < CREATOR.peer_id][:2]
        assert liars
        for who in liars:
            scene.stand(who, chain, 5.0, copying=slow(1e6))
        scene.stand(CREATOR, chain, 5.0)
        await scene.arrive()
        assert scene.base.unique().tolist() == [5.0]

    played(story)


def test_where_all_say_so_and_make_none_it_ends_in_time() -> None:
    async def story(scene: Scene) -> None:
        chain = swarm()
        for who in (CREATOR, *OTHERS):
            scene.stand(who, chain, 5.0, copying=slow(1e6))
        with pytest.raises(OperatorError, match="E502"):
            await scene.arrive()
        assert asyncio.get_running_loop().time() < PATIENCE_S + (COPIES + 2) * 40

    played(story)


def test_a_crowd_that_only_says_so_keeps_nobody_from_who_has_a_copy() -> None:
    """Out of office names cost nothing, and whoever makes up many may have the first ones."""

    async def story(scene: Scene) -> None:
        chain = swarm()
        *crowd, honest = sorted(
            (Identity.from_seed(bytes([n, 9]) * 16) for n in range(21)),
            key=lambda who: who.peer_id,
        )
        for who in crowd:
            scene.stand(who, chain, 5.0, copying=slow(1e6))
        scene.stand(honest, chain, 5.0)
        await scene.arrive()
        assert scene.base.unique().tolist() == [5.0]
        assert asyncio.get_running_loop().time() < PATIENCE_S

    played(story)


@pytest.mark.parametrize("crowd", [2, 40])
def test_of_a_download_those_who_only_say_so_are_asked_again_after_the_others(
    identities: Identities, crowd: int
) -> None:
    async def main() -> None:
        bench = Bench(identities(2), [1e6])
        honest = bench.peers.pop()
        for number in range(crowd):
            transport = bench.network.join(Identity.from_seed(bytes([100 + number]) * 32).peer_id)

            async def again(peer: PeerId, body: bytes) -> bytes:
                raise RemoteRefused(MAKING, "a copy of the state is being made")

            transport.on_call("state", again)
            bench.peers.append(transport.peer_id)
        bench.peers.append(honest)
        await bench.download(first_sources=FIRST_SOURCES)
        bench.check()
        assert asyncio.get_running_loop().time() < making_s(0)

    virtual_time.run(main())


def test_those_in_office_are_waited_for_and_nobody_else_makes_a_copy_meanwhile(
    identities: Identities,
) -> None:
    async def main() -> None:
        bench, begun = Bench(identities(1), []), list[PeerId]()
        for identity in identities(7)[1:]:
            transport = bench.network.join(identity.peer_id, upload=1e6)

            async def copies(work: Callable[[], Any], me: PeerId = identity.peer_id) -> Any:
                begun.append(me)
                return await slow(20.0)(work)

            StateServer(transport, RUN, bench.current, still=free, offload=copies)
            bench.peers.append(transport.peer_id)
        await bench.download(first_sources=FIRST_SOURCES, in_office=bench.peers[:2])
        bench.check()
        assert begun == bench.peers[:2]

    virtual_time.run(main())


def test_where_the_newcomers_own_link_is_full_no_more_than_three_make_a_copy(
    identities: Identities,
) -> None:
    async def main() -> None:
        bench = Bench(identities(1), [])
        bench.me = narrow(bench, identities)
        servers = []
        for identity in identities(9)[1:]:
            transport = bench.network.join(identity.peer_id, upload=1e6)
            servers.append(
                StateServer(transport, RUN, bench.current, still=free, offload=slow(0.0))
            )
            bench.peers.append(transport.peer_id)
        await bench.download(first_sources=FIRST_SOURCES)
        bench.check()
        assert asyncio.get_running_loop().time() > WORTH_S + WINDOW_S
        assert sum(1 for one in servers if pinned(one)) <= FIRST_SOURCES + 1

    virtual_time.run(main())


def narrow(bench: Bench, identities: Identities) -> MemoryTransport:
    return bench.network.join(identities(12)[11].peer_id, download=1e5)


def test_a_silent_source_has_another_asked_in_its_place(identities: Identities) -> None:
    async def main() -> None:
        bench = Bench(identities(5), [2e5, 2e5, 2e5, 2e5])
        for peer in bench.peers[:2]:
            bench.network.freeze(peer)
        await bench.download(first_sources=FIRST_SOURCES, offer_timeout=1000.0)
        bench.check()

    virtual_time.run(main())


@pytest.mark.parametrize("first", [[2.2e3, 2.2e3], [2.2e3, 2e4]])
def test_first_sources_that_trickle_have_others_asked_beside_them(
    identities: Identities, first: list[float]
) -> None:
    """Their first chunk takes half a minute; so does one of megabytes by a link that is quicker."""

    async def main() -> None:
        bench = Bench(identities(6), [*first, 1e6, 1e6, 1e6])
        done = await bench.download(first_sources=FIRST_SOURCES, stall_timeout=15.0)
        bench.check()
        assert asyncio.get_running_loop().time() < 2 * WINDOW_S + 10.0
        assert len(done.sources) > FIRST_SOURCES

    virtual_time.run(main())


def test_a_source_of_whose_first_chunk_nothing_comes_has_another_asked_beside_it(
    identities: Identities,
) -> None:
    async def main() -> None:
        bench = Bench(identities(4), [1e6, 2e4, 1e6])

        @asynccontextmanager
        async def never(peer: PeerId, name: str, *rest: Any, **more: Any) -> AsyncIterator[Any]:
            if name == "chunk" and peer == bench.peers[0]:
                await asyncio.sleep(1000.0)
            async with pull(peer, name, *rest, **more) as incoming:
                yield incoming

        pull, bench.me.pull = bench.me.pull, never  # type: ignore[method-assign]
        await bench.download(first_sources=FIRST_SOURCES)
        bench.check()
        assert asyncio.get_running_loop().time() < QUIET_S + 10.0

    virtual_time.run(main())


def rates(most: int, link: float, each: float) -> int:
    """How many a download of ten GB asks, of so many bytes a second each by a link of so many."""
    widening, done, now = Widening(most, 0.0), 0, 0.0
    while done < SIZE:
        now += 1.0
        done += int(min(link, each * widening.asked))
        widening.due(now, done, SIZE - done, bringing=widening.asked, quiet=0)
    return widening.asked


def test_sources_are_asked_as_long_as_each_brings_more() -> None:
    assert rates(8, link=250e6, each=25e6) == 8
    assert rates(8, link=100e6, each=25e6) == 5
    assert rates(8, link=25e6, each=25e6) == FIRST_SOURCES + 1
    assert rates(8, link=2.5e9, each=1e9) == FIRST_SOURCES  # it ends before


def test_while_a_copy_is_made_nothing_is_concluded() -> None:
    widening = Widening(8, 0.0)
    for second in range(100):
        assert not widening.due(float(second), 10**6 * second, SIZE, bringing=1, quiet=0)
    assert widening.asked == FIRST_SOURCES
