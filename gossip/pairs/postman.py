"""Delivering letters where islands meet in pairs, so that no share is lost or counted twice.

For :mod:`gossip.pairs.roamer`. If letters are answered, one that did not arrive changes nothing.
But a share of push-sum is gone from here once it is sent, so it matters whether it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from gossip.membership.members import Membership
from gossip.membership.presence import Presence
from gossip.pairs.letters import Letters
from gossip.pairs.meeting import Instruction, Post
from gossip.pairs.wandering import Wandering
from gossip.wiring import Wiring
from protocols.codecs import Encoded
from protocols.errors import (
    RemoteProtocolError,
    RemoteRefused,
    TransportError,
    Unreachable,
    Why,
)

STALL_S = 5.0  # without progress, before round trips were measured
LAST_PAUSE_S = 8.0  # between two tries of a share that may have come
# refusals of a letter of which an earlier try may have come, or may yet come
UNSURE = ("again", "busy", "late", "stalled", "unreachable")


class Sent(NamedTuple):
    """What has become of a letter to one or more."""

    arrived: bool  # everywhere
    overdue: bool  # it kept moving, but had not arrived after the longest time allowed


@dataclass
class Postman:
    """Sends what ``core`` instructs, and tells it how that went."""

    wiring: Wiring
    presence: Presence
    membership: Membership  # seen from this fragment
    core: Wandering
    letters: Letters
    take_back: Callable[[Encoded, float], Awaitable[None]]  # a share that did not arrive
    carry: Callable[[list[Instruction]], None]  # what follows from how it went

    async def send_all(self, posts: Sequence[Post], body: Encoded, weight: float) -> Sent:
        """Send one letter to all of them at once."""
        async with asyncio.TaskGroup() as group:
            sent = [group.create_task(self._send(post, body, weight)) for post in posts]
        errors = [one.result() for one in sent]
        # a peer that is silent or refuses is an error of the transport, and no sign of a slow link
        overdue = any(isinstance(error, TimeoutError) for error in errors)
        return Sent(not any(errors), overdue)

    async def _send(self, post: Post, body: Encoded, weight: float) -> Exception | None:
        """Why a letter may not have arrived; the exchange goes on, if it waited for that."""
        name = self.letters.name()
        error = await self._push(post, body, weight, name)
        arrived = error is None
        if isinstance(error, Unreachable):
            self.presence.unreachable(post.to)
        if error is not None and self.core.habits.one_way:
            if _sure(error):
                await self.take_back(body, weight)
            else:
                self.core.owed.add(post.to)
                self.wiring.spawn(self._settle(post, body, weight, name))
        if post.awaited:
            tell = self.core.on_posted if arrived else self.core.on_failed
            self.carry(tell(post.to, self.wiring.now()))
        return error

    async def _push(
        self, post: Post, body: Encoded, weight: float, name: bytes, *, again: bool = False
    ) -> Exception | None:
        """Send a letter; returns why it may not have arrived."""
        stall = self.membership.stillness_s([post.to], STALL_S)
        longest = self.core.patience.longest_s
        try:
            async with asyncio.timeout(None if longest == inf else longest):
                await self.letters.send(
                    post.to,
                    post.round,
                    post.exchange,
                    body,
                    answers=post.answers,
                    timeout=stall,
                    weight=weight,
                    name=name,
                    again=again,
                )
        except (TransportError, RemoteProtocolError, TimeoutError) as error:
            return error
        self.presence.contact(post.to)
        return None

    async def _settle(self, post: Post, body: Encoded, weight: float, name: bytes) -> None:
        """Send a share again until it is known whether it arrived.

        One that arrived and was taken back would count twice; one that was lost and given up,
        never. A share to a peer that is gone, or refuses it, is mixed in here. A leaving peer is
        asked as long as it answers, since it takes along what it has got.
        """
        pause = self.membership.patience.heartbeat_s
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_S)
            known, error = self.membership.islands.get(post.to), None
            gone = known is None or known.expelled
            if known is not None and not gone:
                error = await self._push(post, body, weight, name, again=True)
                gone = known.announce.status == "leaving" and _silent(error)
            if gone or error is None or _sure(error):
                break
        self.core.owed.discard(post.to)
        if gone or error is not None:
            self.letters.keep(post.round, body, weight)
        self.carry([])


def _silent(error: Exception | None) -> bool:
    """Whether nothing was heard of the receiver itself."""
    if isinstance(error, RemoteRefused):
        return error.code == "unreachable"
    return isinstance(error, TransportError | TimeoutError)


def _sure(error: Exception) -> bool:
    """Whether a letter that failed like this has not come and will not: for certain."""
    if isinstance(error, Unreachable):
        return error.why is Why.REFUSED
    if isinstance(error, RemoteRefused):
        return error.code not in UNSURE
    return isinstance(error, RemoteProtocolError)
