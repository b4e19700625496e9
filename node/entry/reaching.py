"""Where a node is called: peers dial it back, and where they cannot a relay is taken.

Asked on the way in, and again when this machine's address has changed or nobody could dial it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from bootstrap.dial_back import Reach, outside, reach
from bootstrap.handshake import Greeting
from node.config import NodeConfig
from node.entry.outbound import Outbound, none_found
from node.entry.own_address import OwnPlace
from node.errors import operator_error
from node.monitor.event_log import EventLog
from node.monitor.events import Notice
from protocols.addresses import PeerAddress, host_of, is_loopback
from protocols.errors import OperatorError
from protocols.identity import PeerId
from protocols.tasks import every
from protocols.transport import Transport
from protocols.whereabouts import Whereabouts

logger = logging.getLogger(__name__)

ASKED_AGAIN = 3  # live peers, for this node's address, side by side
TRIED_AGAIN = 8  # live peers, until so many have answered
QUICKLY_S = 2.0  # on the way in, for peers to get through a translator; a "no" takes longer
MISSED = (Reach.NO, Reach.ELSEWHERE)  # peers say that they do not get through


@dataclass
class Reaching:
    """Sees to it that others can call one node."""

    config: NodeConfig
    transport: Transport
    whereabouts: Whereabouts
    events: EventLog
    outbound: Outbound
    own_end: Callable[[PeerId], str]  # ``HOST:PORT`` of this machine on the way to a peer
    place: OwnPlace
    greet: Callable[[str, PeerId, bytes], Awaitable[Greeting]]  # calls :meth:`greeted`
    _ends: dict[PeerId, str] = field(default_factory=dict)  # as peers were greeted
    _dialled: bool = False  # whether peers can dial this node, as it was found last
    _told: tuple[str, str] | None = None  # where this node is called and how, as was told last
    _alone: bool = True  # it began a run: whoever came has found the way, and needs no relay

    @property
    def settled(self) -> bool:
        """Whether this node is dialled at an address of its own.

        Else it may be some day: a port is forwarded, a firewall opened. Or its router has another
        address, of which this machine sees nothing.
        """
        return self._dialled and not self.place.outside

    def greeted(self, peer: PeerId) -> None:
        """Note by which address this machine gets to a peer, while it is connected."""
        self._ends[peer] = self.own_end(peer)

    async def check(
        self, greetings: list[Greeting], places: Sequence[PeerAddress], run: bytes
    ) -> str:
        """Be called where peers can; returns how. Raises E302 (:meth:`_be_reached`)."""
        self._alone = False
        if self.place.seen([self._ends[greeting.peer] for greeting in greetings]):
            await self._tell_where(greetings, run)
        how = await self._be_reached(greetings, places, run, QUICKLY_S)
        self._told = (self._where, how)
        return how

    async def check_insisted(self, greetings: list[Greeting]) -> None:
        """Raise E302 if the operator says that peers must dial this node, and they cannot.

        So this is known before there is a run.
        """
        if not self._insists:
            return
        back = await self._reach(greetings)
        if back not in MISSED or self._believed(back) or await self._get_through(greetings):
            return
        raise self._unreachable(back)

    async def look_again(self, places: Sequence[PeerAddress], run: bytes) -> None:
        """Have others call this node where it is by now.

        Where that leaves it not :attr:`settled` it is worth another look later. ``places``: of
        live peers, who may see where it comes from, dial back, and relay. Raises E302
        (:meth:`_be_reached`), and this node then is called where it is, as before.
        """
        self._told = self._told or (self._where, "")
        self._alone = self._alone and not self.place.moved
        self._dialled = False
        greetings = await self._greet_some(places, run)
        if places and not greetings:
            return  # this machine has no network at the moment
        ends = [self._ends[greeting.peer] for greeting in greetings]
        if self.place.seen(one for one in ends if not is_loopback(host_of(one))):
            await self._tell_where(greetings, run)
        if self.outbound.needed:
            if not await self._get_through(greetings):
                return
            self.outbound.leave()
            await self._tell_where(greetings, run)
        try:
            how = await self._be_reached(greetings, places, run)
        except OperatorError:
            self.outbound.leave()
            raise
        where, before = self._told
        if where != self._where or (self._dialled and before not in ("", how)):
            self._told = (self._where, how)
            self.events.emit(Notice(text=f"this node's address is {self._where} now ({how})"))

    async def _greet_some(self, places: Sequence[PeerAddress], run: bytes) -> list[Greeting]:
        """Greet a few of these, whichever answer: the next time it is others."""
        left = iter(random.sample(places, min(len(places), TRIED_AGAIN)))
        greetings: list[Greeting] = []

        async def greet_one() -> None:
            for place in left:
                with suppress(OperatorError):  # the next one is asked
                    peer = place.peer or PeerId("")
                    greetings.append(await self.greet(place.hostport, peer, run))
                    return

        await every(greet_one() for _ in range(ASKED_AGAIN))
        return greetings

    async def _be_reached(
        self,
        greetings: list[Greeting],
        places: Sequence[PeerAddress],
        run: bytes,
        patience: float | None = None,
    ) -> str:
        """Have peers dial back; where none can, take a relay, since others bring work here.

        Returns what has come of it. ``patience``: seconds to wait for who gets through a
        translator. Raises E302 where there is no relay, or where the operator has said that this
        must not be.
        """
        found = await self._reach(greetings)
        missed = found in MISSED and not self.outbound.needed
        if missed and await self._get_through(greetings, patience):
            await self._tell_where(greetings, run)
            found = Reach.YES
        self._dialled = self._believed(found) or (found is Reach.YES and not self.outbound.needed)
        if found is Reach.YES:
            past = f" at {self.place.outside}, as peers see it" if self.place.outside else ""
            return f"dial-back ok ({self.outbound.describe() or f'direct{past}'})"
        if found is Reach.UNKNOWN or self._believed(found) or self._alone:
            return f"not tested at {self._where}: {found}"
        if self._insists:
            raise self._unreachable(found)
        self.outbound.greet = lambda at: self.greet(at.hostport, at.peer or PeerId(""), run)
        relay = await self.outbound.enter(places)
        if relay is None:
            raise none_found(self._where, found)
        await self._tell_where(greetings, run)
        found = await self._reach(greetings)
        if found is Reach.NO:
            raise none_found(self.outbound.address, found)
        tested = "dial-back ok" if found is Reach.YES else f"not tested: {found}"
        return f"outbound only -> relay {relay}, {tested}"

    async def _get_through(self, greetings: list[Greeting], patience: float | None = None) -> bool:
        """Whether peers can dial this node's port where they see it come from.

        It is called there from now on: a translator lets them in.
        """
        if self.config.public_addr or not self.place.port:
            return False
        seen = {one.peer: one.welcome.observed for one in greetings}
        found = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                found = await outside(self.transport, seen, self.place.port)
        self.place.pass_by(found)
        return bool(found)

    async def _tell_where(self, greetings: list[Greeting], run: bytes) -> None:
        """Tell those who dial back where this node is called now."""
        for greeting in greetings[:3]:
            try:
                await self.greet(greeting.peer, greeting.peer, run)
            except OperatorError as error:  # it went away: others are asked
                logger.info("%s is not told: %s", greeting.peer, error)

    def _believed(self, found: Reach) -> bool:
        """Whether the operator is believed, who has said where this node is dialled."""
        return found is Reach.ELSEWHERE and bool(self.config.public_addr)

    @property
    def _insists(self) -> bool:
        """Whether the operator has said that peers must be able to dial this node."""
        return bool(self.config.require_reachable or self.config.public_addr)

    @property
    def _where(self) -> str:
        """The addresses that peers are given."""
        own = self.whereabouts.own
        return ", ".join(own.record.addresses) if own else ""

    def _unreachable(self, why: str) -> OperatorError:
        given = f"--public-addr {self.config.public_addr}" if self.config.public_addr else ""
        return operator_error(
            "E302",
            f"peers cannot dial this node at {self._where or 'any address'}",
            why=why,
            fix=f"correct {given}, or leave it out: a peer then relays for this node"
            if given
            else "forward the port and give its public address with --public-addr HOST:PORT, "
            "or leave --require-reachable out: a peer then relays for this node",
        )

    async def _reach(self, greetings: list[Greeting]) -> Reach:
        """Whether those who were greeted can dial this node."""
        return await reach(self.transport, [greeting.peer for greeting in greetings[:3]])
