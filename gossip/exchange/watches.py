"""Watching for merged parts that do not come although they could, to report their owners.

Every part that a plan asks of somebody else is watched until it is held. Whether it is overdue
is judged by what moves (:class:`gossip.exchange.lateness.Overdue`), beside the round's other parts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from dataclasses import dataclass, field

from gossip.exchange.lateness import Overdue, owner_patience_s, passing_patience_s, usual_s
from gossip.exchange.listener import ExchangeListener
from gossip.exchange.part_states import PartState
from gossip.exchange.transfers import Transfers, header_of
from gossip.place import Place
from gossip.plans.validity import PartKey
from protocols.errors import RemoteProtocolError, TransportError
from protocols.identity import PeerId
from protocols.messages import Plan


@dataclass
class Watches:
    """The watches of one exchange. ``held`` are the parts that are here; ``shunned`` are relays
    that are of no use."""

    transfers: Transfers
    listener: ExchangeListener
    place: Place
    held: Collection[PartKey]
    shunned: Collection[PeerId]
    _tasks: dict[PartKey, asyncio.Task[None]] = field(default_factory=dict)
    _judges: dict[PartKey, Overdue] = field(default_factory=dict)
    _ends: dict[PartKey, float] = field(default_factory=dict)  # when each part that is here came
    _known: tuple[float, float] = (-1.0, 0.0)  # when it was asked what is usual, and the answer

    def watch(self, state: PartState, plan: Plan) -> None:
        """Blame the owner of a part that does not come and does not move.

        Where a relay ought to pass it on, the owner is first asked for it: at once, if that relay
        has not passed on others.
        """
        self._tasks[state.key] = self.transfers.start(self._watch(state, plan))

    def stop(self) -> list[asyncio.Task[None]]:
        """Watch no more; returns what has yet to end."""
        ended = list(self._tasks.values())
        for task in ended:
            task.cancel()
        self._tasks.clear()
        self._judges.clear()
        self._ends.clear()  # what came before another plan tells nothing of that one's pace
        self._known = (-1.0, 0.0)
        return ended

    async def _watch(self, state: PartState, plan: Plan) -> None:
        key, patience, passing = state.key, plan.patience_s, state.passing
        if plan.groups:
            patience = owner_patience_s(patience, plan.expected_s)
        if passing is not None:
            if passing in self.listener.mute():
                with contextlib.suppress(TransportError, RemoteProtocolError):  # asked later again
                    await self._ask_owner(key, plan)
            relayed = passing_patience_s(plan.patience_s, plan.expected_s)
            await self._until_overdue(state, plan, relayed, passing)
            if key in self.held:
                return
            try:
                await self._ask_owner(key, plan)
            except (TransportError, RemoteProtocolError) as error:
                self.listener.fault(key[2], f"gives no part: {error}")
                return
        await self._until_overdue(state, plan, patience)
        if key not in self.held:
            self.listener.fault(key[2], "its part does not come")

    async def _ask_owner(self, key: PartKey, plan: Plan) -> None:
        """Have the owner of a part give it to me itself."""
        header, transport = header_of(self.place, key, plan), self.transfers.wiring.transport
        await transport.call(key[2], "give", header.encode(), timeout=plan.patience_s)

    async def _until_overdue(
        self, state: PartState, plan: Plan, patience: float, relay: PeerId | None = None
    ) -> None:
        """Wait until a part is held, or is overdue, or its relay is found to be of no use."""
        key, clock, wiring = state.key, self.transfers.wiring.now, self.transfers.wiring
        size = wiring.codec.named(plan.codec).encoded_size(key[0], key[1])
        overdue = Overdue(clock(), patience, plan.expected_s, key[1] - key[0], size)
        if not plan.groups:  # else many come through one relay, whose pace would seem usual
            self._judges[key] = overdue
        while key not in self.held and relay not in self.shunned:
            moved = state.inflow.moved if state.inflow is not None else 0
            left = overdue.left(clock(), moved, bool(self.held), self._usual(overdue, clock()))
            if left <= 0:
                return
            await asyncio.sleep(min(left, patience / 8))
        self._ends[key] = clock()

    def _usual(self, overdue: Overdue, now: float) -> float:
        """Seconds that the parts of others take at their pace."""
        before, found = self._known
        if not before <= now < before + overdue.patience_s / 8:  # all watches ask so often
            here, judges = self._ends, self._judges.items()
            going = [judge.end_when_it_moved for key, judge in judges if key not in here]
            found = usual_s(overdue.started, [*here.values(), *going], overdue.expected_s)
            self._known = now, found
        return found
