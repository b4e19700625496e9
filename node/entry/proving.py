"""Having several claimed places proven at a time, so that a slow peer does not hold up others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile
from typing import TypeVar

from gossip.catchup.claims import NEXT_S, PROOF_S
from protocols.errors import RemoteProtocolError, TransportError

AT_ONCE = 16  # and as many more for each PROOF_S that these take: names cost nothing

T = TypeVar("T")
R = TypeVar("R")
Failure = RemoteProtocolError | TransportError


async def first_proven(
    options: Sequence[T],
    proof: Callable[[T], Awaitable[R | Failure]],
    until: float,
    *,
    alone: bool,
) -> tuple[list[tuple[T, R | Failure]], list[T]]:
    """Results up to the first valid proof, and the options left: not asked, or cut short.

    ``options``: the best first. ``alone``: the first is asked alone, as it is nearly always right,
    and the others once it has failed or taken PROOF_S. A proof waits NEXT_S for better options.
    From ``until`` on, by the event loop's clock, all are left.
    """
    now = asyncio.get_running_loop().time
    found: list[tuple[T, R | Failure]] = []
    left, asked = list(options), dict[asyncio.Task[R | Failure], T]()
    room, more_at = 1 if alone else AT_ONCE, now() + PROOF_S
    async with asyncio.TaskGroup() as group:
        while (left or asked) and now() < until:
            for target in left[:room]:

                async def one(target: T = target) -> R | Failure:
                    return await proof(target)

                asked[group.create_task(one())] = target
            del left[:room]
            wait_s = max(0.0, min(more_at, until) - now())
            done, _ = await asyncio.wait(asked, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            proven = any(not isinstance(task.result(), Failure) for task in done)
            if proven and (better := list(takewhile(lambda task: not task.done(), asked))):
                await asyncio.wait(better, timeout=NEXT_S)
            for task in [task for task in asked if task.done()]:
                found.append((asked.pop(task), task.result()))
            if proven:
                break
            room = max(0, AT_ONCE - len(asked))
            if now() >= more_at:
                room, more_at = AT_ONCE, now() + PROOF_S
        for task in asked:
            task.cancel()
    return found, [*left, *asked.values()]
