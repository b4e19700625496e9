"""Asking peers who stands where, before this node has a state or is known to anybody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gossip.membership.opening import open_announce
from gossip.membership.standing import fragments, progress
from protocols.asking import ask
from protocols.errors import OperatorError, ProtocolError, RemoteRefused, TransportError
from protocols.identity import PeerId
from protocols.messages import Announce, Known, KnownRequest
from protocols.tasks import in_turn
from protocols.transport import Transport

CALL_TIMEOUT_S = 5.0
APART_S = 1.0  # one that says nothing keeps us from the next for so long
PATIENCE_S = 120.0  # of tries, since the swarm moves on while we ask
MAX_NAMED = 64  # peers: names cost nothing, and each is asked in its turn


@dataclass(kw_only=True)
class Looking:
    """What this node finds out about the swarm by asking around."""

    transport: Transport
    run: bytes
    ask: Callable[[], Sequence[PeerId]]  # peers to ask, as of now, who stands where
    wall: Callable[[], float]
    learned: Callable[[Announce], None]  # told of every announcement on the way
    greet: Callable[[PeerId], Awaitable[object]]  # strangers are given nothing
    fragments: int = 1  # of the run
    wanted: Callable[[Announce], bool] = lambda announce: True  # whether its state is worth having
    answered: bool = field(default=False, init=False)  # somebody did, in the last look
    _greeted: set[PeerId] = field(default_factory=set)
    _named: dict[PeerId, None] = field(default_factory=dict)  # peers named in the answers of others

    async def look(self, within: float = PATIENCE_S) -> list[Announce]:
        """Who stands where, freshly asked: the swarm may move on every second.

        Peers that others have named are asked last, in case those to ask are gone. After
        ``within`` seconds nobody more is asked.
        """
        found: dict[PeerId, Announce] = {}
        self.answered = False

        async def one(peer: PeerId) -> None:
            try:
                reply = await ask(
                    self.transport, peer, "known", KnownRequest(), Known, timeout=CALL_TIMEOUT_S
                )
            except RemoteRefused:  # a stranger to it, as where it has started anew
                self.answered = True
                self._greeted.discard(peer)
                await self._introduce([peer])
            except (TransportError, ProtocolError):
                return
            else:
                self.answered = True
                self._hear(reply, found)

        await in_turn(
            dict.fromkeys([*self.ask(), *self._named]),
            one,
            apart=APART_S,
            within=within,
            enough=lambda: len(found) > 1 and any(map(self.wanted, found.values())),
        )
        return list(found.values())

    def _hear(self, reply: Known, found: dict[PeerId, Announce]) -> None:
        """Take in what a peer says of others: the furthest of each, and whom to ask later."""
        for envelope in reply.announces:
            with contextlib.suppress(ProtocolError):  # too old: others remain
                announce = open_announce(envelope, self.run, self.wall()).message
                if fragments(announce) != self.fragments:
                    continue
                known = found.get(announce.peer)
                if known is None or progress(announce) >= progress(known):
                    found[announce.peer] = announce
                    if len(self._named) < MAX_NAMED:
                        self._named[announce.peer] = None
                    self.learned(announce)

    async def _introduce(self, peers: Iterable[PeerId]) -> None:
        """Greet peers that do not know us yet; one that does not answer gives no state either."""

        async def one(peer: PeerId) -> None:
            with contextlib.suppress(TransportError, OperatorError):
                await self.greet(peer)
                self._greeted.add(peer)

        async with asyncio.TaskGroup() as group:
            for peer in peers:
                if peer not in self._greeted:
                    group.create_task(one(peer))
