"""Moving the tensors of one round: slices to the owners, merged parts to everybody.

The driver side of a :class:`~protocols.messages.Plan`. A contributor streams its slice of every
part to the part's owner; an owner merges chunk by chunk and streams what is merged to every member
(:mod:`gossip.owning`); what is merged already is pulled from whoever holds it. So a chunk is on its
way out while the next ones come in. A later plan of the same round changes only what it has to:
transfers it still wants go on.

Results are reported to a :class:`Listener`: a part is held, a peer did not deliver, a merged
part is not to be had any more, the slices of a draft are weighed (:mod:`gossip.weighing`).
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field
from typing import Protocol

import torch

from gossip.bodies import Wiring as Wiring  # an exchange is made from it
from gossip.bodies import chunk_at, result_from, trailer_size
from gossip.buffers import Whole
from gossip.certificate import basis_of, check_result
from gossip.fetching import Fetching
from gossip.owning import Owning
from gossip.planned import Planned
from gossip.receiving import Inflow, PartDrain
from gossip.relaying import Relaying, SharedInflow
from gossip.routing import Routes
from gossip.slicing import OwnContribution, SliceFeed, Source, WantsMerged, shares
from gossip.transfers import Transfers, header_of
from gossip.validity import PartKey, Place, Shape, check_statement, fixes, key_of
from gossip.watches import Watches
from protocols.errors import Malformed, RemoteProtocolError, RemoteRefused, TransportError
from protocols.identity import PeerId
from protocols.messages import Gram, PartResult, Plan, Transfer
from protocols.transport import Incoming

UNBLAMED = ("late", "unfit")  # refusals of a slice that do not speak against the owner


class Listener(Protocol):
    """Who is told what happens."""

    def held(self, result: PartResult) -> None: ...
    def fault(self, peer: PeerId, why: str) -> None: ...
    def declined(self, peer: PeerId, why: str) -> None: ...  # what I have sent it
    def lost(self, result: PartResult) -> None: ...
    def refused(self, peer: PeerId, why: str) -> None: ...
    def weighed(self, gram: Gram) -> None: ...
    def behind(self, peer: PeerId) -> bool: ...


@dataclass
class Exchange:
    """The transfers of one round at one member.

    Everything is looked up by its part (range, owner, basis). Where the plan has groups a part's
    relay stands in for its owner: ``_vias`` says to whom my slice goes instead, ``_named`` which
    part is meant by who passes it on, ``_passed`` whom I pass it on to.
    """

    wiring: Wiring
    place: Place
    shape: Shape
    source: Source
    listener: Listener
    plan: Plan | None = None
    parts: dict[PartKey, tuple[PartResult, torch.Tensor]] = field(default_factory=dict)
    _planned: Planned = field(init=False)
    _transfers: Transfers = field(init=False)
    _own: OwnContribution = field(init=False)
    _owning: Owning = field(init=False)
    _relaying: Relaying = field(init=False)
    _vias: dict[PartKey, PeerId] = field(default_factory=dict)  # relays that get my slices
    _named: dict[PartKey, PartKey] = field(default_factory=dict)  # parts as if of their relays
    _shunned: set[PeerId] = field(default_factory=set)  # relays that took no slice
    _passed: dict[PartKey, tuple[PeerId, ...]] = field(default_factory=dict)  # to whom, by me
    _whole: Whole = field(init=False)
    _inflows: dict[PartKey, Inflow] = field(default_factory=dict)
    _slices: dict[PartKey, asyncio.Task[None]] = field(default_factory=dict)
    _watches: Watches = field(init=False)
    _fetching: Fetching = field(init=False)

    def __post_init__(self) -> None:
        self._transfers = Transfers(self.wiring)
        self._planned = Planned(self._transfers)
        wanted = self.source.merged if isinstance(self.source, WantsMerged) else None
        self._whole = Whole(self.shape.size, wanted)
        listener, me = self.listener, self.me  # not self: no parts are to wait for the collector
        self._own = OwnContribution(
            self.wiring, self.shape, self.source, lambda why: listener.refused(me, why)
        )
        self._owning = Owning(
            self.wiring,
            self._transfers,
            self._own,
            self.listener,
            self._hold,
            self._whole,
            self.shape.mix,
            self.listener.weighed,
        )
        self._relaying = Relaying(
            self.wiring,
            self._transfers,
            self._own,
            self.listener,
            lambda result, data: None,
            self._whole,
            self.shape.mix,
            self.listener.weighed,
            fault=self.listener.fault,
        )
        moved, parts, inflows = self._transfers, self.parts, self._inflows
        self._watches = Watches(moved, listener, self.place, parts, inflows, self._shunned)
        self._fetching = Fetching(moved, listener, me, parts, inflows, self._whole, self._hold)

    @property
    def round(self) -> int:
        """The number of the round."""
        return self.place.round

    @property
    def me(self) -> PeerId:
        return self.wiring.identity.peer_id

    @property
    def bytes_sent(self) -> int:
        """Bytes of slices and merged parts given to the transport."""
        return self._transfers.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes of slices and merged parts that came."""
        return self._transfers.bytes_received

    @property
    def closed(self) -> bool:
        """The round is over here."""
        return self._transfers.closed

    # --- by the plan -------------------------------------------------------------------------

    def prepare(self, norm: float = 0.0) -> None:
        """My contribution is ready: look at it now, so that it need not be done under a plan.

        ``norm`` is its L2 norm, where that is known.
        """
        self._own.known(norm)
        self._transfers.start(self._prepare())

    async def _prepare(self) -> None:
        await self._own.is_sound()

    def work(self, plan: Plan) -> None:
        """Start whatever this plan asks of me and is not under way yet; nothing once it is over."""
        if self.closed:
            return
        self.plan, basis = plan, basis_of(plan.codec, plan.contributors)
        active = any(c.peer == self.me and c.active for c in plan.contributors)
        contributes = active and self.me in shares(plan.contributors)
        holders = {(gram.start, gram.stop, gram.owner) for gram in plan.grams}  # of all slices
        self._watches.stop()
        wanted: set[PartKey] = set()
        routes = Routes(plan)
        others = sorted(enumerate(plan.parts), key=lambda n: (n[1].owner <= self.me, n[1].owner))
        for number, part in others:  # start behind myself, so that not all send to one owner first
            if part.result is not None:
                self._fetching.want(part.result, plan)
                continue
            key = (part.start, part.stop, part.owner, basis)
            again = key in self._planned  # some of my slice may be there
            self._planned[key] = plan
            self._named.pop(key, None)
            wanted.add(key)
            if part.owner == self.me:
                self._relaying.drop(key)
                self._owning.work(key, header_of(self.place, key, plan), plan, routes.paths(number))
            elif key not in self.parts:
                relay = routes.relay_of(self.me, number) if plan.groups else None
                via = self._relay(key, plan, relay, routes, number) if relay else None
                if self._vias.get(key) not in (None, via):  # it relays no more
                    self._straight(key)
                if self._relaying.collects(key):
                    contributed = contributes  # with the sum
                else:
                    contributed = key in self._slices or key[:3] in holders
                if contributes and not contributed:
                    sending = self._send_slice(key, plan, via, ask=again)
                    self._slices[key] = self._transfers.start(sending)
                if not plan.draft:  # else its owner has nothing to give yet
                    passing = None if relay == self.me else relay
                    self._watches.watch(key, plan, passing)
        for key, task in self._slices.items():
            if key not in wanted:  # taken over by another owner, or merged already
                task.cancel()
        self._transfers.start(self._planned.announce())

    def _relay(
        self, key: PartKey, plan: Plan, relay: PeerId, routes: Routes, number: int
    ) -> PeerId | None:
        """Relay a part, or note who does; returns who is to get my slice instead of the owner."""
        brought, passed_on = routes.through(number, relay)
        named = (*key[:2], relay, key[3])
        self._planned[named] = plan
        if relay == self.me:
            self._passed[key] = passed_on
            if brought:
                self._relaying.collect(key, header_of(self.place, key, plan), plan, brought)
            return None
        self._named[named] = key
        return relay if self.me in brought else None

    def _straight(self, key: PartKey) -> None:
        """What of my slice has not come through its relay is to go to the owner."""
        self._vias.pop(key, None)
        running = self._slices.pop(key, None)
        if running is not None:
            running.cancel()

    async def stop(self) -> None:
        """The round is over here: wait for nothing more, and leave the source alone.

        What others still receive goes on.
        """
        self._transfers.closed = True
        ended = [*self._slices.values(), *self._watches.stop(), *self._fetching.stop()]
        for task in self._slices.values():
            task.cancel()
        self._owning.stop()
        self._relaying.stop()
        await self._planned.announce()
        if ended:
            await asyncio.wait(ended)
        self._slices.clear()
        self._inflows.clear()
        await self._owning.stopped()
        await self._relaying.stopped()
        await self._own.stop()

    # --- slices ------------------------------------------------------------------------------

    async def _send_slice(
        self, key: PartKey, plan: Plan, via: PeerId | None = None, *, ask: bool = False
    ) -> None:
        """Send my slice to a part's owner, or to the relay ``via``; ``ask`` how much it has."""
        start, stop, owner, _ = key
        codec, header = self.wiring.codec.named(plan.codec), header_of(self.place, key, plan)
        to = via or owner
        if via is not None:
            self._vias[key] = via

        async def push(*, everything: bool) -> None:
            def feed(first: int) -> SliceFeed:
                return SliceFeed(codec, self.source, start, stop, first if everything else None)

            await self._transfers.push(to, "slice", header, feed, plan.patience_s, ask=ask)

        try:
            try:
                await push(everything=await self._own.is_sound())
            except ValueError as error:  # it is not any more what it was when it was looked at
                self.listener.refused(self.me, f"own pseudo-gradient: {error}")
                await push(everything=False)
        except (TransportError, RemoteProtocolError) as error:
            harmless = isinstance(error, RemoteRefused) and error.code in UNBLAMED
            if not harmless and key not in self.parts and not self.closed:
                if via is None and isinstance(error, RemoteRefused):
                    self.listener.declined(owner, f"wants no slice: {error}")
                    return
                if via is None:
                    self._slices.pop(key, None)  # to be sent again by a later plan
                    self.listener.fault(owner, f"took no slice: {error}")
                    return
                # that may be the link alone, and its owner can have it from me: nobody is blamed
                self.listener.refused(via, f"took no slice for its group: {error}")
                self._shunned.add(via)
                self._vias.pop(key, None)
                await self._send_slice(key, plan, ask=True)

    async def on_slice(self, sender: PeerId, header: Transfer, incoming: Incoming) -> bytes:
        """Take a contributor's slice. Raises RemoteRefused ``late`` when it is not wanted."""
        await self._planned.until((header.start, header.stop, self.me, header.basis))
        await self._merging(header).take(sender, header, incoming)
        return b""

    async def slice_reached(self, sender: PeerId, header: Transfer) -> bytes:
        """How much of the sender's slice is here. Raises RemoteRefused ``late``."""
        await self._planned.until((header.start, header.stop, self.me, header.basis))
        return self._merging(header).reached(sender, header).encode()

    def _merging(self, header: Transfer) -> Owning:
        return self._relaying if self._relaying.collects_range(header) else self._owning

    # --- through relays ----------------------------------------------------------------------

    async def on_sum(self, sender: PeerId, header: Transfer, incoming: Incoming) -> bytes:
        """Take the sum of a group from its relay. Raises RemoteRefused ``late``."""
        await self._planned.until((header.start, header.stop, self.me, header.basis))
        await self._owning.take_sum(sender, header, incoming)
        return b""

    async def sum_reached(self, sender: PeerId, header: Transfer) -> bytes:
        """How much of a group's sum is here. Raises RemoteRefused ``late``."""
        await self._planned.until((header.start, header.stop, self.me, header.basis))
        return self._owning.sum_reached(sender, header).encode()

    async def bring(self, sender: PeerId, header: Transfer) -> bytes:
        """The owner of a part waits for my relay no more, and asks for my slice itself."""
        key = (header.start, header.stop, sender, header.basis)
        plan = await self._planned.until(key)
        counts = any(c.peer == self.me and c.active for c in plan.contributors)
        known = key in self._slices and key not in self._vias  # it is on its way there already
        if counts and plan.groups and key not in self.parts and not known:
            relay, running = self._vias.get(key), self._slices.get(key)
            if relay is not None and running is not None and not running.done():
                self._shunned.add(relay)  # it takes nothing: so nothing will come from it either
            self._relaying.drop(key)
            self._straight(key)
            self._slices[key] = self._transfers.start(self._send_slice(key, plan, ask=True))
        return b""

    async def give(self, sender: PeerId, header: Transfer) -> bytes:
        """A member asks for a part of mine that its relay does not pass on."""
        await self._planned.until((header.start, header.stop, self.me, header.basis))
        self._owning.give(sender, header)
        return b""

    # --- merged parts ------------------------------------------------------------------------

    async def on_merged(self, sender: PeerId, header: Transfer, incoming: Incoming) -> bytes:
        """Take a merged part from its owner. Raises RemoteProtocolError or RemoteRefused."""
        key = await self._part_from(sender, header)
        inflow = await self._inflow(key)
        plan, place, shape = self._planned[key], self.place, self.shape
        if header.codec != plan.codec:
            raise Malformed("a part in another codec than planned")
        found: list[PartResult] = []

        def finish(trailer: bytes) -> None:
            result = result_from(header, key[2], trailer)
            check_statement(result, place, shape)
            inflow.check_digest(result.digest)
            check_result(place.run, result)
            found.append(result)
            if isinstance(inflow, SharedInflow):
                inflow.end(trailer)

        if isinstance(inflow, SharedInflow):
            self._relaying.pass_on(key, header, plan, inflow, self._passed[key])
        first = chunk_at(self.wiring.codec, header)
        drain = PartDrain(inflow, first, trailer_size(len(plan.contributors)), finish)
        try:
            await self._transfers.receive(sender, header, incoming, drain)
        except RemoteProtocolError:
            if self._inflows.get(key) is inflow:  # what is here of it is worth nothing
                del self._inflows[key]
                if isinstance(inflow, SharedInflow):
                    self.wiring.transport.post(inflow.spoil)
            raise
        self._hold(found[0], inflow.data)
        return b""

    async def merged_reached(self, sender: PeerId, header: Transfer) -> bytes:
        """How much of a part is here that the sender merged. Raises RemoteRefused ``late``."""
        inflow = await self._inflow(await self._part_from(sender, header))
        return dataclasses.replace(header, done=inflow.elements).encode()

    async def _part_from(self, sender: PeerId, header: Transfer) -> PartKey:
        """Which part its owner, or the relay for it, is talking of."""
        key = (header.start, header.stop, sender, header.basis)
        await self._planned.until(key)
        return self._named.get(key, key)

    async def _inflow(self, key: PartKey) -> Inflow:
        if key in self.parts:
            raise RemoteRefused("late", "held already")
        if key not in self._inflows:
            codec = self.wiring.codec.named(self._planned[key].codec)
            kind = SharedInflow if key in self._passed else Inflow
            self._inflows[key] = kind(codec, key[0], key[1], self._whole)
        return self._inflows[key]

    def _hold(self, result: PartResult, data: torch.Tensor) -> None:
        """Keep a part, the first that comes, or the one that the plan says it is."""
        key = key_of(result)
        if not self.closed and (key not in self.parts or fixes(self.plan, result)):
            self.parts[key] = (result, data)
            self._inflows.pop(key, None)
            self.listener.held(result)
