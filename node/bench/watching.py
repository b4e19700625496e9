"""When a round's stages are passed at one member, seen from beside the engine.

:class:`WatchedTransport` sees bodies leave, :class:`WatchedChain` sees plans come, parts held and
votes cast. Both note the moment in a :class:`Watch`, and call back at each stage
(tests of faults end the process there).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum

from gossip.chain.chain import Chain
from gossip.rounds.instructions import FollowPlan, Instruction, Send
from gossip.rounds.round import Round
from protocols.http.transport import HttpTransport
from protocols.identity import PeerId
from protocols.messages import PartResult, Vote
from protocols.transport import Buffer, Feed, Outgoing


class Stage(StrEnum):
    """What a member has come to in a round, in this order."""

    READY = "ready"  # it says so
    PLANNED = "planned"  # it works by a plan
    SENDING = "sending"  # the first byte of its first slice leaves
    HALF_SENT = "half sent"  # one slice has left by half
    MERGED = "merged"  # its own part is merged; if it owns none, it holds another's
    CERTIFYING = "certifying"  # it holds all parts and casts its vote
    COMMITTED = "committed"  # it has the certificate
    APPLIED = "applied"  # the merged vector lies in its memory


@dataclass
class Watch:
    """The moments of the round under way, by ``time.monotonic``: the first of each kind counts.

    ``told`` is called once a stage, before what the stage is named for happens, and may be called
    on any thread.
    """

    told: Callable[[Stage, int], None] = lambda stage, round_: None
    round: int = -1
    moments: dict[Stage, float] = field(default_factory=dict)

    def begin(self, round_: int) -> None:
        """A new round: its moments are all to come."""
        self.round, self.moments = round_, {}

    def pass_(self, stage: Stage) -> None:
        """The round under way has come to ``stage``."""
        if stage not in self.moments:
            self.moments[stage] = time.monotonic()
            self.told(stage, self.round)


class WatchedTransport(HttpTransport):
    """The real transport, with an eye on the bodies of slices."""

    watch: Watch

    async def push(
        self, peer: PeerId, name: str, header: bytes, body: Outgoing | Feed, *, timeout: float
    ) -> bytes:
        """The push; bodies of slices are watched as they leave."""
        if name == "slice":
            if isinstance(body, Outgoing):
                body = Outgoing(body.length, _watched(body, self.watch))
            else:
                body = _WatchedFeed(body, self.watch)
        return await super().push(peer, name, header, body, timeout=timeout)


async def _watched(body: Outgoing, watch: Watch) -> AsyncIterator[Buffer]:
    sent = 0
    async for chunk in body.chunks:
        sent += len(chunk)
        _note(watch, sent, body.length)
        yield chunk


class _WatchedFeed:
    """A feed that tells when it hands out its first bytes, and those that reach its middle."""

    def __init__(self, feed: Feed, watch: Watch) -> None:
        self._feed, self._watch = feed, watch
        self._sent = 0

    @property
    def length(self) -> int:
        return self._feed.length

    def attach(self, wake: Callable[[], None]) -> None:
        self._feed.attach(wake)

    def next(self) -> Buffer | None:
        chunk = self._feed.next()
        if chunk is not None:
            self._sent += len(chunk)
            _note(self._watch, self._sent, self.length)
        return chunk


def _note(watch: Watch, sending: int, length: int) -> None:
    watch.pass_(Stage.SENDING)
    if 2 * sending >= length:
        watch.pass_(Stage.HALF_SENT)


@dataclass
class WatchedChain(Chain):
    """The real driver, with an eye on what it is told to do."""

    watch: Watch = field(default_factory=Watch)

    def carry_out(self, of: Round, instructions: list[Instruction]) -> None:
        """Do what a round instructs."""
        for instruction in instructions:
            if isinstance(instruction, FollowPlan) and of is self.round:
                self.watch.pass_(Stage.PLANNED)
            elif isinstance(instruction, Send) and isinstance(instruction.message, Vote):
                self.watch.pass_(Stage.CERTIFYING)
        super().carry_out(of, instructions)

    def held(self, result: PartResult) -> None:
        """A merged part is here."""
        plan = self.exchange.plan
        if result.owner == self.me or not (plan and any(p.owner == self.me for p in plan.parts)):
            self.watch.pass_(Stage.MERGED)
        super().held(result)
