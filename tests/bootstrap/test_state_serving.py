"""The side that serves the state: copies that are few, bounded, and in nobody's way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from state_kit import (
    ROUND,
    RUN,
    Bench,
    Identities,
    N,
    ask,
    chunk_of,
    free,
    newest,
    pinned,
    run,
    vectors,
)

from bootstrap.state import (
    StateServer,
    chunk_size,
    state_digest,
)
from bootstrap.state.copies import SLOWEST, START_S
from bootstrap.state.offers import ANSWER_S, MAKING
from bootstrap.state.server import IDLE_S
from protocols.errors import RemoteRefused, TransportError
from protocols.identity import Identity
from protocols.memory import virtual_time
from protocols.memory.virtual_time import inline
from protocols.messages import StateRequest


def test_training_goes_on_while_the_copy_is_served(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        before = bench.base.clone()
        offer = await ask(bench)
        bench.base += 1
        bench.round += 1
        size = offer.chunk
        assert await chunk_of(bench, 1) == before.numpy().tobytes()[size : 2 * size]
        assert (await ask(bench)).digest == offer.digest  # still pinned, though it is past
        with pytest.raises(RemoteRefused, match="gone"):
            await ask(bench, round_=ROUND - 1)

    run(identities, [2e6], scenario)


def test_a_newcomer_has_the_longer_for_all_fragments_the_larger_they_are(
    identities: Identities,
) -> None:
    async def scenario(bench: Bench) -> None:
        assert bench.servers[0].longest_s == START_S + 2 * 8 * N / SLOWEST

    run(identities, [2e6], scenario, fragments=2)


def test_no_outer_step_is_applied_while_the_copy_is_taken(identities: Identities) -> None:
    async def main() -> None:
        bench = Bench(identities(1), [])
        held: list[str] = []

        @asynccontextmanager
        async def still() -> AsyncIterator[None]:
            held.append("still")
            yield
            held.append("free")

        async def offload(work: Callable[[], Any]) -> Any:
            held.append("work")
            return work()

        transport = bench.network.join(Identity.from_seed(b"s" * 32).peer_id)
        StateServer(transport, RUN, bench.current, still=still, offload=offload)
        bench.peers = [transport.peer_id]
        offers = await asyncio.gather(*(ask(bench) for _ in range(5)))
        assert held == ["still", "work", "free"]  # one copy for all five
        assert {offer.digest for offer in offers} == {bench.digest}

    virtual_time.run(main())


def test_copies_are_few_and_given_up_when_idle(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        server = bench.servers[0]
        second, third = (bench.network.join(one.peer_id) for one in identities(9)[7:])
        await ask(bench)
        bench.round += 1
        await ask(bench, round_=ROUND + 1, by=second)
        bench.round += 1
        with pytest.raises(RemoteRefused, match="busy"):
            await ask(bench, round_=ROUND + 2, by=third)
        await asyncio.sleep(12)
        await chunk_of(bench, 0)  # keeps the first one
        await ask(bench, round_=ROUND + 2, by=third)
        assert pinned(server) == [ROUND, ROUND + 2]
        for _ in range(10):
            await asyncio.sleep(IDLE_S / 3)
            await chunk_of(bench, 0)
        assert pinned(server) == [ROUND]
        await asyncio.sleep(IDLE_S + 1)
        assert pinned(server) == []
        with pytest.raises(RemoteRefused, match="gone"):
            await chunk_of(bench, 0)

    run(identities, [1e9], scenario)


def test_a_copy_is_in_use_as_long_as_somebody_reads_a_chunk_of_it(identities: Identities) -> None:
    """However slow the link: a newcomer that comes a round later does not take it away."""

    async def main() -> None:
        bench = Bench(identities(2), [5e4], max_pins=1)
        bench.base, bench.momentum = vectors(count=8 * N)  # in chunks of half a megabyte
        bench.digest, _ = state_digest([bench.base, bench.momentum])
        other = bench.network.join(identities(9)[8].peer_id)
        offer = await ask(bench)
        assert offer.chunk > 5e4 * 10
        reading = asyncio.create_task(chunk_of(bench, 0))
        await asyncio.sleep(10.2)
        bench.round += 1
        with pytest.raises(RemoteRefused, match="busy"):
            await ask(bench, round_=ROUND + 1, by=other)
        assert len(await reading) == offer.chunk
        assert len(await chunk_of(bench, 1)) == offer.chunk
        await asyncio.sleep(12)
        assert (await ask(bench, round_=ROUND + 1, by=other)).round == ROUND + 1

    virtual_time.run(main())


def test_who_asks_for_what_is_not_there_takes_no_copy_away(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        await ask(bench)
        await asyncio.sleep(12)
        other = bench.network.join(identities(9)[8].peer_id)
        with pytest.raises(RemoteRefused, match="gone"):
            await ask(bench, round_=ROUND + 5, by=other)
        assert pinned(bench.servers[0]) == [ROUND]

    run(identities, [1e9], scenario, max_pins=1)


def test_who_left_its_side_of_a_fork_offers_the_other_sides_state(identities: Identities) -> None:
    """Also to those who keep asking: both sides may be at the same round."""

    async def scenario(bench: Bench) -> None:
        before = await ask(bench)
        bench.base, bench.momentum = vectors(5)
        bench.digest, _ = state_digest([bench.base, bench.momentum])
        after = await ask(bench)
        assert (before.round, after.round) == (ROUND, ROUND)
        assert before.digest != after.digest == bench.digest
        await bench.download()
        bench.check()

    run(identities, [1e9], scenario)


def test_who_hangs_up_leaves_the_copy_to_the_next(identities: Identities) -> None:
    """Else a state that takes longer to copy than anybody waits would never be had."""

    async def main() -> None:
        bench, copies = Bench(identities(1), []), 0

        async def offload(work: Callable[[], Any]) -> Any:
            nonlocal copies
            copies += 1
            await asyncio.sleep(18.0)
            return work()

        transport = bench.network.join(Identity.from_seed(b"s" * 32).peer_id)
        server = StateServer(transport, RUN, bench.current, still=free, offload=offload)
        bench.peers = [transport.peer_id]
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask(bench), 2.0)  # of 18 s
        await asyncio.sleep(11.0)
        assert (await ask(bench)).digest == bench.digest
        assert copies == 1
        await asyncio.sleep(IDLE_S + 1)
        with pytest.raises(TransportError):
            await ask(bench)
        await asyncio.sleep(IDLE_S + 20)
        assert pinned(server) == []  # given up, though nobody has ever read it

    virtual_time.run(main())


def test_who_wants_a_copy_that_takes_long_is_told_to_ask_again(identities: Identities) -> None:
    """A silent source cannot be told from a dead one."""

    async def main() -> None:
        bench, copies = Bench(identities(1), []), 0

        async def offload(work: Callable[[], Any]) -> Any:
            nonlocal copies
            copies += 1
            await asyncio.sleep(100.0)
            return work()

        transport = bench.network.join(Identity.from_seed(b"s" * 32).peer_id)
        StateServer(transport, RUN, bench.current, still=free, offload=offload)
        bench.peers = [transport.peer_id]
        clock = asyncio.get_running_loop().time
        for _ in range(5):
            began = clock()
            with pytest.raises(RemoteRefused, match=MAKING):
                await ask(bench)
            assert clock() - began < ANSWER_S + 1
        while clock() < 110:
            with contextlib.suppress(RemoteRefused):
                assert (await ask(bench)).digest == bench.digest
            await asyncio.sleep(1.0)
        assert copies == 1

    virtual_time.run(main())


def test_no_copy_is_made_where_memory_has_no_room_for_it(identities: Identities) -> None:
    async def main() -> None:
        bench, left = Bench(identities(1), []), 9 * N
        transport = bench.network.join(Identity.from_seed(b"s" * 32).peer_id)
        server = StateServer(
            transport, RUN, bench.current, still=free, offload=inline, room=lambda: left
        )
        bench.peers = [transport.peer_id]
        other = bench.network.join(identities(9)[8].peer_id)
        await ask(bench)
        left = 8 * N  # the copy alone, and nothing beside it
        bench.round += 1
        with pytest.raises(RemoteRefused, match="no memory"):
            await ask(bench, round_=ROUND + 1, by=other)
        assert (await newest(bench, other)).round == ROUND  # better than nothing
        await asyncio.sleep(12)
        with pytest.raises(RemoteRefused, match="no memory"):
            await ask(bench, round_=ROUND + 1, by=other)
        assert pinned(server) == []  # nobody read it any more
        left = 9 * N
        assert (await ask(bench, round_=ROUND + 1, by=other)).digest == bench.digest

    virtual_time.run(main())


def test_close_gives_all_up(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        await ask(bench)
        await bench.servers[0].aclose()
        assert pinned(bench.servers[0]) == []

    run(identities, [1e9], scenario)


def test_requests_beyond_the_state_or_of_another_run_are_refused(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        await ask(bench)
        last = len((await ask(bench)).hashes) // 32
        assert len(await chunk_of(bench, last - 1)) == 8 * N % chunk_size(8 * N)
        refused: list[Awaitable[Any]] = [
            chunk_of(bench, last),
            chunk_of(bench, 2**62),
            chunk_of(bench, 0, run_id=bytes(32)),
            bench.me.call(
                bench.peers[0], "state", StateRequest(bytes(32), ROUND).encode(), timeout=5
            ),
        ]
        for request in refused:
            with pytest.raises(RemoteRefused, match="protocol"):
                await request

    run(identities, [1e9], scenario)
