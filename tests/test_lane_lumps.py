"""What trickles in over a link is taken in lumps, and never waited for in vain."""

from __future__ import annotations

import asyncio
import os

import pytest
from http_kit import B, C
from lane_kit import STRICT, lane, push, reply

from protocols.bodies import BufferDrain
from protocols.http import HttpTransport
from protocols.identity import PeerId
from protocols.lane import Lane
from protocols.lane_socket import lump
from protocols.transport import Incoming

PACKET = 1400


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lanes as over a link; how much of its body each turn of a receiver left to come."""
    seen: list[int] = []
    receive = Lane._receive_some

    def counted(self: Lane) -> None:
        receive(self)
        seen.append(0 if self._receiving is None else self._receiving.left)

    monkeypatch.setattr(Lane, "_receive_some", counted)
    monkeypatch.setattr("protocols.lane.same_machine", lambda sock: False)
    return seen


def test_nobody_waits_for_more_than_will_come() -> None:
    # TLS may have taken in a record of 16 KB and some, which is not in the socket any more
    assert [lump(left) for left in (0, 1, 17_407, 17_408, 17_409)] == [1] * 5
    assert lump(10**9) == 65_536
    for left in range(17_410, 200_000, 997):
        assert left / 8 - 17_408 < lump(left) <= left - 17_408


async def trickle(body: bytes, piece: int, pause: float, got: bytearray) -> bytes:
    """Push ``body`` to a node in pieces, as a link brings them; its answer."""
    async with HttpTransport(B, listen="127.0.0.1:0", limits=STRICT) as node:

        async def take(peer: PeerId, header: bytes, incoming: Incoming) -> bytes:
            await incoming.into(BufferDrain(got))
            return b"all"

        node.on_push("body", take, max_length=len(body))
        async with lane(node, C) as (reader, writer):
            writer.write(push("body", len(body)))
            for at in range(0, len(body), piece):
                writer.write(body[at : at + piece])
                await asyncio.sleep(pause)
            return (await reply(reader)).detail


async def test_many_packets_are_one_turn(turns: list[int]) -> None:
    body, got = os.urandom(400 * PACKET), bytearray(400 * PACKET)
    assert await trickle(body, PACKET, 0.001, got) == b"all"
    assert got == body
    assert len(turns) < 400 / 4


async def test_who_brings_less_than_a_lump_in_all_the_patience_is_no_less_alive(
    turns: list[int],
) -> None:
    body, got = os.urandom(120_000), bytearray(120_000)
    # 2.4 s in all, of which half a second in which nothing is read would be too much
    assert await trickle(body, 5_000, 0.1, got) == b"all"
    assert got == body
