"""Passing bytes on between two connections."""

from __future__ import annotations

import asyncio
import socket
import time
from functools import partial

from protocols.bucket import Bucket
from protocols.relay.splice import splice
from protocols.relay.turns import Turns


async def test_a_byte_that_comes_as_the_time_is_up_ends_nothing_badly() -> None:
    """The loop was busy: the deadline has passed, and so has the byte arrived."""
    loop = asyncio.get_running_loop()
    for _ in range(20):
        one, near = socket.socketpair()
        far, other = socket.socketpair()
        for end in (one, near, far, other):
            end.setblocking(False)
        idle = 0.01

        def busy(sender: socket.socket = one) -> None:
            sender.send(b"x")
            time.sleep(0.02)

        loop.call_later(0.002, busy)
        async with asyncio.timeout(5):
            take = partial(Turns(Bucket(None)).take, "pair")
            await splice(near, far, take, idle=idle, moved=lambda count: None)
        for end in (one, near, far, other):
            end.close()
