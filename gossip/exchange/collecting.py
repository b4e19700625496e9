"""Collecting the slices of a part and merging them chunk by chunk: for owners and relays alike.

The arithmetic is :class:`gossip.exchange.merging.PartMerge`, which runs where the transport handles
data. Here, on the event loop, is what happens once for a part and not for each chunk: who may bring
a slice, and when to give up on a contributor, because it is dark or much slower than it has
announced (:class:`gossip.exchange.lateness.Lateness`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from gossip.exchange.bodies import chunk_at
from gossip.exchange.buffers import Whole
from gossip.exchange.collected import CollectedPart
from gossip.exchange.lateness import Lateness
from gossip.exchange.listener import ExchangeListener
from gossip.exchange.merging import Contributions, PartMerge
from gossip.exchange.routing import STRAIGHT, Paths
from gossip.exchange.slicing import OwnContribution, shares
from gossip.exchange.transfers import Transfers
from gossip.plans.mix import Mix
from gossip.plans.validity import PartKey
from gossip.wiring import Wiring
from protocols.errors import Malformed, RemoteRefused
from protocols.identity import PeerId
from protocols.messages import Plan, TransferHeader
from protocols.transport import Incoming


@dataclass
class Collecting(ABC):
    """The parts of one round whose slices come to this member."""

    wiring: Wiring
    transfers: Transfers
    own: OwnContribution
    listener: ExchangeListener
    whole: Whole
    mix: Mix
    _parts: dict[PartKey, CollectedPart] = field(default_factory=dict, kw_only=True)

    @property
    def me(self) -> PeerId:
        return self.wiring.identity.peer_id

    def work(
        self, key: PartKey, header: TransferHeader, plan: Plan, paths: Paths = STRAIGHT
    ) -> None:
        """Merge this part by the plan, or go on with it; it may expect fewer contributors now."""
        expected = {c.peer for c in plan.contributors if c.active}
        part = self._parts.get(key)
        if part is None:
            self._parts[key] = self._begin(key, header, plan, expected, paths)
            return
        self._renew(part, plan, paths)
        for peer in part.merge.awaited() - expected:  # else a relay that gives it up seems at fault
            self._give_up(part, peer)
        if part.merge.merged:
            self._spread(part)  # there is a new plan: not everybody seems to have it

    def _end(self, key: PartKey) -> CollectedPart | None:
        """Let go of a part; returns it, if there was one."""
        part = self._parts.pop(key, None)
        if part is None:
            return None
        for task in part.sending.values():
            task.cancel()
        self._abandon(part)
        part.sending.clear()
        part.overseers.clear()  # a cancelled task keeps its frame alive, and so the part
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
        self.wiring.transport.post(lambda: on_loop(loop, passed.set))
        await passed.wait()
        for part in self._parts.values():
            part.overseers.clear()  # a cancelled task keeps its frame alive, and so the part
        self._parts.clear()

    # --- slices ----------------------------------------------------------------------------------

    def reached(self, sender: PeerId, header: TransferHeader) -> TransferHeader:
        """How much of a contributor's slice is in. Raises RemoteRefused ``late``."""
        merge = self._open_to(sender, header).merge
        return dataclasses.replace(header, done=merge.elements(sender))

    async def take(self, sender: PeerId, header: TransferHeader, incoming: Incoming) -> None:
        """Take a contributor's slice. Raises RemoteRefused ``late`` when it is not wanted."""
        part = self._open_to(sender, header)
        if header.codec != part.plan.codec:
            raise Malformed("a slice in another codec than planned")
        if incoming.length == 0:
            self._give_up(part, sender)
            return
        drain = part.merge.drain(sender, chunk_at(self.wiring.codec, header))
        await self.transfers.receive(sender, header, incoming, drain, part.plan.patience_s)

    def _open_to(self, sender: PeerId, header: TransferHeader) -> CollectedPart:
        part = self._parts.get((header.start, header.stop, self.me, header.basis))
        if part is None or not part.merge.open_to(sender):
            raise RemoteRefused("late", "this slice is not expected any more")
        if header.done > part.merge.elements(sender):
            raise Malformed("a slice that begins behind what is here")
        return part

    def _abandon(self, part: CollectedPart) -> None:
        for overseer in part.overseers:
            overseer.cancel()
        self.wiring.transport.post(part.merge.close)

    def _begin(
        self, key: PartKey, header: TransferHeader, plan: Plan, expected: set[PeerId], paths: Paths
    ) -> CollectedPart:
        loop = asyncio.get_running_loop()
        limits = {c.peer: self.mix.limit(c, plan.codec) for c in plan.contributors}
        contributions = Contributions(
            self.me,
            shares(plan.contributors),
            expected,
            scales={c.peer: c.scale for c in plan.contributors},
            limits={peer: limit for peer, limit in limits.items() if limit is not None},
        )
        part: CollectedPart
        merge = self._merge_for(key, header, plan, paths, lambda: part)(
            self.wiring.codec.named(plan.codec),
            key[0],
            key[1],
            contributions,
            whole=self.whole,
            post=self.wiring.transport.post,
            begun=lambda: on_loop(loop, lambda: self._spread(part)),
            finished=lambda: self._seal(part, loop),
        )
        part = CollectedPart(key, header, plan, merge, paths, drafted=plan.draft)
        self.transfers.start(self._contribute(part, self.me in expected))
        part.overseers.append(self.transfers.start(self._oversee(part, merge.waits_for())))
        return part

    def _renew(self, part: CollectedPart, plan: Plan, paths: Paths) -> None:
        """Another plan goes on with a part."""
        part.plan, part.paths = plan, paths

    async def _contribute(self, part: CollectedPart, active: bool) -> None:
        """Add my own values, if they are fit to be added."""
        source = self.own.source if active and await self.own.is_sound() else None
        self.wiring.transport.post(lambda: part.merge.settle(source))

    async def _oversee(self, part: CollectedPart, who: Set[PeerId]) -> None:
        """Give up on contributors of ``who`` that are too late or stand still.

        But if nothing at all has come by the deadline, the clock starts anew: then I am at fault,
        or the contributors' links are, and they send their slices again.
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

    def _give_up(self, part: CollectedPart, peer: PeerId) -> None:
        self.wiring.transport.post(lambda: part.merge.give_up(peer))

    # --- where owners and relays differ ----------------------------------------------------------

    @abstractmethod
    def _merge_for(
        self,
        key: PartKey,
        header: TransferHeader,
        plan: Plan,
        paths: Paths,
        part: Callable[[], CollectedPart],
    ) -> Callable[..., PartMerge]:
        """How a part of this plan is merged; ``part`` gives it once it has begun."""

    @abstractmethod
    def _seal(self, part: CollectedPart, loop: asyncio.AbstractEventLoop) -> None:
        """The last chunk is merged. Runs where data is handled."""

    @abstractmethod
    def _spread(self, part: CollectedPart) -> None:
        """Stream what is merged to everybody who is to have it from me."""


def on_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Run something on the event loop, from where data is handled."""
    with contextlib.suppress(RuntimeError):  # the loop has ended, and the node with it
        loop.call_soon_threadsafe(callback)
