"""Who else is in a run: what the DHT and the seeds know of it, who serves, who may relay.

A :class:`Lookout` adds what it finds to the swarm's membership, so that islands which nobody has
named, and seeds that have started anew, are found. It also sees to it that others find this node
where it is now, since a machine's address may change.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from bootstrap.dht import Dht
from bootstrap.handshake import Greeting
from bootstrap.seeds import backoff
from gossip.common import AnySwarm
from gossip.membership.members import Liveness
from node.entry.entrance import Entrance
from node.entry.met_before import MetBefore
from node.monitor.events import Notice, Problem
from node.replicas.replica import OuterReplica
from protocols.addresses import PeerAddress
from protocols.errors import (
    Crowded,
    OperatorError,
    RemoteProtocolError,
    Stale,
    TransportError,
)
from protocols.identity import PeerId
from protocols.tasks import every

if TYPE_CHECKING:
    from node.runtime import Node

DISCOVERY_S = 30.0  # between look-ups in the DHT
MOVED_S = 3.0  # between looks whether this machine has another address: nobody is asked for it
AGAIN_S, LAST_AGAIN_S = 10.0, 300.0  # until a node is dialled at its own address: the pauses
ASKED_AT_ONCE = 16  # of the peers that the DHT knows
SILENT_S = 300.0  # before a peer that did not answer is asked again


class Lookout:
    """Looks after who is there, while a node takes part."""

    def __init__(
        self,
        node: Node,
        entrance: Entrance,
        swarm: AnySwarm,
        replica: OuterReplica,
        rejected: Callable[[PeerId, RemoteProtocolError], None],
    ) -> None:
        """``replica``: of any fragment; ``rejected`` is told what broke the rules."""
        self.node, self.entrance, self.swarm, self.replica = node, entrance, swarm, replica
        self.rejected = rejected
        self._met_before = MetBefore(entrance)
        self._served: bool | None = None  # whether a server is there, as told
        self._silent: dict[PeerId, float] = {}  # when they were asked, and not known afterwards
        self._again_at = inf  # when to try again whether this node is dialled where it is
        self._pauses = _pauses()
        self._complained = False  # that it is not

    def after_servers(self) -> None:
        """Tell when the last server is gone, and when one is there again."""
        if self.replica.manifest.rounds.owners != "servers":
            return
        alive = self.swarm.membership.members_alive(self.swarm.now())
        served = self.node.config.role == "server" or any(a.role == "server" for a in alive)
        if served == self._served:
            return
        self._served = served
        text = "servers merge the parts" if served else "no server is there: all members merge"
        self.node.events.emit(Notice(text=text))

    def learn(self, envelope: bytes, teller: PeerId) -> None:
        """Take an announcement that ``teller`` passes on."""
        try:
            self.swarm.presence.learn(envelope)
        except (Stale, Crowded):
            return  # it travelled too long, or is one of too many from one place
        except RemoteProtocolError as error:
            self.rejected(teller, error)

    async def run(self, dht: Dht) -> None:
        """Look for islands that nobody we know has told us about, and after the seeds."""
        dht.others = self.alive
        self._again_at = self._next_look()
        looks = (
            _again_and_again(lambda: self._find_islands(dht), DISCOVERY_S),
            _again_and_again(self._look_after_seeds, DISCOVERY_S),
            _again_and_again(self._find_who_was_met, DISCOVERY_S),
            _again_and_again(self._look_after_own_place, MOVED_S),
        )
        await every(looks)  # however long one of them takes

    async def _find_islands(self, dht: Dht) -> None:
        """Ask peers that only the DHT knows, but not those that have just failed to answer.

        Its records outlive islands, and anybody can put some there.
        """
        now, places = self.swarm.now(), asyncio.Semaphore(ASKED_AT_ONCE)
        self._silent = {peer: at for peer, at in self._silent.items() if now - at < SILENT_S}

        async def ask(peer: PeerId) -> None:
            async with places:
                if not self._is_known(peer):  # others may have told of it meanwhile
                    await self._ask(peer)
            if not self._is_known(peer):
                self._silent[peer] = self.swarm.now()

        found = [peer for peer in await dht.islands() if peer not in self._silent]
        await every(ask(peer) for peer in found if not self._is_known(peer))

    async def _ask(self, peer: PeerId) -> None:
        """Hear from a peer. Where there is an invitation it answers no stranger, but a greeting."""
        if not self.entrance.config.invitation:
            await self.swarm.presence.ask(peer)
            return
        with suppress(OperatorError, TransportError):  # it is one of many
            self._hear(await self.entrance.measure(peer, self.replica.place.run))

    def _is_known(self, peer: PeerId) -> bool:
        return peer == self.node.identity.peer_id or peer in self.swarm.membership.islands

    async def _look_after_seeds(self) -> None:
        """Bring a seed that has started anew its run back, and remember who is there."""
        now, membership = self.swarm.now(), self.swarm.membership
        run = self.replica.place.run
        for greeting in await self.entrance.visit_seeds(
            run, lambda peer: membership.liveness(peer, now) is Liveness.ALIVE
        ):
            self._hear(greeting)
        self.node.cache.remember(self.relays())

    async def _find_who_was_met(self) -> None:
        """Dial peers of before: after a long cut or a power cut nobody else tells of them."""
        run = self.replica.place.run
        for greeting in await self._met_before.look(run, self._is_known, self.swarm.now()):
            self._hear(greeting)

    def _hear(self, greeting: Greeting) -> None:
        """Take the announcements that a greeting has brought."""
        for envelope in greeting.welcome.announces:
            self.learn(envelope, greeting.peer)

    async def _look_after_own_place(self) -> None:
        """Have others call this node where it is now, if that is elsewhere.

        Until they can dial it there it is tried again, after pauses that grow.
        """
        if self.node.place.moved:
            self._pauses = _pauses()
            self._complained = False
        elif self.swarm.now() < self._again_at:
            return
        await self.node.place.map_again()  # the router may still forward to where this machine was
        try:
            await self.entrance.reaching.look_again(self.relays(), self.replica.place.run)
        except OperatorError as error:
            if not self._complained:
                self.node.events.emit(Problem.of(error))
            self._complained = True
        self._again_at = self._next_look()
        self.node.outbound.candidates = self.relays  # it may have taken one just now

    def _next_look(self) -> float:
        """When it is worth another look whether this node can be dialled; never where it can."""
        settled = self.entrance.reaching.settled
        return inf if settled else self.swarm.now() + next(self._pauses)

    def relays(self) -> list[PeerAddress]:
        """Who may relay for this node: live peers that it has dialled, where it did."""
        book = self.node.transport.book
        return [place for peer in self.alive() if (place := book.dialled_at(peer)) is not None]

    def alive(self) -> list[PeerId]:
        """The peers that are there."""
        return self.swarm.membership.alive(self.swarm.now())

    def moved(self, dht: Dht) -> None:
        """This node's address has changed: tell the others at once."""
        self.swarm.presence.note(addresses=tuple(self.node.place.addresses()[:8]))
        self.swarm.presence.tell()
        dht.keep_announced()
        view = self.node.state.node
        self.node.state.node = replace(view, join_address=self.node.place.join_address())


def _pauses() -> Iterator[float]:
    return backoff(random.Random(), first=AGAIN_S, last=LAST_AGAIN_S)


async def _again_and_again(look: Callable[[], Awaitable[None]], pause: float) -> None:
    while True:
        await look()
        await asyncio.sleep(pause)
