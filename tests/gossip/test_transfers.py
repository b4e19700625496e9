"""Pushes that break, and when they are given up."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from gossip_kit import RUN

from gossip.exchange.slicing import SliceFeed
from gossip.exchange.transfers import LAST_PAUSE_S, Transfers
from gossip.wiring import Wiring
from protocols.codecs import RangeCodec
from protocols.errors import Unreachable, Why
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.messages import TransferHeader

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
