"""Who makes way where there are as many connections as there may be of all."""

from __future__ import annotations

import asyncio

from http_kit import A, B, C, raw, two, wait_for

from protocols.limits import Limits


async def test_connections_that_say_nothing_make_way() -> None:
    async with two(Limits(grace=0.1, total=2)) as (a, b), raw(a, None) as (reader, _), raw(a, None):
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
        assert await asyncio.wait_for(reader.read(), 5) == b""  # the oldest
        async with raw(a, None), raw(a, None):
            await wait_for(lambda: a.stats.capped_connections == 3)
            assert a.stats.connections == 1
            assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
            assert a.stats.connections == 1  # it is still the same


async def test_who_is_not_admitted_makes_way_and_who_is_does_not() -> None:
    admitted = {B.peer_id}
    async with two(Limits(grace=0.1, total=2)) as (a, b):
        a.admit(lambda peer, name: peer in admitted)
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
        async with raw(a) as (first, _), raw(a) as (second, _):
            assert await asyncio.wait_for(first.read(), 5) == b""
            admitted.add(C.peer_id)  # it has greeted meanwhile
            async with raw(a, None) as (third, _):
                assert await asyncio.wait_for(third.read(), 5) == b""
            assert not second.at_eof()
        assert a.stats.capped_connections == 2
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
        assert a.stats.connections == 3
