"""Who reads copies of a state slowly, or wants newer ones all the time: nobody waits for that."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from state_kit import ROUND, RUN, Bench, Identities, N, ask, chunk_of, free, newest, pinned, run

from bootstrap.state import (
    StateServer,
    state_digest,
)
from bootstrap.state.copies import COPY_COSTS, SLOWEST, START_S, Copy
from bootstrap.state.offers import MAKING
from bootstrap.state.server import MAX_PINS
from protocols.errors import RemoteRefused
from protocols.identity import Identity
from protocols.memory import virtual_time
from protocols.memory.transport import MemoryTransport
from protocols.messages import StateOffer, StateRequest
from protocols.transport import CHUNK_BYTES


def test_who_reads_a_chunk_slowly_keeps_nothing_of_the_vectors() -> None:
    arrays = [np.full(40_000, index, np.float32) for index in range(2)]  # both in the third chunk
    data, kept = b"".join(map(bytes, arrays)), [weakref.ref(array) for array in arrays]
    copy = Copy.of([torch.from_numpy(array) for array in arrays])
    size, read, slow = copy.chunk, copy.feed(2), copy.feed(2)
    assert read.length == size
    assert bytes(read.next() or b"") == data[2 * size : 3 * size]
    assert read.next() == b""
    del arrays, copy
    gc.collect()
    assert [array() for array in kept] == [None, None]
    with pytest.raises(RemoteRefused, match="gone"):
        slow.next()


def test_what_is_not_read_yet_of_a_chunk_takes_no_memory() -> None:
    copy = Copy.of([torch.zeros(2_000_000)])
    data, feed = bytearray(), copy.feed(0)
    while piece := feed.next():
        assert len(piece) <= CHUNK_BYTES
        data += piece
    assert data == bytes(copy.chunk)


def test_reads_keep_newer_copies_out_for_no_longer_than_a_slow_newcomer_needs(
    identities: Identities,
) -> None:
    async def scenario(bench: Bench) -> None:
        server, others = (
            bench.servers[0],
            [bench.network.join(i.peer_id) for i in identities(9)[7:]],
        )
        clock, end = asyncio.get_running_loop().time, START_S + 8 * N / SLOWEST
        await ask(bench)
        bench.round += 1
        await ask(bench, round_=ROUND + 1, by=others[0])
        bench.round += 1
        while clock() < end - 10.0:
            with pytest.raises(RemoteRefused, match="busy"):
                await ask(bench, round_=ROUND + 2, by=others[1])
            for round_ in (ROUND, ROUND + 1):
                await chunk_of(bench, 0, round_)
            await asyncio.sleep(9.0)
        await asyncio.sleep(end + 1.0 - clock())
        for round_ in (ROUND, ROUND + 1):
            await chunk_of(bench, 0, round_)
        await ask(bench, round_=ROUND + 2, by=others[1])
        assert pinned(server) == [ROUND + 1, ROUND + 2]

    run(identities, [1e9], scenario)


def test_who_takes_a_newer_state_as_well_gets_the_newest(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        bench.round += 3
        bench.base += 1
        offer = await newest(bench, bench.me)
        assert offer.round == ROUND + 3
        assert offer.digest == state_digest([bench.base, bench.momentum])[0]
        assert pinned(bench.servers[0]) == [ROUND + 3]
        bench.round += 1
        assert (await newest(bench, bench.me)).round == ROUND + 4
        with pytest.raises(RemoteRefused, match="gone"):  # of a later round there is none yet
            await newest(bench, bench.me, ROUND + 5)

    run(identities, [1e9], scenario)


def test_who_wants_newer_copies_over_and_over_has_one_and_takes_nobody_elses(
    identities: Identities,
) -> None:
    async def scenario(bench: Bench) -> None:
        server, other = bench.servers[0], bench.network.join(identities(9)[8].peer_id)
        await newest(bench, other)
        for _ in range(20):
            bench.round += 1
            assert (await newest(bench, bench.me)).round == bench.round
            assert pinned(server) == [ROUND, bench.round]
        both = bench.round
        assert (await newest(bench, other)).round == both
        bench.round += 1
        await newest(bench, bench.me)
        assert pinned(server) == [both, both + 1]  # the other one reads the older one

    run(identities, [1e9], scenario)


def test_where_there_is_no_room_the_newest_copy_there_is_must_do(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        others = [bench.network.join(identity.peer_id) for identity in identities(9)[6:]]
        for transport in others[:2]:
            await newest(bench, transport)
            bench.round += 1
        assert (await newest(bench, bench.me)).round == ROUND + 1
        with pytest.raises(RemoteRefused, match="busy"):
            await newest(bench, bench.me, ROUND + 2)

    run(identities, [1e9], scenario)


def test_who_wants_newer_copies_cannot_have_more_made_than_in_a_share_of_the_time(
    identities: Identities,
) -> None:
    async def main() -> None:
        bench, copies = Bench(identities(1), []), 0

        async def offload(work: Callable[[], Any]) -> Any:
            nonlocal copies
            copies += 1
            await asyncio.sleep(1.0)
            return work()

        transport = bench.network.join(Identity.from_seed(b"s" * 32).peer_id)
        StateServer(transport, RUN, bench.current, still=free, offload=offload)
        bench.peers = [transport.peer_id]
        while asyncio.get_running_loop().time() < 100.0:
            bench.round += 1
            with contextlib.suppress(RemoteRefused):
                await newest(bench, bench.me, bench.round)
            await asyncio.sleep(0.1)
        # each takes a second, and there is room for two
        assert 5 < copies <= 2 * (100.0 / COPY_COSTS + 1)

    virtual_time.run(main())


def test_a_copy_that_is_there_is_served_while_another_one_is_made(identities: Identities) -> None:
    async def scenario(bench: Bench) -> None:
        seconds = 0.0

        async def offload(work: Callable[[], Any]) -> Any:
            await asyncio.sleep(seconds)
            return work()

        at, *askers = (bench.network.join(one.peer_id) for one in identities(9)[5:])
        StateServer(at, RUN, bench.current, still=free, offload=offload)

        async def asked(by: MemoryTransport, round_: int) -> StateOffer:
            body = StateRequest(RUN, round_).encode()
            return StateOffer.decode(await by.call(at.peer_id, "state", body, timeout=10.0))

        await asked(askers[0], ROUND)
        bench.round, seconds = ROUND + 1, 60.0
        with pytest.raises(RemoteRefused, match=MAKING):
            await asked(askers[1], ROUND + 1)
        assert (await asked(askers[2], ROUND)).round == ROUND

    run(identities, [], scenario)


def test_one_peer_cannot_have_copies_made_all_the_time(identities: Identities) -> None:
    """A copy that takes 4 s, rounds of 5: outer steps wait for a fifth of the time at most."""

    async def scenario(bench: Bench) -> None:
        making = 0.0

        async def offload(work: Callable[[], Any]) -> Any:
            nonlocal making
            making += 4.0
            await asyncio.sleep(4.0)
            return work()

        at, by = (bench.network.join(one.peer_id) for one in identities(9)[7:])
        StateServer(at, RUN, bench.current, still=free, offload=offload)
        clock = asyncio.get_running_loop().time
        while clock() < 1800.0:
            bench.round = int(clock() / 5.0)
            with contextlib.suppress(RemoteRefused):
                body = StateRequest(RUN, bench.round).encode()
                await by.call(at.peer_id, "state", body, timeout=10.0)
            await asyncio.sleep(1.0)
        assert making <= 1.05 * clock() * MAX_PINS / COPY_COSTS

    run(identities, [], scenario)
