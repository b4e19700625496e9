"""The parts that this member merges: slices in, merged chunks out to everybody, as they come.

How slices come in is :mod:`gossip.exchange.collecting`. Here is what only an owner does: weigh the
slices of a draft, take the sums of groups in place of slices, sign the result and send it to all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from gossip.exchange.auditing import Shown
from gossip.exchange.bodies import chunk_at, result_of, trailer_of, trailer_size
from gossip.exchange.collected import CollectedPart
from gossip.exchange.collecting import Collecting, on_loop
from gossip.exchange.feeds import MergedFeed
from gossip.exchange.fetching import keep_nothing
from gossip.exchange.group_sums import JointMerge
from gossip.exchange.kept_slices import ColumnMerge, WeighedMerge
from gossip.exchange.lateness import Lateness, merged_patience_s, relay_patience_s
from gossip.exchange.merging import PartMerge
from gossip.exchange.routing import STRAIGHT, Paths
from gossip.exchange.slicing import shares
from gossip.plans.certificate import sign_result
from gossip.plans.grouping import joint_basis
from gossip.plans.validity import PartKey
from gossip.plans.weighing import draft_basis, gram_of
from protocols.counts import pack_counts
from protocols.errors import (
    Malformed,
    RemoteProtocolError,
    RemoteRefused,
    Stale,
    TransferStalled,
    TransportError,
)
from protocols.identity import PeerId
from protocols.messages import Gram, PartResult, Plan, TransferHeader
from protocols.transport import Incoming


@dataclass
class Owning(Collecting):
    """All parts of one round that this member merges; ``held`` gets each when it is merged."""

    held: Callable[[PartResult, torch.Tensor], None]
    # not merged again: the bytes might differ, and all count on one result for each part
    _ended: set[PartKey] = field(default_factory=set)
    shown: dict[tuple[int, int], Shown] = field(default_factory=dict)  # of what I have weighed

    def work(
        self, key: PartKey, header: TransferHeader, plan: Plan, paths: Paths = STRAIGHT
    ) -> None:
        """As :meth:`Collecting.work`; what was collected for a draft is merged by its plan."""
        if not plan.draft and self.mix.weigh is not None:
            self._merge_drafted(key, header, plan)
        if key not in self._ended:
            super().work(key, header, plan, paths)

    def copies(self, key: PartKey) -> int:
        """How many encoded copies of a part that I merge take memory, at most."""
        part = self._parts.get(key)
        return 0 if part is None else part.merge.copies

    def drop(self, key: PartKey) -> None:
        """Merge this part no more, and send it to nobody.

        A part that was only weighed for a draft may be asked for again: none of it is merged.
        """
        part = self._end(key)
        if part is not None and not part.drafted:
            self._ended.add(key)

    async def stopped(self) -> None:
        """As :meth:`Collecting.stopped`."""
        await super().stopped()
        self.held = keep_nothing

    # --- drafts ----------------------------------------------------------------------------------

    def _merge_drafted(self, key: PartKey, header: TransferHeader, plan: Plan) -> None:
        """Merge the slices that came for this plan's draft, if all are here, and only once.

        In between the part may have had another owner, who got slices that I have not.
        """
        before = (*key[:3], draft_basis(plan.codec, plan.contributors))
        part = self._parts.get(before)
        if part is None or not part.drafted or key in self._ended:
            return
        if self._parts.get(key, part) is not part:  # merged for an earlier plan with these scales
            return
        merge, counted = part.merge, shares(plan.contributors)
        assert isinstance(merge, WeighedMerge)
        del self._parts[before]
        if part.gram is None or not counted.keys() <= merge.seals.keys():
            self._abandon(part)
            return
        part.key, part.header, part.drafted = key, header, False
        self._parts[key] = part
        scales = {c.peer: c.scale for c in plan.contributors}
        coefficients = {peer: share * scales[peer] for peer, share in counted.items()}
        self.wiring.transport.post(lambda: merge.merge_with(coefficients))

    def _weighed(self, part: CollectedPart) -> Callable[[], None]:
        """All slices of a draft's part are in: returns what reports it. Runs with the data."""
        merge = part.merge
        assert isinstance(merge, WeighedMerge)
        gram = gram_of(self.wiring.identity, part.header, part.plan, merge.seals, merge.products)

        def tell() -> None:
            part.gram = gram
            if part.plan.draft:
                self.listener.weighed(gram)

        return tell

    def answer_for(self, grams: Iterable[Gram]) -> None:
        """Keep the evidence of those of these products that are mine, whoever merges the parts.

        A later plan may have given a part to somebody else; its scales still follow from them.
        """
        mine = {gram.signature for gram in grams if gram.owner == self.me}
        for gram, merge in self._stated():
            if gram.signature in mine:
                self.shown[gram.start, gram.stop] = merge.shown()

    def answer_as_decided(self, basis: bytes) -> None:
        """Keep the evidence of what I weighed under a :func:`~gossip.plans.weighing.draft_basis`.

        The round may be decided before the plan made from my products has come here.
        """
        for gram, merge in self._stated():
            if gram.basis == basis:
                self.shown.setdefault((gram.start, gram.stop), merge.shown())

    def _stated(self) -> Iterator[tuple[Gram, WeighedMerge]]:
        """My stated products of the parts that are still here, each with the part's merge."""
        for part in self._parts.values():
            if part.gram is not None and isinstance(part.merge, WeighedMerge):
                yield part.gram, part.merge

    # --- how a part is merged --------------------------------------------------------------------

    def _begin(
        self, key: PartKey, header: TransferHeader, plan: Plan, expected: set[PeerId], paths: Paths
    ) -> CollectedPart:
        part = super()._begin(key, header, plan, expected, paths)
        if isinstance(part.merge, JointMerge):
            overseer = self._oversee_relays(part, part.merge)
            part.overseers.append(self.transfers.start(overseer))
        return part

    def _renew(self, part: CollectedPart, plan: Plan, paths: Paths) -> None:
        before, after = part.paths.collected, paths.collected
        alone = part.merge.waits_for()
        for relay in before.keys() | after.keys():
            if before.get(relay) == after.get(relay):
                continue
            self._drop(part, relay, _Regrouped("no relay any more, or of another group"))
            # its sums are not taken, so whoever was to come by itself has to do that still
            for peer in alone.intersection(after.get(relay, ())):
                self.transfers.start(self._ask_for(part, peer, regrouped=True))
        super()._renew(part, plan, paths)
        if part.gram is not None and plan.draft:
            self.listener.weighed(part.gram)  # there may be a new leader, which does not have it

    def _merge_for(
        self,
        key: PartKey,
        header: TransferHeader,
        plan: Plan,
        paths: Paths,
        part: Callable[[], CollectedPart],
    ) -> Callable[..., PartMerge]:
        loop = asyncio.get_running_loop()
        if paths.collected:
            return functools.partial(
                JointMerge,
                collected=paths.collected,
                dropped=lambda *dropped: on_loop(loop, lambda: self._dropped(part(), *dropped)),
            )
        order = [c.peer for c in plan.contributors]
        if plan.draft:
            return functools.partial(
                WeighedMerge,
                order=order,
                weighed=lambda: on_loop(loop, self._weighed(part())),
                header=header,
            )
        if self.mix.column is not None:
            return functools.partial(ColumnMerge, order=order, column=self.mix.column)
        return PartMerge

    # --- through relays --------------------------------------------------------------------------

    def sum_reached(self, relay: PeerId, key: PartKey, header: TransferHeader) -> TransferHeader:
        """How much of a group's sum of a part of mine is in. Raises RemoteRefused ``late``."""
        _, merge = self._joint(relay, key, header)
        return dataclasses.replace(header, done=merge.elements_by(relay))

    async def take_sum(
        self, relay: PeerId, key: PartKey, header: TransferHeader, incoming: Incoming
    ) -> None:
        """Take the sum of a group for a part of mine.

        Raises RemoteRefused ``late`` when it is not wanted.
        """
        part, merge = self._joint(relay, key, header)
        if header.codec != part.plan.codec:
            raise Malformed("a sum in another codec than planned")
        if header.done > merge.elements_by(relay):
            raise Malformed("a sum that begins behind what is here")
        drain = merge.sum_drain(relay, chunk_at(self.wiring.codec, header))
        patience = merged_patience_s(part.plan.patience_s, part.plan.expected_s)
        await self.transfers.receive(relay, header, incoming, drain, patience)

    def give(self, peer: PeerId, header: TransferHeader) -> None:
        """A member asks for a part that its relay does not pass on."""
        part = self._parts.get((header.start, header.stop, self.me, header.basis))
        if part is None:
            raise RemoteRefused("late", "not merged here")
        part.asked.add(peer)
        for relay, members in part.paths.passed_on.items():
            if peer in members and 2 * len(part.asked.intersection(members)) > len(members):
                self.listener.unserved(relay)
        if part.merge.merged and peer in part.plan.roster:
            self._send_to(part, peer)

    def _joint(
        self, relay: PeerId, key: PartKey, header: TransferHeader
    ) -> tuple[CollectedPart, JointMerge]:
        part = self._parts.get(key)
        if part is None or not isinstance(part.merge, JointMerge) or not part.merge.brings(relay):
            raise RemoteRefused("late", "this sum is not expected any more")
        # its marks and its divisor are by the group that the relay has it from
        if header.basis != joint_basis(key[3], part.merge.collected[relay]):
            raise RemoteRefused("late", "a sum of another group than is waited for")
        return part, part.merge

    async def _oversee_relays(self, part: CollectedPart, merge: JointMerge) -> None:
        """Drop relays that are too late or stand still."""
        now, plan = self.wiring.now, part.plan
        patience = relay_patience_s(plan.patience_s, plan.expected_s)
        lateness = Lateness(
            now(), patience, plan.expected_s, len(merge.result), what="its group's slice"
        )
        while waiting := merge.waits_for_relays():
            arrived = dict(merge.arrived)
            for relay, why in lateness.late(now(), waiting, arrived, merge.relays_done).items():
                if any(arrived.values()):  # else my own link may be the cause
                    self.listener.unserved(relay)
                self._drop(part, relay, why)
            await asyncio.sleep(plan.patience_s / 8)

    def _drop(self, part: CollectedPart, relay: PeerId, why: RemoteProtocolError) -> None:
        merge = part.merge
        if isinstance(merge, JointMerge):
            self.wiring.transport.post(lambda: merge.drop(relay, why))

    def _dropped(
        self,
        part: CollectedPart,
        relay: PeerId,
        members: tuple[PeerId, ...],
        why: RemoteProtocolError,
    ) -> None:
        """These members' slices no longer come through the relay: ask each for its own."""
        if self.transfers.closed:
            return
        self.listener.refused(relay, why)
        for peer in members:
            regrouped = isinstance(why, _Regrouped)
            self.transfers.start(self._ask_for(part, peer, regrouped=regrouped))
        if members:
            part.overseers.append(self.transfers.start(self._oversee(part, set(members))))

    async def _ask_for(self, part: CollectedPart, peer: PeerId, *, regrouped: bool) -> None:
        """Ask for the slice of a member that sends it to its relay; if it does not answer, give up.

        Where a plan has ``regrouped`` it, that plan may not be there yet: until it is, the member
        has the time that contributors have (:meth:`_oversee`).
        """
        reached, patience = part.merge.reached(peer), part.plan.patience_s
        while True:
            header = dataclasses.replace(part.header, done=part.merge.elements(peer))
            try:
                await self.wiring.transport.call(peer, "bring", header.encode(), timeout=patience)
            except (TransportError, RemoteProtocolError) as error:  # the relay may be one of them
                if part.merge.reached(peer) > reached or peer not in part.merge.waits_for():
                    return
                if regrouped and _without_plan(error):
                    await asyncio.sleep(patience / 8)
                    continue
                self._give_up(part, peer)
                self.listener.refused(peer, RemoteProtocolError.of("does not answer", error))
            return

    # --- the merged part -------------------------------------------------------------------------

    def _seal(self, part: CollectedPart, loop: asyncio.AbstractEventLoop) -> None:
        """The last chunk is merged: state what came out. Runs where data is handled."""
        header, merge = part.header, part.merge
        contributors = part.plan.contributors
        counts = pack_counts([merge.counted(c.peer) for c in contributors])
        unsigned = result_of(header, self.me, merge.digest(), counts)
        result = sign_result(self.wiring.identity, header.run, unsigned)
        merge.seal(trailer_of(result, len(contributors)))
        if isinstance(merge, WeighedMerge):
            self.shown[header.start, header.stop] = merge.shown()
        on_loop(loop, lambda: self.held(result, merge.result))

    def _spread(self, part: CollectedPart) -> None:
        """Stream a part to all whom it is not on its way to, from my successor in the roster on."""
        roster = part.plan.roster
        at = roster.index(self.me) if self.me in roster else 0
        relayed = part.paths.relayed - part.asked
        for peer in roster[at + 1 :] + roster[:at]:
            if peer not in relayed and peer != self.me:
                self._send_to(part, peer)

    def _send_to(self, part: CollectedPart, peer: PeerId) -> None:
        """Stream a part to one member, unless it is on its way there."""
        running = part.sending.get(peer)
        if not self.transfers.closed and (running is None or running.done()):
            part.sending[peer] = self.transfers.start(
                self._send(part, peer, again=running is not None)
            )

    async def _send(self, part: CollectedPart, peer: PeerId, *, again: bool) -> None:
        """Stream a part to a member; one that has not come to this round yet is asked first.

        While it catches up its link is busy, and it could not take this round's parts anyway.
        """
        plan, merge = part.plan, part.merge
        trailer = trailer_size(len(plan.contributors))
        patience = merged_patience_s(plan.patience_s, plan.expected_s)
        try:
            await self.transfers.push(
                peer,
                "merged",
                part.header,
                lambda first: MergedFeed(merge, merge.result, first, trailer),
                patience,
                ask=again or self.listener.behind(peer),
            )
        except (TransportError, RemoteProtocolError):  # if it lives, it fetches it from anybody
            for member in part.paths.passed_on.get(peer, ()):
                if member not in part.asked:
                    part.asked.add(member)
                    self._send_to(part, member)


class _Regrouped(Stale):
    """A newer plan has no such relay, or another group for it."""


def _without_plan(error: Exception) -> bool:
    """Whether it may be that the plan has not come to who was asked, which waits for it."""
    early = isinstance(error, RemoteRefused) and error.code == "early"
    return early or isinstance(error, TransferStalled)
