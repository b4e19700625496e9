"""The letters that an island writes: one for each exchange, kept while answers to it may come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gossip.membership.members import Membership
from gossip.pairs.letter_times import Choice, LetterTimes
from gossip.pairs.meeting import Key, Post
from gossip.pairs.replica import PairReplica
from gossip.pairs.wandering import Wandering
from gossip.plans.ladder import Budget
from protocols.codecs import Encoded
from protocols.messages import Announce


class Own(NamedTuple):
    """This island's letter of one exchange."""

    key: Key
    body: Encoded
    weight: float
    choice: Choice
    budget: Budget


@dataclass
class OwnLetters:
    """Those of one fragment."""

    replica: PairReplica
    membership: Membership
    core: Wandering
    times: LetterTimes
    _newest: Own | None = None  # of the exchange under way
    _bodies: dict[Key, Encoded] = field(default_factory=dict)  # that answers may come to

    async def to(self, posts: Sequence[Post], me: Announce, exchanges: int) -> Own:
        """The one for all of these; written unless it is there. ``exchanges``: of a round."""
        key = posts[0].round, posts[0].exchange
        if self._newest is None or self._newest.key != key:  # the last brought nothing to mix in
            said = [self.membership.announcement(post.to) for post in posts]
            budget = self.times.budget(self.core.patience.cycle_s, me, exchanges)
            choice = self.times.choose(budget, me, [one for one in said if one is not None])
            encoded = await self.replica.encode(len(posts), choice.codec)
            self._newest = Own(key, *encoded, choice, budget)
            self._bodies[key] = self._newest.body
        return self._newest

    def body(self, key: Key) -> Encoded | None:
        """What this island sent in an exchange."""
        return self._bodies.get(key)

    def timed(self, own: Own, posts: Sequence[Post], took: float, now: float) -> None:
        """What it took to send a letter says what the next may take."""
        to = [post.to for post in posts]
        alive = {one.peer for one in self.membership.members_alive(now)}
        nobody_else = alive <= {self.core.me, *to}
        self.times.note(own.choice, took, to, own.budget, nobody_else=nobody_else)

    def ended(self) -> None:
        """An exchange is over: the next has a letter of its own."""
        self._newest, needed = None, self.core.needed
        self._bodies = {key: body for key, body in self._bodies.items() if key in needed}
