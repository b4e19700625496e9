"""The merged parts of one round that are here or come in, and the bytes that were voted for.

A merged part comes from its owner or its relay, is fetched from whoever holds it
(:mod:`gossip.exchange.fetching`), or was merged here. One that does not come although it could is
watched for (:mod:`gossip.exchange.watches`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch

from gossip.exchange.bodies import chunk_at, result_from, trailer_size
from gossip.exchange.buffers import Whole
from gossip.exchange.fetching import Fetching
from gossip.exchange.lateness import merged_patience_s
from gossip.exchange.listener import ExchangeListener
from gossip.exchange.part_states import ANSWER_S, PLAN_WAIT_S, PartState, PartStates
from gossip.exchange.receiving import Inflow, PartDrain
from gossip.exchange.relaying import Relaying, SharedInflow
from gossip.exchange.transfers import Transfers, check_length
from gossip.exchange.watches import Watches
from gossip.place import Place
from gossip.plans.certificate import check_result
from gossip.plans.validity import PartKey, Shape, check_statement, fixes, key_of
from gossip.wiring import Wiring
from protocols.errors import Malformed, RemoteProtocolError, RemoteRefused
from protocols.identity import PeerId
from protocols.messages import PartResult, Plan, TransferHeader
from protocols.transport import Incoming


@dataclass
class MergedParts:
    """The merged parts of one exchange. ``whole`` has room for them; ``shunned`` are relays that
    are of no use."""

    wiring: Wiring
    place: Place
    shape: Shape
    transfers: Transfers
    planned: PartStates
    relaying: Relaying
    listener: ExchangeListener
    whole: Whole
    shunned: set[PeerId]
    held: dict[PartKey, tuple[PartResult, torch.Tensor]] = field(default_factory=dict)
    # parts that I voted for, and of which a later plan names other bytes of the same owner
    replaced: dict[PartKey, tuple[PartResult, torch.Tensor]] = field(default_factory=dict)
    plan: Plan | None = None  # the newest that is worked on
    watches: Watches = field(init=False)
    fetching: Fetching = field(init=False)

    def __post_init__(self) -> None:
        moved, me = self.transfers, self.wiring.identity.peer_id
        told, held, planned = self.listener, self.held, self.planned
        self.watches = Watches(moved, told, self.place, held, self.shunned)
        self.fetching = Fetching(moved, told, me, held, planned, self.whole, self.hold)

    async def on_merged(self, sender: PeerId, header: TransferHeader, incoming: Incoming) -> bytes:
        """Take a merged part from its owner or its relay.

        Raises RemoteProtocolError or RemoteRefused: ``again`` also where the bytes of several
        together are wrong, since nobody can say whose are; then one has to give all of it.
        """
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

        first = chunk_at(self.wiring.codec, header)
        drain = PartDrain(inflow, first, trailer_size(len(plan.contributors)), finish)
        check_length(incoming, drain)  # before others hear of it, and what is here stays
        if isinstance(inflow, SharedInflow):
            assert state.passed_on is not None
            self.relaying.pass_on(state.key, header, plan, inflow, state.passed_on)
        patience = merged_patience_s(plan.patience_s, plan.expected_s)
        state.straight |= sender == owner
        inflow.givers.add(sender)
        inflow.open += 1
        try:
            await self.transfers.receive(sender, header, incoming, drain, patience)
        except RemoteProtocolError as error:
            if state.inflow is inflow:  # what has come of it is discarded
                state.inflow = None
                if isinstance(inflow, SharedInflow):
                    self.wiring.transport.post(inflow.spoil)
            if len(inflow.givers) > 1:
                raise RemoteRefused("again", "what came from several does not fit") from error
            raise
        finally:
            inflow.open -= 1
        if sender == state.passing:
            state.passing = None
        self.hold(found[0], inflow.data)
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
        """Where the part stands that its owner, or the relay for it, refers to.

        Once the owner gives it itself the relay could only be in its way: RemoteRefused ``late``.
        """
        state = await self.planned.until((header.start, header.stop, sender, header.basis), wait)
        if state.straight and sender != state.key[2]:
            raise RemoteRefused("late", "its owner gives it itself")
        return state

    def _inflow(self, state: PartState) -> Inflow:
        start, stop, *_ = state.key
        if state.key in self.held:
            raise RemoteRefused("late", "held already")
        if state.inflow is None:
            codec = self.wiring.codec.named(state.plan.codec)
            kind = Inflow if state.passed_on is None else SharedInflow
            state.inflow = kind(codec, start, stop, self.whole)
        return state.inflow

    def hold(self, result: PartResult, data: torch.Tensor) -> None:
        """Keep a part: the first version that comes, or the one that the plan names."""
        key = key_of(result)
        if self.transfers.closed or (key in self.held and not fixes(self.plan, result)):
            return
        if self.planned.get(key) is None and key not in self.fetching:
            return  # it was let go of meanwhile
        self._keep(result, data)
        if (state := self.planned.get(key)) is not None:
            relay, state.passing, state.inflow = state.passing, None, None
            if relay is not None and relay not in self.listener.mute():  # else it had no time to
                self.listener.unpassed(relay)
        self.fetching.news.set()
        self.fetching.news.clear()
        self.listener.held(result)

    def _keep(self, result: PartResult, data: torch.Tensor) -> None:
        """Store a part. A version that I voted for stays beside it: it may be decided already."""
        key = key_of(result)
        before = self.held.get(key)
        if before is not None and self.listener.voted_for(before[0]):
            self.replaced[key] = before
        self.held[key] = (result, data)

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
        return [*self.held.values(), *self.replaced.values()]

    async def part(self, result: PartResult) -> torch.Tensor | None:
        """The bytes of a certified part, waited for while it is on its way here and moves.

        None if it does not come, or if other bytes have come.
        """
        key = key_of(result)
        if self.plan is not None and result.round == self.place.round:
            await self.fetching.while_it_comes(key, self.plan)
        for here in (self.held.get(key), self.replaced.get(key)):
            if here is not None and here[0].digest == result.digest:
                return here[1]
        return None

    def refuse(self, inflow: Inflow) -> None:
        """Take no more of what still comes of a part, and pass no more of it on."""
        inflow.wanted = False
        if isinstance(inflow, SharedInflow):
            self.wiring.transport.post(inflow.spoil)

    def drop(self, key: PartKey, inflow: Inflow | None) -> None:
        """Let go of a part, and of the ``inflow`` that there is of it."""
        if inflow is not None:
            self.refuse(inflow)
        self.fetching.drop(key)
        self.replaced.pop(key, None)
        if self.held.pop(key, None) is not None:
            self.listener.dropped(key)
