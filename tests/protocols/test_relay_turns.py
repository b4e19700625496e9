"""How those that a relay carries for share its limit."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from http_kit import wait_for

from protocols.bucket import Bucket
from protocols.identity import PeerId
from protocols.memory import virtual_time
from protocols.relay.server import RelayServer, _Circuit
from protocols.relay.turns import Turns
from protocols.relay.wire import RelayEnd
from protocols.stats import TransportStats

RATE = 5e6
GRANT = int(RATE * 0.005)


@asynccontextmanager
async def carried(pairs: Sequence[str]) -> AsyncIterator[list[int]]:
    """What has come of each circuit, one for each of ``pairs``, over all of which much is sent."""
    loop = asyncio.get_running_loop()
    relay = RelayServer(TransportStats())
    relay.offer(RATE)
    come = [0] * len(pairs)
    sockets: list[socket.socket] = []

    async def send(sock: socket.socket) -> None:
        while True:
            await loop.sock_sendall(sock, bytes(1 << 16))

    async def receive(sock: socket.socket, number: int) -> None:
        while piece := await loop.sock_recv(sock, 1 << 16):
            come[number] += len(piece)

    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []
        for number, pair in enumerate(pairs):
            (here, near), (far, there) = socket.socketpair(), socket.socketpair()
            sockets += [here, near, far, there]
            for one in sockets[-4:]:
                one.setblocking(False)
            said = RelayEnd(False, "")
            one, other = PeerId(pair), PeerId(pair + "'")
            circuit = _Circuit(
                (one, other) if number % 2 else (other, one),  # either may have called
                frozenset(), (b"", b""), math.inf, 0.0, [(near, said), (far, said)],
            )  # fmt: skip
            work = (send(here), receive(there, number), relay._carry(circuit))
            tasks += [group.create_task(one) for one in work]
        try:
            async with asyncio.timeout(60):
                yield come
        finally:
            for task in tasks:
                task.cancel()
    for sock in sockets:
        sock.close()


async def test_no_circuit_stands_still_while_others_move() -> None:
    async with carried([f"pair {number}" for number in range(48)]) as come:
        await wait_for(
            lambda: sum(come) >= 48 * GRANT
        )  # those that began first had something saved up
        before = list(come)
        await wait_for(lambda: sum(come) >= sum(before) + 48 * 4 * GRANT)
        moved = [now - then for now, then in zip(come, before, strict=True)]
    assert min(moved) >= 2 * GRANT, moved
    assert max(moved) <= 8 * GRANT, moved


async def test_a_pair_with_many_circuits_gets_no_more_than_one_with_one() -> None:
    async with carried(["a pair", *["another"] * 8]) as come:
        await wait_for(lambda: sum(come) >= 20 * GRANT)
        before = list(come)
        await wait_for(lambda: sum(come) >= sum(before) + 60 * GRANT)
        moved = [now - then for now, then in zip(come, before, strict=True)]
    assert 0.4 < moved[0] / sum(moved) < 0.6, moved
    assert min(moved) > 0


def test_nothing_of_the_limit_is_lost_and_who_leaves_takes_nothing() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        turns = Turns(Bucket(RATE, clock=loop.time))
        had = [0] * 100

        async def take(number: int) -> None:
            while True:
                had[number] += await turns.take(f"pair {number // 2}", 1 << 16)

        tasks = [asyncio.ensure_future(take(number)) for number in range(len(had))]
        await asyncio.sleep(2.0)
        for task in tasks[50:]:
            task.cancel()
        await asyncio.sleep(0)
        then = sum(had[50:])
        await asyncio.sleep(8.0)
        for task in tasks[:50]:
            task.cancel()
        await asyncio.sleep(0)
        assert 0.99 < sum(had) / (10 * RATE) < 1.01
        assert sum(had[50:]) == then
        for some in (had[:50], had[50:]):
            assert max(some) - min(some) <= 2 * GRANT
        assert await asyncio.wait_for(turns.take("another", 10), 1.0) == 10
        assert not turns._line

    virtual_time.run(main())
