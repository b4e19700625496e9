"""The parts of a round as its plans ask for them, and where each of them stands here.

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


@dataclass(frozen=True)
class Via:
    """The relay that gets my slice, not the owner, and what the slice is named by there."""

    relay: PeerId
    joint: bytes  # in place of the basis (:func:`~gossip.plans.grouping.joint_basis`)


@dataclass(eq=False)
class PartState:
    """One part (range, owner, basis) as this member deals with it.

    Where the plan has groups a part's relay stands in for its owner: slices go to it, and the
    merged part comes from it.
    """

    key: PartKey
    plan: Plan  # the newest that asks for the part
    sending: asyncio.Task[None] | None = None  # of my slice; kept when it has ended
    via: Via | None = None  # of my slice, where the owner does not get it from me
    declined: Via | None = None  # told that my slice goes straight to the owner
    # who gets the part from me; None: I do not relay it
    passed_on: tuple[PeerId, ...] | None = None
    inflow: Inflow | None = None  # the merged part on its way in
    passing: PeerId | None = None  # the relay that is to pass it on to me, and has not
    straight: bool = False  # its owner gives it to me, and no relay


@dataclass
class PartStates:
    """The parts of one exchange, by key."""

    transfers: Transfers
    _states: dict[PartKey, PartState] = field(default_factory=dict)
    _relayed: dict[PartKey, PartState] = field(
        default_factory=dict
    )  # as if their relays owned them, and by what the sums of groups are named by
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __contains__(self, key: PartKey) -> bool:
        return key in self._states or key in self._relayed

    def all(self) -> Iterable[PartState]:
        """The parts that plans have asked for."""
        return self._states.values()

    def get(self, key: PartKey) -> PartState | None:
        """Where a part stands, if a plan has asked for it."""
        return self._states.get(key)

    def add(self, key: PartKey, plan: Plan) -> PartState:
        """This plan asks for a part: where it stands, which may be under way already."""
        self._relayed.pop(key, None)
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = PartState(key, plan)
        state.plan = plan
        return state

    def stand_in(self, peer: PeerId, state: PartState, joint: bytes | None = None) -> None:
        """A relay speaks of a part as if it were its owner.

        With ``joint`` instead of the basis where it is about slices that are added up for the part.
        """
        start, stop, _, basis = state.key
        self._relayed[start, stop, peer, basis if joint is None else joint] = state

    def drop(self, key: PartKey) -> PartState | None:
        """No plan asks for a part any more: it is forgotten, and returned if it was known.

        If a plan asks for it again, all of it is sent again.
        """
        state = self._states.pop(key, None)
        if state is not None:
            for relayed in [name for name, other in self._relayed.items() if other is state]:
                del self._relayed[relayed]
        return state

    def clear(self) -> None:
        """The round is over: nothing is on its way any more."""
        self._states.clear()
        self._relayed.clear()

    async def announce(self) -> None:
        """There are new ones, or the round is over: whoever waits has a look."""
        async with self._changed:
            self._changed.notify_all()

    async def until(self, key: PartKey, wait: float = PLAN_WAIT_S) -> PartState:
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
        return self._states[key] if relayed is None else relayed
