"""What this member sends of its own in one round: its slice of every part, to whoever merges it.

That is the part's owner or, where the plan has groups, its relay. If the relay takes nothing, or
the owner no longer waits for it, what has not come through the relay goes straight to the owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from gossip.exchange.listener import ExchangeListener
from gossip.exchange.part_states import PartState, PartStates, Via
from gossip.exchange.relaying import Relaying
from gossip.exchange.slicing import OwnContribution, SealedFeed, SliceFeed
from gossip.exchange.transfers import Transfers, header_of
from gossip.place import Place
from gossip.plans.commitments import seal
from gossip.plans.validity import PartKey
from protocols.errors import NonFinite, RemoteProtocolError, RemoteRefused, TransportError
from protocols.identity import PeerId
from protocols.messages import Plan, TransferHeader

UNBLAMED = ("early", "late", "unfit")  # refusals of a slice that do not speak against the owner


@dataclass
class Outbox:
    """My slices in one exchange. ``held`` are the parts that are here merged, ``shunned`` the
    relays that took no slice."""

    place: Place
    transfers: Transfers
    planned: PartStates
    own: OwnContribution
    relaying: Relaying
    listener: ExchangeListener
    held: Collection[PartKey]
    shunned: set[PeerId]

    @property
    def me(self) -> PeerId:
        return self.transfers.wiring.identity.peer_id

    def send(self, state: PartState, via: Via | None = None, *, ask: bool = False) -> None:
        """Send my slice to the part's owner, or to the relay ``via``; ``ask`` how much it has."""
        state.via = via
        state.sending = self.transfers.start(self._send(state, state.plan, via, ask=ask))

    def decline(self, state: PartState, via: Via) -> None:
        """Tell a relay, which would wait for it, that my slice goes straight to the owner."""
        if state.declined != via:
            state.declined = via
            self.transfers.start(self._decline(state.key, state.plan, via))

    def detach(self, state: PartState) -> None:
        """Stop sending through the relay: the rest of my slice is to go to the owner."""
        running, state.via, state.sending = state.sending, None, None
        if running is not None:
            running.cancel()

    def stop_but(self, wanted: Collection[PartKey]) -> list[asyncio.Task[None]]:
        """Stop sending slices of all parts but these; returns the tasks of the others."""
        ended = []
        for state in self.planned.all():
            if state.sending is None or state.key in wanted:
                continue
            ended.append(state.sending)
            if state.sending.cancel():
                state.via = state.sending = None  # the rest goes out if a later plan asks again
        return ended

    async def bring(self, sender: PeerId, header: TransferHeader) -> bytes:
        """The owner of a part waits for my relay no more, and asks for my slice itself."""
        state = await self.planned.until((header.start, header.stop, sender, header.basis))
        plan, key = state.plan, state.key
        counts = any(c.peer == self.me and c.active for c in plan.contributors)
        known = state.sending is not None and state.via is None  # it is on its way there already
        if counts and plan.groups and key not in self.held and not known:
            if state.via is not None:
                self.listener.unserved(state.via.relay)
            if state.via is not None and state.sending is not None and not state.sending.done():
                # it takes no slice, so it will pass on no part either
                self.shunned.add(state.via.relay)
                self.decline(state, state.via)  # if it lives it would wait for the rest
            self.relaying.drop(key)
            self.detach(state)
            self.send(state, ask=True)
        return b""

    async def _decline(self, key: PartKey, plan: Plan, via: Via) -> None:
        with contextlib.suppress(TransportError, RemoteProtocolError):  # it gives up on me by then
            await self._push(key, plan, via, ask=False, nothing=True)

    async def _send(self, state: PartState, plan: Plan, via: Via | None, *, ask: bool) -> None:
        try:
            await self._push(state.key, plan, via, ask=ask)
        except (TransportError, RemoteProtocolError) as error:
            harmless = isinstance(error, RemoteRefused) and error.code in UNBLAMED
            if harmless or state.key in self.held or self.transfers.closed:
                return
            owner = state.key[2]
            if via is not None:
                # maybe only the link failed, and the owner can get it from me: blame nobody
                why = RemoteProtocolError.of("took no slice for its group", error)
                self.listener.refused(via.relay, why)
                self.shunned.add(via.relay)
                state.via = None
                await self._send(state, plan, None, ask=True)
            elif isinstance(error, RemoteRefused):
                self.listener.declined(owner, f"wants no slice: {error}")
            else:
                state.sending = None  # to be sent again by a later plan
                self.listener.fault(owner, f"took no slice: {error}")

    async def _push(
        self, key: PartKey, plan: Plan, via: Via | None, *, ask: bool, nothing: bool = False
    ) -> None:
        """Push my slice, or an empty one in its place. Raises what :meth:`Transfers.push` does."""
        wiring = self.transfers.wiring
        codec, identity = wiring.codec.named(plan.codec), wiring.identity
        header, source = header_of(self.place, key, plan), self.own.source
        to = key[2]
        if via is not None:
            to, header = via.relay, dataclasses.replace(header, basis=via.joint)

        async def push(*, everything: bool) -> None:
            def feed(first: int) -> SliceFeed:
                at = (codec, source, key[0], key[1], first if everything else None)
                if plan.draft:
                    return SealedFeed(*at, lambda leaves: seal(identity, header, leaves))
                return SliceFeed(*at)

            await self.transfers.push(to, "slice", header, feed, plan.patience_s, ask=ask)

        try:
            await push(everything=not nothing and await self.own.is_sound())
        except ValueError as error:  # the values have changed since they were checked
            self.listener.refused(self.me, NonFinite(f"own pseudo-gradient: {error}"))
            await push(everything=False)
