"""Turns of what a relay carries, under its one limit: the pairs of peers, and what a pair has."""

from __future__ import annotations

import asyncio

from protocols.bucket import Bucket
from protocols.round_robin import RoundRobin

_SHORTEST_WAIT = 0.001  # seconds; the bucket saves up what these would carry

_Waiting = tuple[asyncio.Future[int], int]  # to be told how much it may; how much it wants


class Turns:
    """Grants of a bucket, in line. All of it is called on one event loop.

    Who only looks from time to time whether there is something to be had gets it by chance: among
    many some get nothing for long, and what comes while nobody looks is lost.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._line = RoundRobin[_Waiting]()
        self._next: asyncio.Handle | None = None  # when the line is served; None: nobody waits

    async def take(self, pair: str, want: int) -> int:
        """How many bytes may be passed on for ``pair``, at most ``want``, once it is its turn."""
        if not self._line and (granted := self._bucket.take(want)):
            return granted
        mine: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._line.add(pair, (mine, want))
        if self._next is None:
            self._serve()
        return await mine

    def _serve(self) -> None:
        """Grant one turn, if there is something to grant; else look again when there is."""
        self._next = None
        loop = asyncio.get_running_loop()
        while self._line:
            if wait := self._bucket.wait():
                self._next = loop.call_later(max(wait, _SHORTEST_WAIT), self._serve)
                return
            mine, want = self._line.next()
            if not mine.done():  # else what it was for has ended
                mine.set_result(self._bucket.take(want))
                self._next = loop.call_soon(self._serve)  # by then it is in line again
                return
