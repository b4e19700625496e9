"""How long an answer may take, and a refusal for who is still sending."""

from __future__ import annotations

import asyncio

import pytest
from http_kit import A, post, raw, two, wait_for

from protocols.identity import PeerId
from protocols.limits import Limits


@pytest.mark.parametrize("late", [False, True])
async def test_who_does_not_take_his_answer_is_cut(late: bool) -> None:
    """He may take the time that so much needs at the least rate."""
    size = 32 << 20  # more than the system keeps for him
    strict = Limits(grace=0.1, stall=0.3, min_rate=1e9 if late else 1e6)
    async with two(strict) as (a, b):

        async def tell(peer: PeerId, body: bytes) -> bytes:
            return bytes(size)

        a.on_call("tell", tell)
        async with raw(a) as (reader, writer), asyncio.timeout(30):
            writer.write(2 * post("/call/tell"))
            if late:
                await wait_for(lambda: a.stats.stalled_bodies == 1)
                await wait_for(lambda: not a._server._listener.links)
            else:
                await asyncio.sleep(3 * strict.stall)
                for _ in range(2):
                    await reader.readuntil(b"\r\n\r\n")
                    assert len(await reader.readexactly(size)) == size
                assert a.stats.stalled_bodies == 0
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"


async def test_a_refusal_lingers_as_long_as_the_limits_say() -> None:
    async with two(Limits(grace=0.1, linger=0.2)) as (a, _), raw(a) as (reader, writer):
        writer.write(post("/call/none", length=1000))  # which never comes
        assert b" 404 " in await asyncio.wait_for(reader.read(), 1.5)
