"""What others bring to this member in one round: slices to merge, and parts that are merged.

A slice, or the sum of a group, goes to what merges it here (:mod:`gossip.exchange.owning`), or
collects it for its group (:mod:`gossip.exchange.relaying`). A merged part comes from its owner or
its relay, or is fetched from whoever holds it. A part that does not come although it could is
watched for.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch

from gossip.exchange.bodies import chunk_at, result_from, trailer_size
from gossip.exchange.buffers import Whole
from gossip.exchange.collecting import Collecting
from gossip.exchange.fetching import Fetching
from gossip.exchange.listener import Listener
from gossip.exchange.owning import Owning
from gossip.exchange.part_states import ANSWER_S, PLAN_WAIT_S, PartState, PartStates
from gossip.exchange.receiving import Inflow, PartDrain
from gossip.exchange.relaying import Relaying, SharedInflow
from gossip.exchange.slicing import OwnContribution
from gossip.exchange.transfers import Transfers
from gossip.exchange.watches import Watches
from gossip.place import Place
from gossip.plans.certificate import check_result
from gossip.plans.lateness import merged_patience_s
from gossip.plans.validity import PartKey, Shape, check_statement, fixes, key_of
from gossip.wiring import Wiring
from protocols.errors import Malformed, RemoteProtocolError, RemoteRefused
from protocols.identity import PeerId
from protocols.messages import PartResult, Plan, TransferHeader
from protocols.transport import Incoming


@dataclass
class Inbox:
    """What comes in one exchange. ``shunned`` are relays that are of no use."""

    wiring: Wiring
    place: Place
    shape: Shape
    transfers: Transfers
    planned: PartStates
    own: OwnContribution
    listener: Listener
    shunned: set[PeerId]
    parts: dict[PartKey, tuple[PartResult, torch.Tensor]] = field(default_factory=dict)
    # parts that I voted for, and of which a later plan names other bytes of the same owner
    replaced: dict[PartKey, tuple[PartResult, torch.Tensor]] = field(default_factory=dict)
    plan: Plan | None = None
    owning: Owning = field(init=False)
    relaying: Relaying = field(init=False)
    watches: Watches = field(init=False)
    fetching: Fetching = field(init=False)
    _whole: Whole = field(init=False)

    def __post_init__(self) -> None:
        told = self.listener
        self._whole = whole = Whole(self.shape.size)
        collecting = (self.wiring, self.transfers, self.own, told, whole, self.shape.mix)
        moved, me = self.transfers, self.wiring.identity.peer_id
        self.owning = Owning(*collecting, self._hold)
        self.relaying = Relaying(*collecting)
        self.watches = Watches(moved, told, self.place, self.parts, self.shunned)
        self.fetching = Fetching(moved, told, me, self.parts, self.planned, whole, self._hold)

    # --- slices ------------------------------------------------------------------------------

    async def on_slice(self, sender: PeerId, header: TransferHeader, incoming: Incoming) -> bytes:
        """Take a contributor's slice. Raises RemoteRefused ``early`` or ``late``."""
        await self._asked_for(header)
        await self._merging(header).take(sender, header, incoming)
        return b""

    async def slice_reached(self, sender: PeerId, header: TransferHeader) -> bytes:
        """How much of the sender's slice is here. Raises RemoteRefused ``early`` or ``late``."""
        await self._asked_for(header, ANSWER_S)
        return self._merging(header).reached(sender, header).encode()

    async def on_sum(self, sender: PeerId, header: TransferHeader, incoming: Incoming) -> bytes:
        """Take the sum of a group from its relay. Raises RemoteRefused ``early`` or ``late``."""
        await self._asked_for(header)
        await self.owning.take_sum(sender, header, incoming)
        return b""

    async def sum_reached(self, sender: PeerId, header: TransferHeader) -> bytes:
        """How much of a group's sum is here. Raises RemoteRefused ``early`` or ``late``."""
        await self._asked_for(header, ANSWER_S)
        return self.owning.sum_reached(sender, header).encode()

    async def give(self, sender: PeerId, header: TransferHeader) -> bytes:
        """A member asks for a part of mine that its relay does not pass on."""
        await self._asked_for(header)
        self.owning.give(sender, header)
        return b""

    async def _asked_for(self, header: TransferHeader, wait: float = PLAN_WAIT_S) -> None:
        """Wait for the plan in which I merge or relay this part.

        Raises RemoteRefused: ``early`` where it has not come, ``late`` where it is past.
        """
        me = self.wiring.identity.peer_id
        await self.planned.until((header.start, header.stop, me, header.basis), wait)

    def _merging(self, header: TransferHeader) -> Collecting:
        return self.relaying if self.relaying.collects_range(header) else self.owning

    # --- merged parts ------------------------------------------------------------------------

    async def on_merged(self, sender: PeerId, header: TransferHeader, incoming: Incoming) -> bytes:
        """Take a merged part from its owner. Raises RemoteProtocolError or RemoteRefused."""
        state = await self._part_from(sender, header)
        inflow, plan = self._inflow(state), state.plan
        if header.codec != plan.codec:
            raise Malformed("a part in another codec than planned")
        place, shape, owner = self.place, self.shape, state.key[2]
        found: list[PartResult] = []

        def finish(trailer: bytes) -> None:
            result = result_from(header, owner, trailer)
            check_statement(result, place, shape)
            inflow.check_digest(result.digest)
            check_result(place.run, result)
            found.append(result)
            if isinstance(inflow, SharedInflow):
                inflow.end(trailer)

        if isinstance(inflow, SharedInflow):
            assert state.passed_on is not None
            self.relaying.pass_on(state.key, header, plan, inflow, state.passed_on)
        first = chunk_at(self.wiring.codec, header)
        drain = PartDrain(inflow, first, trailer_size(len(plan.contributors)), finish)
        patience = merged_patience_s(plan.patience_s, plan.expected_s)
        inflow.open += 1
        try:
            await self.transfers.receive(sender, header, incoming, drain, patience)
        except RemoteProtocolError:
            if state.inflow is inflow:  # what has come of it is discarded
                state.inflow = None
                if isinstance(inflow, SharedInflow):
                    self.wiring.transport.post(inflow.spoil)
            raise
        finally:
            inflow.open -= 1
        self._hold(found[0], inflow.data)
        return b""

    async def merged_reached(self, sender: PeerId, header: TransferHeader) -> bytes:
        """How much is here of a part that the sender merges or relays.

        Raises RemoteRefused ``early`` or ``late``.
        """
        inflow = self._inflow(await self._part_from(sender, header, ANSWER_S))
        return dataclasses.replace(header, done=inflow.elements).encode()

    async def _part_from(
        self, sender: PeerId, header: TransferHeader, wait: float = PLAN_WAIT_S
    ) -> PartState:
        """Where the part stands that its owner, or the relay for it, refers to."""
        return await self.planned.until((header.start, header.stop, sender, header.basis), wait)

    def _inflow(self, state: PartState) -> Inflow:
        start, stop, *_ = state.key
        if state.key in self.parts:
            raise RemoteRefused("late", "held already")
        if state.inflow is None:
            codec = self.wiring.codec.named(state.plan.codec)
            kind = Inflow if state.passed_on is None else SharedInflow
            state.inflow = kind(codec, start, stop, self._whole)
        return state.inflow

    def _hold(self, result: PartResult, data: torch.Tensor) -> None:
        """Keep a part: the first version that comes, or the one that the plan names."""
        key = key_of(result)
        if self.transfers.closed or (key in self.parts and not fixes(self.plan, result)):
            return
        if self.planned.get(key) is None and key not in self.fetching:
            return  # it was let go of meanwhile
        self._keep(result, data)
        if (state := self.planned.get(key)) is not None:
            state.inflow = None
        self.fetching.news.set()
        self.fetching.news.clear()
        self.listener.held(result)

    def _keep(self, result: PartResult, data: torch.Tensor) -> None:
        """Store a part. A version that I voted for stays beside it: it may be decided already."""
        key = key_of(result)
        before = self.parts.get(key)
        if before is not None and self.listener.voted_for(before[0]):
            self.replaced[key] = before
        self.parts[key] = (result, data)

    def want(self, result: PartResult, plan: Plan) -> None:
        """Get a part that a plan takes for merged: fetch it, unless I voted for that version."""
        before = self.replaced.get(key_of(result))
        if before is None or before[0].digest != result.digest:
            self.fetching.want(result, plan)
            return
        del self.replaced[key_of(result)]
        self._keep(*before)
        self.listener.held(result)

    def kept(self) -> list[tuple[PartResult, torch.Tensor]]:
        """All merged parts that are here, also versions that I voted for and a plan replaced."""
        return [*self.parts.values(), *self.replaced.values()]

    async def part(self, result: PartResult) -> torch.Tensor | None:
        """The bytes of a certified part, waited for while it is on its way here and moves.

        None if it does not come, or if other bytes have come.
        """
        key = key_of(result)
        if self.plan is not None and result.round == self.place.round:
            await self.fetching.while_it_comes(key, self.plan)
        for here in (self.parts.get(key), self.replaced.get(key)):
            if here is not None and here[0].digest == result.digest:
                return here[1]
        return None

    # --- what is wanted no more --------------------------------------------------------------

    def copies(self, key: PartKey) -> int:
        """How many encoded copies of a part take memory here, at most."""
        return max(1, self.owning.copies(key)) + (key in self.replaced)

    def drop(self, key: PartKey) -> None:
        """Let go of a part and whatever moves or merges it here, however far that has come."""
        state = self.planned.drop(key)
        if state is not None:
            if state.sending is not None:
                state.sending.cancel()
            if (inflow := state.inflow) is not None:
                state.inflow = inflow.newest = None  # what still comes of it is refused
                if isinstance(inflow, SharedInflow):
                    self.wiring.transport.post(inflow.spoil)
        self.fetching.drop(key)
        self.owning.drop(key)
        self.relaying.forget(key)
        self.replaced.pop(key, None)
        if self.parts.pop(key, None) is not None:
            self.listener.dropped(key)
