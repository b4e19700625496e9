"""Runs that callers bring to a seed that has none, tried side by side until one is to be had.

Anybody may greet an open seed with the id of a run that does not exist, or is never handed over.
So nobody is told of a run before it is here, and no caller's is in the way of another's: each place
that callers come from has one try at a time, and where there are too many the oldest makes way. But
not at once: several honest creators that start together would end each other's tries for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gossip.membership.origin import is_public, origin_of
from node.entry.entrance import Run
from protocols.errors import OperatorError
from protocols.identity import PeerId
from protocols.tasks import Background

MAX_TRIES = 4  # at a time: for each a stranger may send 300 MB
LEAST_S = 5.0  # that a try has before it makes way
TELL_AGAIN_S = 30.0  # between two failures that are told: a stranger can have one with each call


@dataclass(frozen=True, eq=False, slots=True)
class Offer:
    """A run that somebody has brought."""

    place: str
    peer: PeerId
    run: bytes
    since: float  # of the loop's clock


def place_of(peer: PeerId, observed: str) -> str:
    """What has one try at a time, of a caller whose connection comes from ``observed``.

    A private address may be a gateway's, through which everybody comes: there it is each caller.
    Who comes by a relay is seen nowhere, and shares one place with all who do.
    """
    place = origin_of(observed)
    return place if not observed or is_public(observed) else f"{place} {peer}"


class Brought:
    """What was brought to one seed. ``place``: where a caller is seen to come from."""

    def __init__(self, place: Callable[[PeerId], str]) -> None:
        self._place = place
        self._offers: dict[str, Offer] = {}  # by place, the oldest first
        self._news = asyncio.Event()
        self._tell_at = float("-inf")

    def add(self, peer: PeerId, run: bytes) -> None:
        """A caller has brought ``run``. Who finds no room brings it again, a second later or so."""
        place, now = self._place(peer), asyncio.get_running_loop().time()
        if place in self._offers:
            return
        if len(self._offers) >= MAX_TRIES:
            oldest = next(iter(self._offers.values()))
            if now - oldest.since < LEAST_S:
                return
            del self._offers[oldest.place]
        self._offers[place] = Offer(place, peer, run, now)
        self._news.set()

    async def first(
        self,
        take: Callable[[PeerId, bytes], Awaitable[Run]],
        failed: Callable[[OperatorError], None],
    ) -> tuple[PeerId, Run]:
        """The first run that ``take`` gets, and who has brought it; ``failed`` is told of others.

        All that was brought is forgotten then.
        """
        tries: dict[Offer, asyncio.Task[Run]] = {}
        running = Background()

        async def attempt(offer: Offer) -> Run:
            return await take(offer.peer, offer.run)

        try:
            while True:
                self._news.clear()
                self._follow(tries, lambda offer: running.spawn(attempt(offer)))
                await self._news.wait()
                for offer in [one for one, task in tries.items() if task.done()]:
                    task = tries.pop(offer)
                    if self._offers.get(offer.place) is offer:
                        del self._offers[offer.place]
                    try:
                        return offer.peer, task.result()
                    except OperatorError as error:
                        self._tell(failed, error)
        finally:
            await running.aclose()
            self._offers.clear()

    def _follow(
        self,
        tries: dict[Offer, asyncio.Task[Run]],
        begin: Callable[[Offer], asyncio.Task[Run]],
    ) -> None:
        """Begin what is new, and end what has made way."""
        held = list(self._offers.values())
        for offer in [one for one in tries if one not in held]:
            tries.pop(offer).cancel()
        for offer in held:
            if offer not in tries:
                tries[offer] = task = begin(offer)
                task.add_done_callback(lambda _: self._news.set())

    def _tell(self, failed: Callable[[OperatorError], None], error: OperatorError) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._tell_at:
            self._tell_at = now + TELL_AGAIN_S
            failed(error)
