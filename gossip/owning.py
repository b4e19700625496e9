"""The parts that this member merges: slices in, merged chunks out to everybody, as they come.

The work on the numbers is :class:`gossip.merging.PartMerge`, which lives where the transport
handles data. Here, on the event loop, is what happens once a part and not once a chunk: who may
bring a slice, who is given up on and when, who gets the result.

A contributor is given up on when it is dark or much slower than it has announced
(:class:`gossip.lateness.Lateness`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Protocol

import torch

from gossip.auditing import Shown
from gossip.bodies import Wiring, chunk_at, result_of, trailer_of, trailer_size
from gossip.buffers import Whole
from gossip.certificate import sign_result
from gossip.fetching import nobody
from gossip.joining import Dropped, JointMerge, SumDrain
from gossip.judging import ColumnMerge, WeighedMerge
from gossip.lateness import Lateness, merged_patience_s, relay_patience_s
from gossip.merging import MergedFeed, PartMerge
from gossip.mixing import Mix
from gossip.owned import OwnedPart
from gossip.routing import STRAIGHT, Paths
from gossip.slicing import OwnContribution, shares
from gossip.transfers import Transfers
from gossip.validity import PartKey
from gossip.weighing import draft_basis, gram_of
from protocols.counts import pack_counts
from protocols.errors import Malformed, RemoteProtocolError, RemoteRefused, Stale, TransportError
from protocols.identity import PeerId
from protocols.messages import Gram, PartResult, Plan, Transfer
from protocols.transport import Incoming


class Refused(Protocol):
    """Who is told of a contributor that is given up on, and knows who has yet to come."""

    def refused(self, peer: PeerId, error: RemoteProtocolError) -> None: ...
    def behind(self, peer: PeerId) -> bool: ...
    def doubtful(self) -> Set[PeerId]: ...


@dataclass
class Owning:
    """All parts of one round that this member merges; ``held`` gets each when it is merged.

    ``weighed`` gets the inner products of a draft's part, for the draft's leader.
    """

    wiring: Wiring
    transfers: Transfers
    own: OwnContribution
    listener: Refused
    held: Callable[[PartResult, torch.Tensor], None]
    whole: Whole
    mix: Mix
    weighed: Callable[[Gram], None]
    _parts: dict[PartKey, OwnedPart] = field(default_factory=dict)
    # never merged again: it might come out otherwise, and all count on one result for each
    _ended: set[PartKey] = field(default_factory=set)
    shown: dict[tuple[int, int], Shown] = field(default_factory=dict)  # of parts that were weighed

    @property
    def me(self) -> PeerId:
        return self.wiring.identity.peer_id

    def work(self, key: PartKey, header: Transfer, plan: Plan, paths: Paths = STRAIGHT) -> None:
        """Merge this part by the plan, or go on with it; it may expect fewer contributors now."""
        expected = {c.peer for c in plan.contributors if c.active}
        if not plan.draft and self.mix.weigh is not None:
            self._deal(key, header, plan)
        part = self._parts.get(key)
        if part is None:
            if key not in self._ended:
                self._parts[key] = self._begin(key, header, plan, expected, paths)
            return
        for relay in part.paths.collected.keys() - paths.collected.keys():
            self._drop(part, relay, Stale("no relay any more"))
        part.plan, part.paths = plan, paths
        if part.gram is not None and plan.draft:
            self.weighed(part.gram)  # the leader may be another one, and may not have it
        for peer in part.merge.waits_for() - expected:
            self._give_up(part, peer)
        if part.merge.merged:
            self._spread(part)  # not everybody has it, it seems

    def copies(self, key: PartKey) -> int:
        """How many encoded copies of a part that I merge take memory, at most."""
        part = self._parts.get(key)
        return 0 if part is None else part.merge.copies

    def drop(self, key: PartKey) -> None:
        """Merge this part no more, nor give it to anybody.

        One that is only looked at for a draft may be asked for again: nothing of it is merged.
        """
        part = self._end(key)
        if part is not None and not part.judging:
            self._ended.add(key)

    def _end(self, key: PartKey) -> OwnedPart | None:
        """Let go of a part; returns it, if there was one."""
        part = self._parts.pop(key, None)
        if part is None:
            return None
        for task in part.sending.values():
            task.cancel()
        self._abandon(part)
        part.sending.clear()
        part.overseers.clear()  # a cancelled task keeps its frame, and that the part
        return part

    def stop(self) -> None:
        """Merge no more; what is merged already is still sent to whoever is receiving it."""
        for part in self._parts.values():
            if not part.merge.done:
                for task in part.sending.values():
                    task.cancel()
            self._abandon(part)

    async def stopped(self) -> None:
        """After :meth:`stop`: wait until nothing reads the source any more."""
        loop = asyncio.get_running_loop()
        passed = asyncio.Event()
        self.wiring.transport.post(lambda: _tell(loop, passed.set))
        await passed.wait()
        for part in self._parts.values():
            part.overseers.clear()  # a cancelled task keeps its frame, and that the part
        self._parts.clear()
        self.held = nobody

    # --- slices ----------------------------------------------------------------------------------

    def reached(self, sender: PeerId, header: Transfer) -> Transfer:
        """How much of a contributor's slice is in. Raises RemoteRefused ``late``."""
        merge = self._open_to(sender, header).merge
        return dataclasses.replace(header, done=merge.elements(sender))

    async def take(self, sender: PeerId, header: Transfer, incoming: Incoming) -> None:
        """Take a contributor's slice. Raises RemoteRefused ``late`` when it is not wanted."""
        part = self._open_to(sender, header)
        if header.codec != part.plan.codec:
            raise Malformed("a slice in another codec than planned")
        if incoming.length == 0:
            self._give_up(part, sender)
            return
        drain = part.merge.drain(sender, chunk_at(self.wiring.codec, header))
        await self.transfers.receive(sender, header, incoming, drain, part.plan.patience_s)

    def _open_to(self, sender: PeerId, header: Transfer) -> OwnedPart:
        part = self._parts.get((header.start, header.stop, self.me, header.basis))
        if part is None or not part.merge.open_to(sender):
            raise RemoteRefused("late", "this slice is not expected any more")
        if header.done > part.merge.elements(sender):
            raise Malformed("a slice that begins behind what is here")
        return part

    def _deal(self, key: PartKey, header: Transfer, plan: Plan) -> None:
        """Merge what was collected for the draft of this plan, if all is here, and only once.

        Somebody else may have stood for it in between, who got slices that I have not.
        """
        before = (*key[:3], draft_basis(plan.codec, plan.contributors))
        part = self._parts.get(before)
        if part is None or not part.judging or key in self._ended:
            return
        if self._parts.get(key, part) is not part:  # merged for an earlier plan of these scales
            return
        merge, counted = part.merge, shares(plan.contributors)
        assert isinstance(merge, WeighedMerge)
        del self._parts[before]
        if part.gram is None or not counted.keys() <= merge.seals.keys():
            self._abandon(part)
            return
        part.key, part.header, part.judging = key, header, False
        self._parts[key] = part
        scales = {c.peer: c.scale for c in plan.contributors}
        coefficients = {peer: share * scales[peer] for peer, share in counted.items()}
        self.wiring.transport.post(lambda: merge.deal(coefficients))

    def _abandon(self, part: OwnedPart) -> None:
        for overseer in part.overseers:
            overseer.cancel()
        self.wiring.transport.post(part.merge.close)

    def _begin(
        self, key: PartKey, header: Transfer, plan: Plan, expected: set[PeerId], paths: Paths
    ) -> OwnedPart:
        loop = asyncio.get_running_loop()
        limits = {c.peer: self.mix.limit(c, plan.codec) for c in plan.contributors}
        part: OwnedPart
        merge = self._kind(
            key,
            header,
            plan,
            paths,
            lambda: _tell(loop, self._judged(part)),
            lambda *dropped: _tell(loop, lambda: self._dropped(part, *dropped)),
        )(
            self.wiring.codec.named(plan.codec),
            key[0],
            key[1],
            shares=shares(plan.contributors),
            scales={c.peer: c.scale for c in plan.contributors},
            limits={peer: limit for peer, limit in limits.items() if limit is not None},
            expected=expected,
            me=self.me,
            whole=self.whole,
            post=self.wiring.transport.post,
            begun=lambda: _tell(loop, lambda: self._spread(part)),
            finished=lambda: self._seal(part, loop),
        )
        part = OwnedPart(key, header, plan, merge, paths, plan.draft)
        self.transfers.start(self._contribute(part, self.me in expected))
        part.overseers.append(self.transfers.start(self._oversee(part, merge.waits_for())))
        if isinstance(merge, JointMerge):
            part.overseers.append(self.transfers.start(self._oversee_relays(part, merge)))
        return part

    def _kind(
        self,
        key: PartKey,
        header: Transfer,
        plan: Plan,
        paths: Paths,
        judged: Callable[[], None],
        dropped: Dropped,
    ) -> Callable[..., PartMerge]:
        """How a part of this plan is merged."""
        if paths.collected:
            return functools.partial(JointMerge, collected=paths.collected, dropped=dropped)
        order = [c.peer for c in plan.contributors]
        if plan.draft:
            return functools.partial(WeighedMerge, order=order, judged=judged, header=header)
        if self.mix.column is not None:
            return functools.partial(ColumnMerge, order=order, column=self.mix.column)
        return PartMerge

    def _judged(self, part: OwnedPart) -> Callable[[], None]:
        """All slices of a draft's part are in: what to tell. Runs where data is handled."""
        merge = part.merge
        assert isinstance(merge, WeighedMerge)
        gram = gram_of(self.wiring.identity, part.header, part.plan, merge.seals, merge.products)

        def tell() -> None:
            part.gram = gram
            if part.plan.draft:
                self.weighed(gram)

        return tell

    async def _contribute(self, part: OwnedPart, active: bool) -> None:
        """Add my own values, if they are fit to be added."""
        source = self.own.source if active and await self.own.is_sound() else None
        self.wiring.transport.post(lambda: part.merge.settle(source))

    async def _oversee(self, part: OwnedPart, who: Set[PeerId]) -> None:
        """Give up on who of these is too late or stands still.

        Not on everybody: where nothing comes in at all the others find me at fault, rightly, or
        themselves, and then they bring it once more.
        """
        now, merge, plan = self.wiring.now, part.merge, part.plan
        size = len(merge.result)
        doubtful = self.listener.doubtful()
        lateness = Lateness(now(), plan.patience_s, plan.expected_s, size, doubtful)
        while waiting := merge.waits_for() & who:
            if now() >= lateness.deadline and merge.empty:
                lateness = Lateness(now(), plan.patience_s, plan.expected_s, size, doubtful)
            arrived = dict(merge.arrived)
            for peer, why in lateness.late(now(), waiting, arrived, merge.slices_in).items():
                self._give_up(part, peer)
                self.listener.refused(peer, why)
            left = lateness.deadline - now()
            await asyncio.sleep(min(plan.patience_s / 8, left) if left > 0 else plan.patience_s)

    def _give_up(self, part: OwnedPart, peer: PeerId) -> None:
        self.wiring.transport.post(lambda: part.merge.give_up(peer))

    # --- through relays --------------------------------------------------------------------------

    def sum_reached(self, relay: PeerId, header: Transfer) -> Transfer:
        """How much of a group's sum is in. Raises RemoteRefused ``late``."""
        _, merge = self._joint(relay, header)
        return dataclasses.replace(header, done=merge.elements_by(relay))

    async def take_sum(self, relay: PeerId, header: Transfer, incoming: Incoming) -> None:
        """Take the sum of a group. Raises RemoteRefused ``late`` when it is not wanted."""
        part, merge = self._joint(relay, header)
        if header.codec != part.plan.codec:
            raise Malformed("a sum in another codec than planned")
        if header.done > merge.elements_by(relay):
            raise Malformed("a sum that begins behind what is here")
        drain = SumDrain(merge, relay, chunk_at(self.wiring.codec, header))
        patience = merged_patience_s(part.plan.patience_s, part.plan.expected_s)
        await self.transfers.receive(relay, header, incoming, drain, patience)

    def give(self, peer: PeerId, header: Transfer) -> None:
        """A member asks for a part that its relay does not pass on."""
        part = self._parts.get((header.start, header.stop, self.me, header.basis))
        if part is None:
            raise RemoteRefused("late", "not merged here")
        part.asked.add(peer)
        if part.merge.merged:
            self._spread(part)

    def _joint(self, relay: PeerId, header: Transfer) -> tuple[OwnedPart, JointMerge]:
        part = self._parts.get((header.start, header.stop, self.me, header.basis))
        if part is None or not isinstance(part.merge, JointMerge) or not part.merge.brings(relay):
            raise RemoteRefused("late", "this sum is not expected any more")
        return part, part.merge

    async def _oversee_relays(self, part: OwnedPart, merge: JointMerge) -> None:
        """Drop relays that are too late or stand still."""
        now, plan = self.wiring.now, part.plan
        patience = relay_patience_s(plan.patience_s, plan.expected_s)
        lateness = Lateness(
            now(), patience, plan.expected_s, len(merge.result), what="its group's slice"
        )
        while waiting := merge.waits_for_relays():
            arrived = dict(merge.arrived)
            for relay, why in lateness.late(now(), waiting, arrived, merge.relays_done).items():
                self._drop(part, relay, why)
            await asyncio.sleep(plan.patience_s / 8)

    def _drop(self, part: OwnedPart, relay: PeerId, why: RemoteProtocolError) -> None:
        merge = part.merge
        if isinstance(merge, JointMerge):
            self.wiring.transport.post(lambda: merge.drop(relay, why))

    def _dropped(
        self, part: OwnedPart, relay: PeerId, members: tuple[PeerId, ...], why: RemoteProtocolError
    ) -> None:
        """A relay is not waited for with these any more: they are to bring their slices."""
        if self.transfers.closed:
            return
        self.listener.refused(relay, why)
        for peer in members:
            self.transfers.start(self._ask_for(part, peer))
        if members:
            part.overseers.append(self.transfers.start(self._oversee(part, set(members))))

    async def _ask_for(self, part: OwnedPart, peer: PeerId) -> None:
        reached = part.merge.reached(peer)
        header = dataclasses.replace(part.header, done=part.merge.elements(peer))
        try:
            await self.wiring.transport.call(
                peer, "bring", header.encode(), timeout=part.plan.patience_s
            )
        except (TransportError, RemoteProtocolError) as error:  # as the relay itself may be
            if part.merge.reached(peer) == reached:
                self._give_up(part, peer)
                self.listener.refused(peer, RemoteProtocolError.of("does not answer", error))

    # --- the merged part -------------------------------------------------------------------------

    def _seal(self, part: OwnedPart, loop: asyncio.AbstractEventLoop) -> None:
        """The last chunk is merged: state what came out. Runs where data is handled."""
        header, merge = part.header, part.merge
        contributors = part.plan.contributors
        counts = pack_counts([merge.counted(c.peer) for c in contributors])
        unsigned = result_of(header, self.me, merge.digest(), counts)
        result = sign_result(self.wiring.identity, header.run, unsigned)
        merge.seal(trailer_of(result, len(contributors)))
        if isinstance(merge, WeighedMerge):
            self.shown[header.start, header.stop] = merge.shown()
        _tell(loop, lambda: self.held(result, merge.result))

    def _spread(self, part: OwnedPart) -> None:
        """Stream a part to everybody whom it is not on its way to, starting behind myself."""
        if self.transfers.closed:
            return
        roster = part.plan.roster
        at = roster.index(self.me) if self.me in roster else 0
        relayed = part.paths.relayed - part.asked
        for peer in roster[at + 1 :] + roster[:at]:
            running = part.sending.get(peer)
            if peer in relayed or peer == self.me:
                continue
            if running is None or running.done():
                part.sending[peer] = self.transfers.start(
                    self._send(part, peer, again=running is not None)
                )

    async def _send(self, part: OwnedPart, peer: PeerId, *, again: bool) -> None:
        """Stream a part to a member; to one that is not there yet only once it is.

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
                lambda first: MergedFeed(merge, first, trailer),
                patience,
                ask=again or self.listener.behind(peer),
            )
        except (TransportError, RemoteProtocolError):  # if it lives, it fetches it from anybody
            if group := set(part.paths.passed_on.get(peer, ())) - part.asked:
                part.asked |= group
                self._spread(part)


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Run something on the event loop, from where data is handled."""
    with contextlib.suppress(RuntimeError):  # the loop has ended, and the node with it
        loop.call_soon_threadsafe(callback)
