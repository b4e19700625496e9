"""Pushes that break, and when they are given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from gossip_kit import RUN
from http_kit import A, B, address

from gossip.exchange.slicing import SliceFeed
from gossip.exchange.transfers import LAST_PAUSE_S, Transfers
from gossip.wiring import Wiring
from protocols.bodies import BufferDrain, BufferFeed
from protocols.codecs import RangeCodec
from protocols.errors import Unreachable, Why
from protocols.http.transport import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.limits import Limits
from protocols.memory import virtual_time
from protocols.messages import TransferHeader
from protocols.tasks import beside, every
from protocols.transport import Incoming

SIZE = 1000
CODEC = RangeCodec("fp32", dense=SIZE)
HEADER = TransferHeader(RUN, 0, 0, 0, SIZE, "fp32", bytes(32), 0)


class Breaking:
    """A transport each of whose connections breaks at once."""

    def __init__(self) -> None:
        self.tried: list[float] = []  # when

    async def call(self, peer: PeerId, name: str, body: bytes, *, timeout: float) -> bytes:
        self.tried.append(asyncio.get_running_loop().time())
        raise Unreachable(peer, Why.RESET)

    async def push(self, peer: PeerId, name: str, *args: Any, timeout: float) -> bytes:
        return await self.call(peer, name, b"", timeout=timeout)


def test_a_push_is_tried_for_as_long_as_the_plan_has_patience_however_often_it_breaks() -> None:
    async def main() -> None:
        transport, loop = Breaking(), asyncio.get_running_loop()
        wiring = Wiring(
            cast(Any, transport),
            Identity.from_seed(b"i" * 32),
            RUN,
            CODEC,
            loop.create_task,
            virtual_time.inline,
            loop.time,
        )
        source = SimpleNamespace(delta=lambda start, stop, out: out.zero_())
        patience = 600.0  # of a merged part over a slow link; more is allowed
        with pytest.raises(Unreachable):
            await Transfers(wiring).push(
                PeerId("p"),
                "slice",
                HEADER,
                lambda first: SliceFeed(CODEC, source, 0, SIZE, first),
                patience,
            )
        assert patience <= loop.time() < patience + 1.0
        pauses = [after - before for before, after in pairwise(transport.tried)]
        assert max(pauses) == pytest.approx(LAST_PAUSE_S)

    virtual_time.run(main())


async def test_lanes_that_share_a_limit_may_each_be_as_slow_as_it_makes_them() -> None:
    """Several of them get less than a lone body has to move at, and none of them is cut."""
    least, number = 40_000.0, 8  # bytes a second, at once
    limits = Limits(grace=0.1, stall=1.0, min_rate=least)
    codec = RangeCodec("fp32", dense=5 * SIZE)
    size = codec.encoded_size(0, 5 * SIZE)
    limit = size * number / 4  # bytes a second, so that all together take four seconds
    assert limit / number < least / 4
    async with (
        HttpTransport(A, listen="127.0.0.1:0", limits=limits) as a,
        HttpTransport(B, limits=limits, max_upload=limit) as b,
        asyncio.TaskGroup() as group,
    ):
        b.book.add(a.peer_id, address(a))

        def at(transport: HttpTransport, identity: Identity) -> Transfers:
            clock = time.monotonic
            return Transfers(
                Wiring(
                    transport, identity, RUN, codec, group.create_task, virtual_time.inline, clock
                )
            )

        there, here = at(a, A), at(b, B)

        async def take(peer: PeerId, header: bytes, incoming: Incoming) -> bytes:
            drain = BufferDrain(bytearray(size))
            await there.receive(peer, TransferHeader.decode(header), incoming, drain)
            return b""

        a.on_push("slice", take, max_length=size)
        source = SimpleNamespace(delta=lambda start, stop, out: out.zero_())

        async def push(index: int) -> None:
            header = TransferHeader(RUN, index, 0, 0, 5 * SIZE, "fp32", bytes([index]) * 32, 0)
            await here.push(
                A.peer_id,
                "slice",
                header,
                lambda first: SliceFeed(codec, source, 0, 5 * SIZE, first),
                20.0,
            )

        await asyncio.wait_for(every(push(index) for index in range(number)), 60)
        assert there.bytes_received == number * size
        assert a.stats.stalled_bodies == 0


class Narrow:
    """Memory that takes so much at a time, as a link does."""

    def __init__(self, length: int, at_once: int) -> None:
        self.left = self.length = length
        self._at_once = self._may = at_once
        self._scratch = memoryview(bytearray(at_once))
        self._wake: Callable[[], None] = lambda: None

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def room(self) -> memoryview | None:
        return self._scratch[: self._may] if self._may else None

    def took(self, count: int) -> None:
        self.left -= count
        self._may -= count

    async def open(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self._may = self._at_once
            self._wake()


@pytest.mark.parametrize("slow", [True, False])
async def test_a_part_is_given_as_slowly_as_whoever_pulls_it_takes_it(slow: bool) -> None:
    """Both run for five seconds, in which a body that has to be quick is cut."""
    length, many = 64_000_000, 30_000  # a tenth of a second; the system's buffers hold megabytes
    limits = Limits(grace=0.1, stall=1.0, min_rate=1e9)
    async with (
        HttpTransport(A, listen="127.0.0.1:0", limits=limits) as a,
        HttpTransport(B, limits=limits) as b,
    ):
        b.book.add(a.peer_id, address(a))

        async def give(peer: PeerId, header: bytes) -> BufferFeed:
            return BufferFeed(bytes(length))

        a.on_pull("part", give, slow=slow)
        drain = Narrow(length, many)
        with pytest.raises(TimeoutError):
            async with (
                asyncio.timeout(5.0),
                beside(drain.open(0.1)),
                b.pull(A.peer_id, "part", b"", max_length=length, timeout=10.0) as incoming,
            ):
                await incoming.into(drain, slow=True)
        assert 10 * many <= drain.length - drain.left < length / 10
        assert a.stats.stalled_bodies == (0 if slow else 1)
