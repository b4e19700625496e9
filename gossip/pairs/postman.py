"""Delivering letters where islands meet in pairs, so that no share is lost or counted twice.

For :mod:`gossip.pairs.roamer`. If letters are answered, one that did not arrive changes nothing.
But a share of push-sum is gone from here once it is sent, so it matters whether it came: it is in
doubt (:mod:`gossip.pairs.account`) until its receiver says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
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
from protocols.identity import PeerId

STALL_S = 5.0  # without progress, before round trips were measured
LAST_PAUSE_S = 8.0  # between two tries of a share that may have come
# refusals of a letter of which an earlier try may have come, or may yet come
UNSURE = ("again", "busy", "late", "stalled", "unreachable")


class Sent(NamedTuple):
    """What has become of a letter to one or more."""

    arrived: bool  # everywhere
    overdue: bool  # it kept moving, but had not arrived after the longest time allowed


@dataclass
class Share:
    """A letter of push-sum on its way to one receiver."""

    to: PeerId
    name: bytes
    weight: float
    letter: tuple[Post, Encoded] | None = None  # None: it is not here any more
    handed: bool = True  # all of it may have left: else it has not come
    withdrawn: bool = False  # its receiver may know that it is not to come any more

    def hand(self) -> None:
        """The last of it leaves."""
        self.handed = True


@dataclass
class Postman:
    """Sends what ``core`` instructs, and tells it how that went."""

    wiring: Wiring
    presence: Presence
    membership: Membership  # seen from this fragment
    core: Wandering
    letters: Letters
    # a share that did not arrive; without a body its weight counts with what is here
    take_back: Callable[[Encoded | None, float], Awaitable[None]]
    carry: Callable[[list[Instruction]], None]  # what follows from how it went
    notice: Callable[[str], None] = lambda text: None
    _told: bool = False  # why none can be given

    def resume(self) -> None:
        """Ask what has become of the shares that were in doubt when this island stopped."""
        if (account := self.letters.account) is not None:
            for to, given in account.balance.given.items():
                self._doubt(Share(to, given.name, given.weight))

    async def send_all(self, posts: Sequence[Post], body: Encoded, weight: float) -> Sent:
        """Send one letter to all of them at once."""
        account = self.letters.account
        if account is None:
            names = {post.to: self.letters.name() for post in posts}
        else:
            to = [post.to for post in posts]
            try:
                balance = await account.change(lambda b: b.give(to, weight))
            except OSError as error:  # they have not left
                return await self._stay(posts, body, weight, error)
            self._told = False
            names = {peer: balance.given[peer].name for peer in to}
        async with asyncio.TaskGroup() as group:
            sent = [
                group.create_task(self._send(post, body, weight, names[post.to])) for post in posts
            ]
        errors = [one.result() for one in sent]
        # a peer that is silent or refuses is an error of the transport, and no sign of a slow link
        overdue = any(isinstance(error, TimeoutError) for error in errors)
        return Sent(not any(errors), overdue)

    async def _stay(
        self, posts: Sequence[Post], body: Encoded, weight: float, error: OSError
    ) -> Sent:
        if not self._told:
            self._told = True
            self.notice(f"gives no shares of its weight: it cannot keep its account ({error})")
        for post in posts:
            await self.take_back(body, weight)
            self.carry(self.core.on_failed(post.to, self.wiring.now()))
        return Sent(arrived=False, overdue=False)

    async def _send(
        self, post: Post, body: Encoded, weight: float, name: bytes
    ) -> Exception | None:
        """Why a letter may not have arrived; the exchange goes on, if it waited for that."""
        share = Share(post.to, name, weight, (post, body), handed=False)
        error = await self._push(share, post, body)
        arrived = error is None
        if isinstance(error, Unreachable):
            self.presence.unreachable(post.to)
        if self.letters.account is not None:
            came = True if arrived else await self._withdrawn(share) if _final(error) else None
            if came is None or not await self._settled(share, came):
                self._doubt(share)
            elif not came:
                await self.take_back(body, weight)
        if post.awaited:
            tell = self.core.on_posted if arrived else self.core.on_failed
            self.carry(tell(post.to, self.wiring.now()))
        return error

    async def _push(
        self, share: Share, post: Post, body: Encoded, *, again: bool = False
    ) -> Exception | None:
        """Send a letter; returns why it may not have arrived."""
        stall = self.membership.stillness_s([post.to], STALL_S)
        try:
            async with asyncio.timeout(self.core.patience.longest_s):
                await self.letters.send(
                    post,
                    body,
                    timeout=stall,
                    weight=share.weight,
                    name=share.name,
                    again=again,
                    handed=share.hand,
                )
        except (TransportError, RemoteProtocolError, TimeoutError) as error:
            return error
        self.presence.contact(post.to)
        return None

    def _doubt(self, share: Share) -> None:
        self.core.owed.add(share.to)
        self.wiring.spawn(self._settle(share))

    async def _settle(self, share: Share) -> None:
        """Send a share again until it is known whether it arrived, or ask its receiver.

        One that arrived and was taken back would count twice; one that was lost and given up,
        never. So nobody but the receiver says whether it came, however long that takes.
        """
        pause, came = self.membership.patience.heartbeat_s, None
        while came is None or not await self._settled(share, came):
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_S)
            if came is None:
                came = await self._has_come(share)
        self.core.owed.discard(share.to)
        if not came and share.letter is not None:
            post, body = share.letter
            self.letters.keep(post.round, body, share.weight)
        elif not came:
            await self.take_back(None, share.weight)
        self.carry([])

    async def _has_come(self, share: Share) -> bool | None:
        """Whether a share has come, for certain; None: nobody can tell yet."""
        known = self.membership.islands.get(share.to)
        if known is not None and share.letter is not None and not share.withdrawn:
            error = await self._push(share, *share.letter, again=True)
            gone = known.expelled or known.announce.status == "leaving"
            if error is None or not (_final(error) or (gone and _silent(error))):
                return True if error is None else None
        if known is None and share.handed:
            share.letter = None  # one that is away for long may be away for good
            return None
        return await self._withdrawn(share)

    async def _withdrawn(self, share: Share) -> bool | None:
        """Have a share not come any more: whether it has, for certain; None: no answer."""
        if not share.handed:
            return False
        share.withdrawn = True
        try:
            answer_s = self.membership.answer_s(share.to, STALL_S)
            return await self.letters.withdraw(share.to, share.name, answer_s)
        except (TransportError, RemoteProtocolError):
            return None

    async def _settled(self, share: Share, came: bool) -> bool:
        """Note what has become of a share; whether that was possible."""
        account = self.letters.account
        assert account is not None
        try:  # that one came may be forgotten: its receiver will say so again
            await account.change(lambda b: b.settle(share.to, came=came), soon=not came)
        except OSError:
            return False
        return True


def _silent(error: Exception | None) -> bool:
    """Whether nothing was heard of the receiver itself."""
    if isinstance(error, RemoteRefused):
        return error.code == "unreachable"
    return isinstance(error, TransportError | TimeoutError)


def _final(error: Exception | None) -> bool:
    """Whether a try that failed like this has not brought the letter there, and no other will.

    An earlier try may have, even so.
    """
    if isinstance(error, Unreachable):
        return error.why is Why.REFUSED
    if isinstance(error, RemoteRefused):
        return error.code not in UNSURE
    return isinstance(error, RemoteProtocolError)
