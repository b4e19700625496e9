"""Moving the tensors of one round: slices to the owners, merged parts to everybody.

The driver side of a :class:`~protocols.messages.Plan`. A contributor streams its slice of every
part to the part's owner (:mod:`gossip.exchange.outbox`); an owner merges chunk by chunk and streams
what is merged to every member (:mod:`gossip.exchange.owning`); the others receive the part, or pull
it from any member that holds it (:mod:`gossip.exchange.merged_parts`). So a chunk is on its way out
while the next ones come in. A later plan of the same round changes only what it has to: transfers
it still wants go on.

Results are reported to a :class:`~gossip.exchange.listener.ExchangeListener`: a part is held, a
peer did not deliver, nobody has a merged part any more, the slices of a draft are weighed
(:mod:`gossip.plans.weighing`).
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import InitVar, dataclass, field

import torch

from gossip.exchange.buffers import Whole
from gossip.exchange.incoming_slices import IncomingSlices
from gossip.exchange.listener import ExchangeListener
from gossip.exchange.merged_parts import MergedParts
from gossip.exchange.outbox import Outbox
from gossip.exchange.owning import Owning
from gossip.exchange.part_states import PartState, PartStates, Via
from gossip.exchange.relaying import Relaying
from gossip.exchange.retaining import Retention, keys_of
from gossip.exchange.routing import Routes
from gossip.exchange.slicing import DeltaSource, OwnContribution, shares
from gossip.exchange.transfers import Transfers, header_of
from gossip.place import Place
from gossip.plans.certificate import basis_of
from gossip.plans.dividing import in_turn
from gossip.plans.validity import PartKey, Shape, key_of
from gossip.wiring import Wiring
from protocols.identity import PeerId
from protocols.messages import Certificate, PartResult, Plan


@dataclass
class Exchange:
    """The transfers of one round at one member.

    By what is moved: ``outbox`` sends this member's slices, ``slices`` takes those of others,
    ``owning`` merges them into parts for everybody and ``relaying`` adds them up for a group;
    ``merged`` has the merged parts, wherever they came from.
    """

    wiring: Wiring
    place: Place
    shape: Shape
    source: DeltaSource
    listener: ExchangeListener
    withheld: InitVar[bool] = False  # my contribution is not ready before :meth:`prepare`
    sent: bool = False  # a plan has asked for my contribution, and some of it may have come
    joint: frozenset[bytes] = frozenset()  # what goes through the newest plan's relays is named by
    merged: MergedParts = field(init=False)
    slices: IncomingSlices = field(init=False)
    owning: Owning = field(init=False)
    relaying: Relaying = field(init=False)
    outbox: Outbox = field(init=False)
    _transfers: Transfers = field(init=False)
    _planned: PartStates = field(init=False)
    _own: OwnContribution = field(init=False)
    _retention: Retention = field(init=False)

    def __post_init__(self, withheld: bool) -> None:
        self._retention = Retention(self.shape.size)
        self._transfers = moved = Transfers(self.wiring)
        self._planned = planned = PartStates(moved)
        listener, me = self.listener, self.me  # not self: a cycle would keep parts in memory
        self._own = own = OwnContribution(
            self.wiring,
            self.shape,
            self.source,
            lambda error: listener.refused(me, error),
            withheld,
        )
        shunned: set[PeerId] = set()  # relays that took no slice
        whole = Whole(self.shape.size)
        collecting = (self.wiring, moved, own, listener, whole, self.shape.mix)
        self.relaying = relaying = Relaying(*collecting)
        self.merged = merged = MergedParts(
            self.wiring,
            self.place,
            self.shape,
            moved,
            planned,
            relaying,
            listener,
            whole,
            shunned,
        )
        self.owning = Owning(*collecting, merged.hold)
        self.slices = IncomingSlices(planned, self.owning, relaying)
        self.outbox = Outbox(
            self.place, moved, planned, own, relaying, listener, merged.held, shunned
        )

    @property
    def round(self) -> int:
        """The number of the round."""
        return self.place.round

    @property
    def me(self) -> PeerId:
        return self.wiring.identity.peer_id

    @property
    def plan(self) -> Plan | None:
        """The newest plan that is worked on."""
        return self.merged.plan

    @property
    def parts(self) -> dict[PartKey, tuple[PartResult, torch.Tensor]]:
        """The merged parts that are here, with their bytes as they were encoded."""
        return self.merged.held

    def certified(self, certificate: Certificate) -> dict[tuple[int, int], torch.Tensor] | None:
        """The parts that a certificate names, by start and stop; None where one is not here."""
        named = {(key_of(r), r.digest) for r in certificate.outcome.parts if r.digest}
        found = {
            (result.start, result.stop): data
            for result, data in self.merged.kept()
            if (key_of(result), result.digest) in named
        }
        return found if len(found) == len(named) else None

    @property
    def bytes_sent(self) -> int:
        """Bytes of slices and merged parts given to the transport."""
        return self._transfers.bytes_sent

    @property
    def elements_sent(self) -> int:
        """Elements that :attr:`bytes_sent` decode to."""
        return self._transfers.elements_sent

    @property
    def bytes_received(self) -> int:
        """Bytes of slices and merged parts that came."""
        return self._transfers.bytes_received

    @property
    def offered(self) -> bool:
        """My contribution was said to be ready: any plan of the round may ask for it."""
        return not self._own.withheld

    @property
    def closed(self) -> bool:
        """The round is over here."""
        return self._transfers.closed

    def prepare(self, norm: float = 0.0) -> None:
        """My contribution is ready: check it now, so that no plan has to wait for that.

        ``norm`` is its L2 norm, where that is known.
        """
        self._own.withheld = False
        self._own.known(norm)
        self._transfers.start(self._prepare())

    async def _prepare(self) -> None:
        await self._own.is_sound()

    def work(self, plan: Plan) -> None:
        """Start what this plan asks of me and is not under way; nothing once the round is over.

        Of what earlier plans have asked for, only as much as one plan moves is kept.
        """
        if self.closed:
            return
        self.merged.plan, basis = plan, basis_of(plan.codec, plan.contributors)
        active = any(c.peer == self.me and c.active for c in plan.contributors)
        contributes = active and self.me in shares(plan.contributors)
        self.sent = self.sent or (contributes and not self._own.withheld)
        holders = {(gram.start, gram.stop, gram.owner) for gram in plan.grams}  # have all slices
        self.merged.watches.stop()
        self.owning.answer_for(plan.grams)  # first: below, parts are merged or dropped
        wanted: set[PartKey] = set()
        routes = Routes(plan)
        self.joint = routes.joint
        for number in in_turn([part.owner for part in plan.parts], self.me):
            part = plan.parts[number]
            if part.result is not None:
                self.merged.want(part.result, plan)
                continue
            key = (part.start, part.stop, part.owner, basis)
            wanted.add(key)
            again = key in self._planned  # the owner may have some of my slice
            state = self._planned.add(key, plan)
            if part.owner == self.me:
                header = header_of(self.place, key, plan)
                self.relaying.drop(key)
                paths = routes.paths(number)
                for joint in paths.joint:
                    self._planned.stand_in(self.me, state, joint)
                self.owning.work(key, header, plan, paths)
            elif key not in self.parts:
                mine = contributes and key[:3] not in holders
                self._follow(state, routes, number, contributes=mine, again=again)
        self.outbox.stop_but(wanted)  # taken over by another owner, or merged already
        self._let_go(plan)
        self._transfers.start(self._planned.announce())

    def _let_go(self, plan: Plan) -> None:
        """Free parts that the plan does not ask for, except those that may be needed again."""
        keys = keys_of(plan)
        self._retention.ask(keys)
        for key in self._retention.excess(set(keys), self.listener.needed(), self._copies):
            self._drop(key)

    def _copies(self, key: PartKey) -> int:
        """How many encoded copies of a part take memory here, at most."""
        return max(1, self.owning.copies(key)) + (key in self.merged.replaced)

    def _drop(self, key: PartKey) -> None:
        """Let go of a part and whatever moves or merges it here, however far that has come."""
        state, inflow = self._planned.drop(key), None
        if state is not None:
            if state.sending is not None:
                state.sending.cancel()
            inflow, state.inflow = state.inflow, None
        self.merged.drop(key, inflow)
        self.owning.drop(key)
        self.relaying.forget(key)

    def _follow(
        self, state: PartState, routes: Routes, number: int, *, contributes: bool, again: bool
    ) -> None:
        """Handle a part that another member merges: send it my slice, expect the merged part."""
        plan = state.plan
        relay = routes.relay_of(self.me, number) if plan.groups else None
        if relay != self.me:
            self.relaying.drop(state.key)  # an earlier plan may have had me collect it
        via = self._relay(state, relay, routes) if relay else None
        if state.via not in (None, via):  # it is not my relay any more, or has another group
            self.outbox.detach(state)
        with_sum = self.relaying.collects(state.key)
        running = state.sending
        # the owner may have dropped what came for a draft, or merged it by another plan; and in a
        # later epoch it may have restarted since, and have lost what it was sent
        asks = plan.draft or plan.epoch > 0
        idle = running is None or (asks and running.done())
        if contributes and not with_sum and idle:
            self.outbox.send(state, via, ask=again)
        elif contributes and via is not None and state.via is None:
            self.outbox.decline(state, via)
        state.passing = None if relay == self.me else relay
        if not plan.draft:  # else its owner has nothing to give yet
            self.merged.watches.watch(state, plan)

    def _relay(self, state: PartState, relay: PeerId, routes: Routes) -> Via | None:
        """Relay a part, or note who does; returns who is to get my slice instead of the owner."""
        errand = routes.through(relay)
        self._planned.stand_in(relay, state)
        if relay != self.me:
            return Via(relay, errand.joint) if self.me in errand.brought else None
        state.passed_on = errand.passed_on
        if errand.brought:
            self._planned.stand_in(relay, state, errand.joint)
            header = header_of(self.place, state.key, state.plan)
            named = dataclasses.replace(header, basis=errand.joint)
            self.relaying.collect(state.key, named, state.plan, errand.brought)
        else:
            self.relaying.drop(state.key)
        return None

    async def stop(self) -> None:
        """The round is over here: wait for nothing more, and do not read the source any more.

        Transfers to others that are under way go on.
        """
        self._transfers.closed = True
        merged = self.merged
        ended = [*self.outbox.stop_but(()), *merged.watches.stop(), *merged.fetching.stop()]
        self.owning.stop()
        self.relaying.stop()
        await self._planned.announce()
        if ended:
            await asyncio.wait(ended)
        for state in self._planned.all():  # nobody judges their pace any more
            if state.inflow is not None and state.key not in merged.held:
                merged.refuse(state.inflow)
        self._planned.clear()
        await self.owning.stopped()
        await self.relaying.stopped()
        await self._own.stop()
