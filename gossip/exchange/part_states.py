"""The parts of a round as its plans ask for them, and the route that each of them takes.

Bytes of a part may overtake the plan that asks for them, so whoever brings them waits a little.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from gossip.exchange.receiving import Inflow
from gossip.exchange.transfers import Transfers
from gossip.plans.validity import PartKey
from protocols.errors import RemoteRefused
from protocols.identity import PeerId
from protocols.messages import Plan

PLAN_WAIT_S = 5.0  # a transfer that no plan here asks for waits this long, then is told to retry
ANSWER_S = 2.5  # the same for the question how much is here, well before its asker gives up


@dataclass(eq=False)
class Route:
    """One part (range, owner, basis) as this member deals with it.

    Where the plan has groups a part's relay stands in for its owner: slices go to it, and the
    merged part comes from it.
    """

    key: PartKey
    plan: Plan  # the newest that asks for the part
    sending: asyncio.Task[None] | None = None  # of my slice; kept when it has ended
    via: PeerId | None = None  # the relay that gets my slice, not the owner
    passed_on: tuple[PeerId, ...] | None = (
        None  # who gets the part from me; None: I do not relay it
    )
    inflow: Inflow | None = None  # the merged part on its way in


@dataclass
class Planned:
    """The routes of one exchange."""

    transfers: Transfers
    _routes: dict[PartKey, Route] = field(default_factory=dict)
    _relayed: dict[PartKey, Route] = field(default_factory=dict)  # as if their relays owned them
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __contains__(self, key: PartKey) -> bool:
        return key in self._routes or key in self._relayed

    def routes(self) -> Iterable[Route]:
        """The parts that plans have asked for."""
        return self._routes.values()

    def get(self, key: PartKey) -> Route | None:
        """The route of a part, if a plan has asked for it."""
        return self._routes.get(key)

    def add(self, key: PartKey, plan: Plan) -> Route:
        """This plan asks for a part: its route, which may be under way."""
        self._relayed.pop(key, None)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = Route(key, plan)
        route.plan = plan
        return route

    def stand_in(self, relay: PeerId, route: Route) -> None:
        """A relay speaks of a part as if it were its owner."""
        start, stop, _, basis = route.key
        self._relayed[start, stop, relay, basis] = route

    def drop(self, key: PartKey) -> Route | None:
        """No plan asks for a part any more: its route is forgotten, and returned if there was one.

        If a plan asks for it again, all of it is sent again.
        """
        route = self._routes.pop(key, None)
        if route is not None:
            for relayed in [name for name, other in self._relayed.items() if other is route]:
                del self._relayed[relayed]
        return route

    def clear(self) -> None:
        """The round is over: nothing is on its way any more."""
        self._routes.clear()
        self._relayed.clear()

    async def announce(self) -> None:
        """There are new ones, or the round is over: whoever waits has a look."""
        async with self._changed:
            self._changed.notify_all()

    async def until(self, key: PartKey, wait: float = PLAN_WAIT_S) -> Route:
        """Wait for the plan that has this part, which is named by its owner or its relay.

        A slice may be quicker than the plan that announces it. Raises RemoteRefused ``early`` where
        there is none yet, ``late`` where the round is over.
        """
        try:
            async with asyncio.timeout(wait), self._changed:
                await self._changed.wait_for(lambda: self.transfers.closed or key in self)
        except TimeoutError:
            raise RemoteRefused("early", "no plan has this part yet") from None
        if self.transfers.closed:
            raise RemoteRefused("late", "the round is over here")
        relayed = self._relayed.get(key)
        return self._routes[key] if relayed is None else relayed
