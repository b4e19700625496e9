"""Taking part without being dialled: a relay is found, kept, and replaced when it goes away.

Any node that can be dialled tells those behind a NAT who calls them, and carries between two of
them as much as its ``--relay`` says (:mod:`protocols.relay.server`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence

from bootstrap.seeds import backoff
from node.errors import operator_error
from node.monitor.event_log import EventLog
from node.monitor.events import Notice, Problem
from protocols.addresses import PeerAddress, relay_address
from protocols.errors import OperatorError, RemoteRefused, TransportError
from protocols.http.transport import HttpTransport
from protocols.identity import PeerId
from protocols.tasks import Spawn

logger = logging.getLogger(__name__)

MAX_ASKED = 8  # relays asked in one search


class Outbound:
    """The relay of one node, where it needs one.

    ``candidates`` tells who may be one, best first. ``greet`` introduces this node to one of them.
    ``moved`` is told when the address of this node has become another.
    """

    def __init__(self, transport: HttpTransport, events: EventLog, spawn: Spawn) -> None:
        self._transport = transport
        self._events = events
        self._spawn = spawn
        self._kept = False
        self.relay: PeerAddress | None = None
        self.needed = False
        self.candidates: Callable[[], Sequence[PeerAddress]] = tuple
        self.greet: Callable[[PeerAddress], Awaitable[object]]
        self.moved: Callable[[], None] = lambda: None

    @property
    def address(self) -> str:
        """Where this node is called; empty without a relay."""
        relay = self.relay
        if relay is None or relay.peer is None:
            return ""
        return relay_address(relay.hostport, relay.peer)

    def describe(self) -> str:
        """For `node status` and the dashboard; empty for a node that can be dialled."""
        if not self.needed:
            return ""
        met = self._transport.relays.met
        past = f", {met} {'connection' if met == 1 else 'connections'} past it" if met else ""
        return (
            f"outbound only, relay {self.relay}{past}" if self.relay else "outbound only, no relay"
        )

    async def enter(self, candidates: Iterable[PeerAddress]) -> PeerAddress | None:
        """From now on this node is called through a relay; None if no candidate would be it."""
        before, self.needed = self.needed, True
        if self._kept:
            if not before:
                self.moved()
            return self.relay
        given = list(candidates)
        self.candidates = lambda: given
        self.relay = await self._find(given)
        if self.relay is not None:
            self.moved()
            self._kept = True
            self._spawn(self._keep())
        return self.relay

    def leave(self) -> None:
        """From now on this node is called where it is; a relay that it has still tells of calls."""
        self.needed = False
        self.moved()

    async def _find(self, candidates: Iterable[PeerAddress]) -> PeerAddress | None:
        """Take the first relay that also carries, else the first that tells; None without any."""
        found: PeerAddress | None = None
        for candidate in list(candidates)[:MAX_ASKED]:
            try:
                rate = await self._reserve(candidate)
            except (TransportError, OperatorError) as error:
                logger.info("%s is no relay for this node: %s", candidate, error)
                continue
            if rate or found is None:
                found = candidate
            if rate:
                break
        return found

    async def _reserve(self, candidate: PeerAddress) -> float:
        assert candidate.peer is not None
        self._transport.book.add(candidate.peer, candidate.hostport)
        try:
            return await self._transport.relays.reserve(candidate.peer)
        except RemoteRefused as error:
            if error.code != "stranger":
                raise
            await self.greet(candidate)
            return await self._transport.relays.reserve(candidate.peer)

    async def _keep(self) -> None:
        """Take calls as long as it is needed; another relay where this one goes away."""
        while self.needed:
            relay = self.relay
            if relay is not None and relay.peer is not None:
                try:
                    await self._transport.relays.attend(relay.peer, relay.hostport)
                except TransportError as error:
                    self.relay = None
                    if self.needed:
                        self._lost(relay, error)
            await self._another(relay)
        self._kept = False

    def _lost(self, relay: PeerAddress, error: TransportError) -> None:
        self._events.emit(
            Problem.of(
                operator_error(
                    "E302",
                    f"the relay {relay} is gone",
                    why=str(error),
                    fix="another one is looked for; until there is one, peers cannot call this "
                    "node and its work waits",
                )
            )
        )

    async def _another(self, gone: PeerAddress | None) -> None:
        """Look for a relay until there is one; the one that went away is asked last."""
        for pause in backoff(random.Random()):
            if not self.needed:
                return
            known: dict[PeerId | None, PeerAddress] = {one.peer: one for one in self.candidates()}
            if gone is not None:
                known.pop(gone.peer, None)
                known[gone.peer] = gone
            self.relay = await self._find(known.values())
            self.moved()
            if self.relay is not None:
                if self.needed:
                    self._events.emit(Notice(text=f"peers call this node through {self.relay} now"))
                return
            await asyncio.sleep(pause)


def none_found(addresses: str, why: str) -> OperatorError:
    """E302 where nobody relays either."""
    return operator_error(
        "E302",
        f"peers cannot dial this node at {addresses or 'any address'}",
        why=f"{why}; and none of the peers would be its relay",
    )
